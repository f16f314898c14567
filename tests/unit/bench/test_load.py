"""Who sends when, on a clock that a test turns; and the HTTP wire against a server that misbehaves."""

import os
import signal
import socket
import threading

import numpy as np
import pytest

from hortus.bench import pace
from hortus.bench.load import Clients, HttpWire, Job, http_request
from hortus.bench.pace import Closed, ClosedPace, Load, Open, OpenPace, checked, drive, poisson
from hortus.bench.suites import _full


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Queue:
    """A server that takes one request at a time, `service(n)` seconds each, behind `connections` connections."""

    def __init__(self, clock, service, connections=1000):
        self.clock, self.service, self.connections = clock, service, connections
        self.done, self.free_at, self.most = [], 0.0, 0

    def free(self):
        return len(self.done) < self.connections

    def send(self, number):
        self.free_at = max(self.free_at, self.clock.now) + self.service(number)
        self.done.append((self.free_at, number))
        self.most = max(self.most, len(self.done))
        return number

    def poll(self, timeout_s):
        if not self.done or self.done[0][0] > self.clock.now + timeout_s:
            self.clock.now += timeout_s
            return
        at, number = self.done.pop(0)
        self.clock.now = max(self.clock.now, at)
        yield number, 200


def test_poisson_times_are_poisson():
    times = np.array(poisson(200, 50, seed=1))
    assert times.min() >= 0
    assert times.max() < 50
    assert len(times) == pytest.approx(10_000, rel=0.05)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.1)  # of an exponential, as large as its mean
    assert poisson(200, 50, seed=1) == poisson(200, 50, seed=1) != poisson(200, 50, seed=2)


def test_closed_loops_send_when_answered():
    clock = Clock()
    seen = drive(ClosedPace(10.0), Queue(clock, lambda n: 0.5, connections=1), clock)
    assert len(seen.latencies_ms) == 20
    assert seen.latencies_ms == pytest.approx([500] * 20)
    assert seen.seconds == pytest.approx(10)


@pytest.mark.parametrize("clients", [1, 3])
def test_a_closed_run_shorter_than_an_answer_has_one_of_each_client(clients):
    clock = Clock()
    clock.now = 0.2  # the client woke up late
    seen = drive(Closed(clients, 0.1).pace(), Queue(clock, lambda n: 5.0, connections=clients), clock)
    assert seen.latencies_ms == pytest.approx([5000 * (i + 1) for i in range(clients)])


def test_open_loops_do_not_wait_for_a_server_that_stalls():
    """Coordinated omission: requests that fell due while the server stood still count from then on."""
    clock = Clock()
    times = [i / 10 for i in range(100)]
    queue = Queue(clock, lambda n: 2.0 if n == 20 else 0.001)  # one stall of two seconds
    seen = drive(OpenPace(times, 10), queue, clock)
    assert len(seen.latencies_ms) == 100
    assert queue.most >= 20  # they were sent in time, into the stall
    late = [ms for ms in seen.latencies_ms if ms > 50]
    assert len(late) == 20  # every tenth of a second of it
    assert max(late) == pytest.approx(2000, abs=1)
    assert min(late) == pytest.approx(100, abs=20)
    # A closed loop sees the same stall once.
    clock.now = 0.0
    closed = drive(ClosedPace(10.0), Queue(clock, lambda n: 2.0 if n == 20 else 0.001, connections=1), clock)
    assert sum(ms > 50 for ms in closed.latencies_ms) == 1


def test_requests_that_wait_for_a_connection_count_from_when_they_were_due():
    clock = Clock()
    seen = drive(OpenPace([0.0, 0.0, 0.0], 1), Queue(clock, lambda n: 0.3, connections=1), clock)
    assert seen.latencies_ms == pytest.approx([300, 600, 900])
    assert seen.late_ms == pytest.approx([0, 300, 600])


