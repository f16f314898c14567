"""Records to tables, pages and pictures; and that README says what bench/results say."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hortus import bench
from hortus.bench import plots, report
from hortus.bench.measure import summary
from hortus.bench.pace import Load
from hortus.bench.results import Record, append, command, cosines, read, table

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "bench" / "results").glob("*.jsonl"))


def line(suite, target="serve", *, batch=1, tokens=16, **values):
    return Record(suite=suite, target=target, model="m", hardware="Chip, 2 cores", batch=batch, tokens=tokens, **values)


SAMPLE = [
    *[line("latency", t, tokens=n, clients=1, median_ms=ms * n, p99_ms=2.0 * ms * n, tokens_per_s=1000 / ms, cosine=0.99999)
      for t, ms in (("serve", 0.1), ("infinity", 0.3)) for n in (128, 512)],
    *[line("concurrency", t, clients=c, median_ms=1.0, p99_ms=2.0, requests_per_s=100.0 * c)
      for t in ("serve", "infinity") for c in (1, 2, 4)],
    *[line("arrivals", clients=1, median_ms=1.0 + x, p99_ms=3.0 + x, requests_per_s=x, offered_per_s=x,
           note=f"over HTTP; {x / 10:.0f}% of the best; sent late") for x in (100.0, 200.0)],
    *[line("graphs", at_s=x / 2, hit_rate=x / (x + 1)) for x in range(1, 5)],
    line("mixed", median_ms=1.0, p99_ms=2.0, requests_per_s=5.0, note="queries alone; over HTTP"),
    line("mixed", median_ms=9.0, p99_ms=22.0, requests_per_s=5.0, note="queries beside 2 bulk clients; over HTTP"),
    line("latency", "mine", tokens=128, clients=1, median_ms=7.0, p99_ms=9.0, tokens_per_s=9000.0),  # of no colour of ours
    line("start", batch=None, tokens=None, median_ms=900.0),
    line("latency", tokens=128, clients=1, median_ms=14.0, p99_ms=20.0, tokens_per_s=9000.0),  # a second run
]  # fmt: skip


def test_percentiles_and_rounds():
    rounds = [Load(np.arange(1.0, 101.0), 10.0, 1.0), Load(np.arange(101.0, 201.0), 20.0, 2.0)]
    s = summary(rounds)
    assert s.median_ms == 100.5
    assert s.p99_ms == pytest.approx(np.percentile(np.arange(1.0, 201.0), 99))
    assert s.requests_per_s == pytest.approx((100 / 10 + 100 / 20) / 2)
    assert s.answers == 200
    assert s.spread == pytest.approx((150.5 - 50.5) / 100.5)
    assert s.best_ms == 50.5
    assert s.client_cores == pytest.approx(0.1)
    assert summary([Load(np.zeros(0), 0.0)]).median_ms is None
    # What had no good answer is later than any that had one, not left out.
    for failures, p50, p99 in ((1, 51, 100), (2, 52, None), (90, 96, None), (101, None, None)):
        s = summary([Load(np.arange(1.0, 101.0), 10.0, failed={429: failures})])
        assert (s.median_ms, s.p99_ms, s.failed) == (p50, p99, {429: failures})
        assert s.best_ms == p50


def test_cosines_see_what_is_not_finite():
    a = np.array([[1, 0], [1, 1], [np.nan, 0]], np.float32)
    got = cosines(a, np.array([[2, 0], [1, -1], [1, 0]], np.float32))
    assert got[:2] == pytest.approx([1, 0])
    assert np.isnan(got[2])


def test_records_survive_the_file(tmp_path):
    file = tmp_path / "x.jsonl"
    append(file, SAMPLE)
    append(file, SAMPLE[:1])
    back = read([file])
    assert len(back) == len(SAMPLE) + 1
    assert back[0].cosine == 0.99999
    assert (back[0].suite, back[0].median_ms, back[0].date) == ("latency", SAMPLE[0].median_ms, SAMPLE[0].date)
    assert "hit_rate" not in json.loads(file.read_text().splitlines()[0])  # only where it means something
    file.write_text('{"suite": "kernels"}\n{"target": "x", "spede": 1}\n')
    with pytest.raises(ValueError, match=r"x.jsonl:2: unknown field spede"):
        read([file])
    file.write_text("{\n")
    with pytest.raises(ValueError, match="not JSON"):
        read([file])


def test_a_file_of_results_stays_one(tmp_path):
    """Whatever its last line is, and whatever a figure is: a line that cannot be read would cost the whole file."""
    file = tmp_path / "x.jsonl"
    append(file, SAMPLE[:1])
    file.write_text(file.read_text().rstrip("\n"))
    append(file, [line("cpu", median_ms=2.0, ratio=float("inf"), p99_ms=float("nan"))])
    append(file, SAMPLE[:1])
    assert [(r.median_ms, r.ratio, r.p99_ms) for r in read([file])][1] == (2.0, None, None)
    assert len(read([file])) == 3
    append(Path("/dev/stderr"), SAMPLE[:1])  # a pipe, which ends nowhere


def test_results_hold_no_secret_and_a_command_that_can_be_repeated():
    words = [
        "latency",
        "--target",
        "serve:--api-keys K1 --gateways 2",
        "--header",
        "authorization: Bearer K2",
        "--header=x-key:K3",
    ]
    shown = command(words)
    assert not any(key in shown for key in ("K1", "K2", "K3"))
    assert shlex.split(shown)[2:5] == ["latency", "--target", "serve:--api-keys ... --gateways 2"]
    assert shlex.split(shown)[5:] == ["--header", "authorization: ...", "--header=x-key: ..."]


def test_the_latest_run_of_a_case_counts_and_the_spread_is_told():
    newest = {report.case(r): r for g in report.groups(SAMPLE) for r in g.records}
    assert newest[report.case(SAMPLE[0])].median_ms == 14.0
    [(record, spread, best)] = report.spreads(SAMPLE)
    assert (record.tokens, spread, best) == (128, pytest.approx(14 / 12.8 - 1), None)
    twice = [replace(SAMPLE[0], best_ms=ms) for ms in (12.0, 12.3)]
    [(_, spread, best)] = report.spreads(twice)
    assert (spread, best) == (0, pytest.approx(0.025))
    assert report.page(twice, {}).split()[-4:] == ["0.0%", "|", "2.5%", "|"]
    assert len(newest) == len(SAMPLE) - 1


def test_number_formats_do_not_stand_in_one_picture():
    one = [replace(r, dtype="bfloat16") for r in SAMPLE]
    unknown = replace(SAMPLE[0], target="openai", dtype=None)
    groups = report.groups([*one, replace(SAMPLE[0], dtype="fp8", median_ms=1.0), unknown])
    assert [(g.dtype, g.title, g.slug) for g in groups] == [
        ("bfloat16", "m on Chip, 2 cores, bfloat16", "chip-2-cores-m-bfloat16"),
        ("fp8", "m on Chip, 2 cores, fp8", "chip-2-cores-m-fp8"),
    ]
    assert {r.dtype for r in groups[0].records} == {"bfloat16", None}
    assert [r.median_ms for r in groups[1].records] == [1.0]


def test_page_and_pictures(tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    append(file, SAMPLE)
    assert report.main([str(file), "--to", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    page = (tmp_path / "a" / "report.md").read_text()
    for kind in ("latency", "throughput", "clients", "arrivals", "graphs"):
        stem = f"{kind}-chip-2-cores-m"
        assert f"![{stem}]({stem}.svg)" in page
        svg = (tmp_path / "a" / f"{stem}.svg").read_text()
        assert ">m on Chip, 2 cores<" in svg
        assert (tmp_path / "a" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    assert "queries beside 2 bulk clients" in page
    assert "infinity | 1 x 512" in page


def test_names_are_names_whatever_they_mean_to_markdown_matplotlib_or_files(tmp_path, capsys):
    names = ("a|b", "$x_{$", "_mine", "a b/c", "a-b c", "n" * 300)
    file = tmp_path / "x.jsonl"
    append(file, [replace(r, target=name, model=name) for r in SAMPLE if r.target == "serve" for name in names])
    assert report.main([str(file), "--to", str(tmp_path / "a")]) == 0
    page = (tmp_path / "a" / "report.md").read_text(encoding="utf-8")
    assert "a\\|b" in page
    pictures = re.findall(r"!\[.*\]\((latency.*)\)", page)
    assert len({*pictures}) == len(names), "a picture each"
    for name, picture in zip(names, pictures, strict=True):
        svg = (tmp_path / "a" / picture).read_text(encoding="utf-8")
        assert svg.count(f"{name} on Chip") == 1
        assert re.search(f">.?{re.escape(name)}<", svg), "the legend"
    shown = plots._colours([line("latency", name) for name in ("serve", "hortus-http", *"abcdef")])
    assert len({*shown.values()}) == len(shown), "told apart"
    assert shown["hortus-http"] == plots._COLOURS["serve"]
    capsys.readouterr()
    (tmp_path / "a" / "report.md").unlink()
    (tmp_path / "a" / "report.md").mkdir()
    append(tmp_path / "one.jsonl", SAMPLE[:1])
    assert bench.main(["report", str(tmp_path / "one.jsonl"), "--to", str(tmp_path / "a")]) == 1
    assert "hortus bench: --to " in capsys.readouterr().err


def test_the_latest_is_by_date_and_what_was_not_answered_is_told():
    old, new = (line("latency", median_ms=ms, date=f"2026-01-0{ms:.0f}T00:00:00+00:00") for ms in (1.0, 2.0))
    assert [g.records for g in report.groups([new, old])] == [(new,)]
    refused = line(
        "arrivals", median_ms=1.0, offered_per_s=9.0, note="over HTTP; not answered with 200: 3 x 429; 50% of the best"
    )
    assert "| 3 x 429 " in report.page([refused], {})


def test_committed_results_can_be_read_and_told():
    records = read(RESULTS)
    assert len(records) > 100
    page = report.page(records, {})
    assert "NVIDIA H200" in page
    assert table(records[:3]).count("\n") == 4


def test_readme_says_what_the_results_say():
    text = (ROOT / "README.md").read_text()
    assert report.with_figures(text, read(RESULTS)) == text, "run: hortus bench readme"


def test_figures():
    rows = [
        Record(suite="engine", target=t, model="qwen3-0.6b-random", hardware="NVIDIA H200", batch=1, tokens=128,
               median_ms=ms, note=note)
        for t, ms, note in (
            ("hortus", 1.5, "replay"), ("hortus", 1.25, "replay"), ("hortus", 9.0, "eager"), ("vllm", 7.0, "peer; x")
        )
    ]  # fmt: skip
    text = report.with_figures(f"before\n{report.BEGIN}old{report.END}\nafter", rows)
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert [w.strip() for w in text.splitlines()[5].split("|")] == ["", "1 x 128 tokens", "1.25 ms", "7 ms", "", ""]
    with pytest.raises(ValueError, match="README has no lines"):
        report.with_figures("nothing", rows)
