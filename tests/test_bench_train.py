"""bench train: the same batch in every row, medians, and a table as data."""
import json
import subprocess
import sys

import pytest

from minidist import BadInput
from minidist.bench import train as bench_train
from tests.mpi import need_mpi



def asked(*words):
    return bench_train.parser().parse_args(["--preset", "lesson", *words])


@pytest.mark.parametrize("ranks, counts", [("1,2", [1, 2]), ("4,2,2", [2, 4]), ("8", [8])])
def test_wanted_ranks(ranks, counts):
    assert bench_train.wanted(asked("--ranks", ranks)) == counts


@pytest.mark.parametrize("ranks, words", [("0,2", "use 1 to 8 ranks"), ("9", "use 1 to 8 ranks"),
                                          ("two", "such as 1,2,4")])
def test_ranks_that_cannot_be_are_refused(ranks, words):
    with pytest.raises(BadInput, match=words):
        bench_train.wanted(asked("--ranks", ranks))


@pytest.mark.parametrize("words, counts, other", [
    ("", [1, 2, 4], "DDP"), ("--zero 3", [1, 2, 4], "fully_shard"),
    ("--pp 2", [1, 2], "pipelining"), ("--pp 2 --schedule zb-h1", [1, 2], None),
    ("--pp 2 --dp 2", [1, 4], None), ("--pp 2 --ranks 1,2,4", [1, 2, 4], None),
    ("--recompute blocks --precision fp16", [1, 2, 4], None),
    ("--compress topk:0.1 --ranks 2", [2], None),
    ("--tp 2", [1, 2], None), ("--experts 4 --ep 2 --ranks 1,2", [1, 2], None)])
def test_flags_of_strategies_reach_the_jobs(words, counts, other):
    args = asked(*words.split())
    assert bench_train.wanted(args) == counts and bench_train.equal_of(args) == other
    for ranks, given in ((1, asked()), (counts[-1], args)):
        worker = asked(*bench_train.passed_on(args, ranks))
        assert all(getattr(worker, name) == getattr(args, name) for name in bench_train.MODEL)
        assert all(getattr(worker, name) == getattr(given, name) for name in bench_train.SPREAD)


@pytest.mark.parametrize("words, message", [
    ("--schedule gpipe", "use --pp 2 or more"), ("--chunks 2", "use --pp 2 or more"),
    ("--pp 2 --zero 2", "use --zero 1, or leave out --pp"), ("--sp", "use --tp 2"),
    ("--ep 2", "--ep is about experts"),
    ("--pp 2 --ranks 1,3", "3 ranks are no multiple of the 2"),
    ("--pp 2 --batch 4", "4 sequences do not fill 8 micro-batches; use --microbatches 1 to 4")])
def test_flags_that_do_not_go_together_are_refused(words, message):
    with pytest.raises(BadInput, match=message):
        bench_train.wanted(asked(*words.split()))


def test_rows_are_medians_of_the_same_global_batch():
    laps = {(1, "ours"): [4.0, 2.0, 9.0], (2, "ours"): [2.0, 2.5, 1.0], (2, "torch"): [4.0, 5.0]}
    one, two = bench_train.table(asked(), [1, 2], laps)
    assert (one["tokens_per_s"], one["scaling"], one["torch_ms"]) == (8 * 16 / 4, 1.0, None)
    assert (two["tokens_per_s"], two["scaling"]) == (64.0, 2.0)
    assert (two["step_min_ms"], two["step_max_ms"]) == (1000.0, 2500.0)
    assert two["ratio_to_torch"] == pytest.approx(2.0 / 4.5)


def test_the_ideal_pipeline_shares_one_step_and_has_its_bubble():
    laps = {(1, "ours"): [8.0], (2, "ours"): [5.0]}
    one, two = bench_train.table(asked("--pp", "2", "--microbatches", "8"), [1, 2], laps)
    assert one["ideal_ms"] is None and two["ideal_ms"] == pytest.approx(1e3 * 4 * 9 / 8)
    assert two["ratio_to_ideal"] == pytest.approx(5 / 4.5)
    assert bench_train.table(asked(), [1, 2], laps)[1]["ideal_ms"] is None


def test_the_command_runs_its_jobs(tmp_path):
    need_mpi()
    data = tmp_path / "bench.json"
    run = [sys.executable, "-m", "minidist.bench", "train", "--preset", "lesson", "--ranks", "1,2",
           "--steps", "1", "--rounds", "1", "--alone", "--json", str(data)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(data.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["scaling"] > 0 for row in rows)