def test_an_open_loop_over_capacity_ends_and_says_what_was_not_answered():
    clock = Clock()
    times = poisson(100, 10, seed=0)
    seen = drive(OpenPace(times, 10), Queue(clock, lambda n: 0.1, connections=50), clock)
    assert seen.seconds == pytest.approx(21, abs=0.5)
    assert len(seen.latencies_ms) + seen.failed[pace.UNANSWERED] == len(times)
    assert len(seen.latencies_ms) == pytest.approx(210, abs=2)


class Wide(Queue):
    """A server that takes all requests at once; one of `service` None is never answered."""

    def send(self, number):
        if (takes := self.service(number)) is not None:
            self.done.append((self.clock.now + takes, number))
            self.done.sort()
        return number


@pytest.mark.parametrize(
    ("times", "service", "answered_per_s"),
    [
        ([i / 100 for i in range(100)], lambda n: 1.0, 100),  # each takes as long as the run, and none waits
        ([i / 100 for i in range(100)], lambda n: None if n == 50 else 0.01, 99),  # one hangs, which stops no other
        ([0.0], lambda n: 0.01, 1),  # one, early
        ([i / 100 for i in range(100)], lambda n: 0.01 * (n + 1), 50),  # a queue
    ],
)
def test_the_rate_of_an_open_loop_is_that_of_its_answers(times, service, answered_per_s):
    clock = Clock()
    plan = Open(100, 1.0)
    seen = drive(OpenPace(times, plan.seconds), Wide(clock, service), clock)
    load = Load(np.array(seen.latencies_ms), plan.lasted(seen), failed=dict(seen.failed))
    assert load.requests_per_s == pytest.approx(answered_per_s, rel=0.02)
    assert _full([load], plan.seconds) == (answered_per_s == 50)


def test_a_server_that_hangs_is_given_up():
    clock = Clock()

    class Silent(Queue):
        def poll(self, timeout_s):
            clock.now += timeout_s + 0.001
            yield from ()

    with pytest.raises(TimeoutError, match="1 requests outstanding"):
        drive(ClosedPace(10.0), Silent(clock, lambda n: 1.0, connections=1), clock)


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_shares_are_the_whole(processes):
    assert sum(s.clients for s in Closed(10, 2.0).shares(processes)) == 10
    assert len(Closed(2, 2.0).shares(processes)) == min(2, processes)
    shares = Open(120, 20.0, seed=3).shares(processes)
    assert sum(s.rate for s in shares) == pytest.approx(120)
    assert len({s.seed for s in shares}) == processes


class Server(threading.Thread):
    """Answers each request on each connection with the bytes of `answers` in turn; None ends the connection."""

    def __init__(self, answers):
        super().__init__(daemon=True)
        self.answers, self.listener = answers, socket.create_server(("127.0.0.1", 0))
        self.address, self.requests = self.listener.getsockname(), []
        self.start()

    def run(self):
        try:
            while True:
                connection, _ = self.listener.accept()
                with connection:
                    self.serve(connection)
        except OSError:
            return

    def serve(self, connection):
        for answer in self.answers:
            data = b""
            while b"\r\n\r\n" not in data or len(data.split(b"\r\n\r\n", 1)[1]) < int(
                data.split(b"content-length: ")[1].split(b"\r")[0]
            ):
                part = connection.recv(65536)
                if not part:
                    return
                data += part
            self.requests.append(data)
            if answer is None:
                return
            for i in range(0, len(answer), 7):  # in crumbs
                connection.sendall(answer[i : i + 7])

    def close(self):
        self.listener.close()


GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


def ask(server, answers):
    wire = HttpWire(server.address, [http_request("h", 1, "/x", b"a" * 100_000, ["x: y"])], 1, fine=True)
    number = iter(range(answers + 1))

    class Count:
        give_up = 5.0

        def take(self, now):
            return now if next(number, answers) < answers else None

        def wait(self, now):
            return 1.0

        def over(self, now):
            return True

    try:
        clock = Clock()
        return drive(Count(), wire, clock)
    finally:
        wire.close()
        server.close()


