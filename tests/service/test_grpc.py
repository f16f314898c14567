"""Ivy's client and Tulip's server over real gRPC: answers, errors, deadlines, cancelling, TLS."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from gateway_server import FOLDER
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_pair import Garden, Tulip, batch, rows_of, start_tulip
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from patience import PATIENCE_S, timed, until

from hortus import errors
from hortus.config import LinkConfig
from hortus.errors import StartError
from hortus.ivy.address import Target
from hortus.ivy.tokenize import Tokenizer
from hortus.protocol import wire
from hortus.protocol.credentials import channel, client_credentials, server_credentials, shown
from hortus.tulip.fake import FakeEngine
from hortus.tulip.server import Server
from hortus.types import TokenBatch

# --- one replica


async def test_answers_are_the_engine_s_whatever_is_in_flight(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    batches = [batch(*range(n, n + 1 + n % 5)) for n in range(200)]
    results = await asyncio.gather(*[replicas.encode(b) for b in batches])
    for b, result in zip(batches, results, strict=True):
        np.testing.assert_array_equal(result.rows, rows_of(b))
    assert tulip.engine.steps < 100, "what arrived together ran together"
    assert next(iter(replicas.links.values())).outstanding == 0


async def test_token_types_travel(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    typed = TokenBatch(batch(1, 2).ids, batch(1, 2).cu_seqlens, np.array([0, 0, 1, 0, 1, 1], np.uint8))
    np.testing.assert_array_equal((await replicas.encode(typed)).rows, rows_of(typed))


async def test_spans_travel_beside_asks_without(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    spans, counts = np.array([[0, 1], [0, 3], [4, 6]], np.int32), np.array([2, 1], np.int32)
    spanned = TokenBatch(batch(1, 2).ids, batch(1, 2).cu_seqlens, None, spans, counts)
    plain = [batch(n) for n in range(3)]
    got = await asyncio.gather(*[replicas.encode(b) for b in (plain[0], spanned, *plain[1:], spanned)])
    for b, result in zip((plain[0], spanned, *plain[1:], spanned), got, strict=True):
        np.testing.assert_array_equal(result.rows, rows_of(b))
    wrong = TokenBatch(batch(1, 2).ids, batch(1, 2).cu_seqlens, None, spans + np.int32(1), counts)
    with pytest.raises(errors.InvalidInput, match="leaves its sequence"):
        await replicas.encode(wrong)


async def test_rows_too_wide_for_one_message_are_sent_in_several(world: Garden, monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 3 * 4 * 384)
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    b = batch(*range(10))
    np.testing.assert_array_equal((await replicas.encode(b)).rows, rows_of(b))


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (TokenBatch.of([[1], []]), errors.InvalidInput),
        (TokenBatch.of([[1] * 600]), errors.TooLong),
        (TokenBatch.of([[1, 40_000]]), errors.InvalidInput),
        (TokenBatch.of([[1, -1]]), errors.InvalidInput),
    ],
)
async def test_the_scheduler_checks_what_enters_and_others_go_on(world: Garden, bad: TokenBatch, kind: type):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    good = asyncio.ensure_future(replicas.encode(batch(1)))
    with pytest.raises(kind):
        await replicas.encode(bad)
    np.testing.assert_array_equal((await good).rows, rows_of(batch(1)))


@timed
async def test_deadline_ends_there_and_here(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    tulip.engine.hold()
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        await replicas.encode(batch(1), deadline=begin + 0.2)
    assert 0.15 < time.monotonic() - begin < 1.5
    with pytest.raises(errors.DeadlineExceeded):
        await replicas.encode(batch(1), deadline=time.monotonic() - 1)


async def test_cancelling_drops_what_waits_at_the_scheduler(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    tulip.engine.hold()
    running = asyncio.ensure_future(replicas.encode(batch(1)))
    await until(lambda: tulip.engine.steps == 1)
    waiting = [asyncio.ensure_future(replicas.encode(batch(n))) for n in range(5)]
    queued = tulip.metrics.registry.get_sample_value
    await until(lambda: queued("hortus_queue_sequences") == 5)
    for task in waiting:
        task.cancel()
    await until(lambda: queued("hortus_queue_sequences") == 0)
    assert queued("hortus_dropped_sequences_total", {"reason": "cancelled"}) == 5
    tulip.engine.release()
    assert (await running).rows.shape == (1, 384)


async def test_a_gateway_that_goes_takes_its_work_along(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    tulip.engine.hold()
    first = asyncio.ensure_future(replicas.encode(batch(1)))
    await until(lambda: tulip.engine.steps == 1)
    tasks = [first, *[asyncio.ensure_future(replicas.encode(batch(n))) for n in range(5)]]
    queued = tulip.metrics.registry.get_sample_value
    await until(lambda: queued("hortus_queue_sequences") == 5)
    await replicas.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, errors.NotReady)
    await until(lambda: queued("hortus_queue_sequences") == 0)


async def test_a_failed_step_fails_its_own(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    tulip.engine.fail_id = 77
    with pytest.raises(errors.EngineError, match="the engine failed"):
        await replicas.encode(batch(77))
    assert (await replicas.encode(batch(78))).rows.shape == (1, 384)


async def test_large_answers_pass(world: Garden):
    tulip = await world.tulip(FakeEngine.like(FOLDER, delay_s=0))
    replicas = await world.replicas(tulip.address)
    many = TokenBatch.of([[n % 1000] for n in range(20_000)])  # 30 MB of rows
    np.testing.assert_array_equal((await replicas.encode(many)).rows, rows_of(many))


@timed
async def test_a_gateway_that_does_not_read_holds_up_only_itself(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    many = TokenBatch.of([[n % 1000] for n in range(20_000)])  # 30 MB of answers, each time
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        call = connection.stream_stream(wire.ENCODE)()
        for number in range(1, 9):
            await call.write(wire.pack_asks(wire.Asks([wire.Ask(number, many)])))
            # One after the other, so that none is already in when the stream stops being read.
            await until(
                lambda n=number: (
                    any(s._held for s in tulip.server._streams)
                    or (
                        sum(s for s, _ in tulip.engine.shapes) >= n * len(many)
                        and not any(s._live for s in tulip.server._streams)
                    )
                )
            )
        await until(lambda: any(s._unsent_bytes > wire.MAX_MESSAGE_BYTES for s in tulip.server._streams))
        [stream] = [s for s in tulip.server._streams if s._unsent_bytes]
        await asyncio.sleep(0.3)  # nothing more is to happen
        # Nothing is read meanwhile: to have an answer is not to be held up by that.
        assert (await asyncio.wait_for(replicas.encode(batch(1)), PATIENCE_S)).rows.shape == (1, 384)
        assert stream._unsent_bytes < wire.MAX_MESSAGE_BYTES + 2 * 4 * 384 * len(many), "it is not read any further"
        call.cancel()
    await until(lambda: len(tulip.server._streams) == 1)


async def test_bytes_that_are_no_message_end_the_stream_alone(world: Garden):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        call = connection.stream_stream(wire.ENCODE)()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await call.read()
        assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await replicas.encode(batch(1))).rows.shape == (1, 384)


# --- what a gateway learns


async def test_a_gateway_needs_no_folder(world: Garden, tmp_path):
    tulip = await world.tulip()
    replicas = await world.replicas(tulip.address)
    told = await replicas.describe()
    assert told.info == tulip.engine.info
    here = tmp_path / "model"
    here.mkdir()
    folder = await replicas.folder(here)
    assert (folder.name, folder.max_tokens, folder.prompts) == ("mini", FOLDER.max_tokens, FOLDER.prompts)
    ours, theirs = Tokenizer(folder), Tokenizer(FOLDER)
    text = ["The cat sits on the mat.", "ü \u0000 x"]
    np.testing.assert_array_equal(ours.encode(text).ids, theirs.encode(text).ids)
    ours.close()
    theirs.close()


async def test_only_described_files_are_served(world: Garden):
    tulip = await world.tulip()
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        for path in ("../../etc/passwd", "/etc/passwd", "model.safetensors", ""):
            call = connection.unary_stream(wire.FETCH)(wire.pack_fetch(path))
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await call.read()
            assert e.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_and_reflection(world: Garden):
    tulip = await world.tulip()
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        health = health_pb2_grpc.HealthStub(connection)
        for service in ("", wire.SERVICE):
            got = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert got.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        asks = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=wire.SERVICE),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asks))]
        assert wire.SERVICE in [s.name for s in answers[0].list_services_response.service]
        assert answers[1].file_descriptor_response.file_descriptor_proto


async def test_another_protocol_version_is_refused_by_name(world: Garden):
    tulip = await world.tulip()
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        with pytest.raises(grpc.aio.AioRpcError, match=r"protocol version 9, this scheduler speaks 1"):
            await connection.unary_unary(wire.DESCRIBE)(b"\x08\x09")


# --- secrets


async def test_the_token_is_asked_for(world: Garden):
    tulip = await world.tulip(link_token="s3cret")
    replicas = await world.replicas(tulip.address, link_token="s3cret")
    assert (await replicas.encode(batch(1))).rows.shape == (1, 384)
    without = await world.replicas(tulip.address, up=0, link_token="wrong")
    [link] = without.links.values()
    await until(lambda: "--link-token" in link.why)
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        for call in (
            connection.unary_unary(wire.DESCRIBE)(wire.pack_describe()),
            connection.unary_stream(wire.FETCH)(wire.pack_fetch("config.json")).read(),
            connection.stream_stream(wire.ENCODE)().read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await call
            assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(connection)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """An authority, and certificates for both sides; None of it leaves the test."""
    where = tmp_path_factory.mktemp("pki")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=where, check=True, capture_output=True, timeout=120)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test")
    (where / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("tulip", "ivy"):
        run("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "san",
        )  # fmt: skip
    return where


async def test_mutual_tls(world: Garden, pki):
    def side(name: str, **more: object) -> dict:
        return {"link_ca": f"{pki}/ca.pem", "link_cert": f"{pki}/{name}.pem", "link_key": f"{pki}/{name}.key", **more}

    tulip = await world.tulip(listen="127.0.0.1:0", **side("tulip"))
    port = tulip.address.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost"):
        replicas = await world.replicas(f"{host}:{port}", up=1, **side("ivy"))
        assert (await replicas.encode(batch(1))).rows.shape == (1, 384)
    for link in (
        LinkConfig(replica="x", link_ca=f"{pki}/ca.pem"),  # shows no certificate of its own
        LinkConfig(replica="x"),  # speaks plain text
    ):
        async with channel(f"127.0.0.1:{port}", "localhost", client_credentials(link)) as connection:
            with pytest.raises(grpc.aio.AioRpcError):
                await connection.unary_unary(wire.DESCRIBE)(wire.pack_describe(), metadata=shown(link), timeout=2)


async def test_why_a_link_cannot_be_made_is_told_in_our_flags(world: Garden, pki, monkeypatch):
    mutual = {"link_ca": f"{pki}/ca.pem", "link_cert": f"{pki}/ivy.pem", "link_key": f"{pki}/ivy.key"}
    tls = await world.tulip(listen="127.0.0.1:0", **mutual)
    plain = await world.tulip(listen="127.0.0.1:0", link_token="abc")

    async def said(words: str, tulip: Tulip, **link: object) -> None:
        replicas = await world.replicas(tulip.address, up=0, **link)
        await until(lambda: any(words in told.why for told in replicas.links.values()))

    await said("--link-token", plain)
    await said("no TLS, which --link-ca asks for", plain, **mutual)
    await said("may want TLS (--link-ca)", tls)
    await said("(--link-cert, --link-key)", tls, link_ca=mutual["link_ca"])

    async def elsewhere(place):
        return {Target(f"ipv4:{tls.address}", "other.example")}

    monkeypatch.setattr("hortus.ivy.replicas.resolve", elsewhere)
    await said("not for the name in --replica", tls, **mutual)


def test_half_of_tls_is_a_start_error(pki):
    for wrong in ({"link_cert": "a"}, {"link_key": "a"}, {"link_ca": f"{pki}/ca.pem"}):
        with pytest.raises(StartError, match="--link-"):
            server_credentials(LinkConfig(**wrong))
    for side in (server_credentials, client_credentials):
        with pytest.raises(StartError, match="--link-cert /nowhere"):
            side(LinkConfig(link_cert="/nowhere", link_key="/nowhere"))
    with pytest.raises(StartError, match="--link-ca too"):
        client_credentials(LinkConfig(link_cert=f"{pki}/ivy.pem", link_key=f"{pki}/ivy.key"))


async def test_a_unix_socket_is_taken_over_from_the_dead_alone(tmp_path: Path):
    path = tmp_path / "t"
    first = await start_tulip(f"unix:{path}")
    try:
        inode = path.stat().st_ino
        with pytest.raises(StartError, match="address already in use"):
            await Server(LinkConfig(listen=f"unix:{path}"), None).start()
        assert path.stat().st_ino == inode
    finally:
        await first.stop()
    with socket.socket(socket.AF_UNIX) as killed:  # its file stays
        killed.bind(str(path))
        killed.listen()
    assert path.is_socket()
    second = await start_tulip(f"unix:{path}")
    await second.stop()


async def test_a_port_in_use_is_a_start_error(world: Garden):
    tulip = await world.tulip(listen="127.0.0.1:0")
    with pytest.raises(StartError, match=f"--listen {tulip.address}: address already in use"):
        await world.tulip(listen=tulip.address)


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("127.0.0.1", "expected HOST:PORT"),  # gRPC would take port 443
        ("127.0.0.1:99999", "0 to 65535"),  # and here 34463
        ("unix-abstract:x", "expected HOST:PORT"),
        ("unix:", "no path"),
        (f"unix:/{'x' * 107}", "at most 107 bytes, this one has 108"),
        ("unix:/nowhere/x", "no such file or directory"),
        ("192.0.2.1:0", "cannot assign requested address"),
    ],
)
async def test_where_it_cannot_listen_is_told_with_the_reason(listen: str, why: str):
    server = Server(LinkConfig(listen=listen), None)
    try:
        with pytest.raises(StartError, match=f"--listen .*{why}"):
            await server.start()
    finally:
        await server.close()


def test_a_token_that_no_header_takes_is_a_start_error():
    for token in ("pässwort", "x" * 5000):
        for side in (server_credentials, client_credentials):
            with pytest.raises(StartError, match=r"--link-token.*ASCII.*4096"):
                side(LinkConfig(link_token=token))