def test_the_wire_reads_answers_in_crumbs_and_in_chunks():
    server = Server([GOOD, CHUNKED, b"HTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n", GOOD])
    seen = ask(server, 4)
    assert len(seen.latencies_ms) == 3
    assert seen.failed == {429: 1}
    head = server.requests[0].split(b"\r\n\r\n")[0]
    assert head.startswith(b"POST /x HTTP/1.1\r\nhost: h:1\r\n")
    assert b"x: y" in head
    assert len(server.requests[0]) == len(head) + 4 + 100_000


def test_a_connection_that_ends_is_a_failure_and_a_new_one_is_opened():
    seen = ask(Server([GOOD, None]), 4)
    assert len(seen.latencies_ms) == 2
    assert seen.failed == {pace.BROKEN: 2}


def test_a_server_that_closes_after_each_answer_is_measured():
    seen = ask(Server([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx", None]), 3)
    assert len(seen.latencies_ms) == 3


@pytest.mark.parametrize("before", [[], [GOOD]], ids=["first", "after one of a length"])
def test_a_body_that_ends_with_the_connection_is_whole(before):
    seen = ask(Server([*before, b"HTTP/1.1 200 OK\r\n\r\nhello"]), 4)
    assert len(seen.latencies_ms) == 4
    assert not seen.failed, "the connection is not used again"


def test_what_nobody_asked_is_no_answer():
    """An idle connection on which the server says something more is given up, not used twice."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = HttpWire(listener.getsockname(), [b"x"], 2, fine=True)
        wire.connect(1)
        there, _ = listener.accept()
        with there:
            wire.send(0)
            there.sendall(GOOD)
            assert [status for _, status in wire.poll(5)] == [200]
            assert len(wire._free) == 1
            there.sendall(GOOD)
            assert [*wire.poll(5)] == []
            assert not wire._free
        wire.close()


def test_the_host_of_ipv6_stands_in_brackets():
    assert b"\r\nhost: [::1]:80\r\n" in http_request("::1", 80, "/", b"")


def test_client_processes_start_together_and_tell_their_cost():
    server = Server([GOOD] * 100_000)
    request = http_request("127.0.0.1", 1, "/", b"{}")
    try:
        with Clients() as clients:
            ticks = []
            jobs = [Job(*server.address, [request], Closed(1, 0.3))]
            for _ in range(2):  # the same processes again
                [seen] = clients.run(jobs, ticks.append)
                assert len(seen.latencies_ms) > 0
                assert 0 < seen.client_cpu_s < 2
                assert seen.seconds >= 0.3
            assert ticks
            with pytest.raises(RuntimeError, match="a client failed"):
                clients.run([Job("127.0.0.1", 1, [request], Closed(1, 0.1))])
    finally:
        server.close()


def test_ctrl_c_in_a_terminal_leaves_the_clients_to_who_started_them(capfd):
    """It reaches them too, starting or started, and must neither end them nor make them speak."""
    server = Server([GOOD] * 100_000)
    job = Job(*server.address, [http_request("127.0.0.1", 1, "/", b"{}")], Closed(1, 0.1))
    try:
        with Clients() as clients:
            clients._idle.append(clients._worker())
            for _ in range(2):
                os.kill(clients._idle[0][0].pid, signal.SIGINT)
                assert len(clients.run([job])[0].latencies_ms) > 0
    finally:
        server.close()
    assert capfd.readouterr().err == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_joined_loads():
    a = Load(np.array([1.0, 2.0]), 2.0, 0.5, {429: 1})
    b = Load(np.array([3.0]), 1.0, 0.25, {429: 2, 0: 1})
    side, after = Load.join([a, b]), Load.join([a, b], after_another=True)
    assert (side.seconds, after.seconds) == (2.0, 3.0)
    assert side.requests_per_s == 1.5
    assert side.client_cpu_s == 0.75
    assert side.failed == {429: 3, 0: 1}
    with pytest.raises(RuntimeError, match="429"):
        checked(side)
