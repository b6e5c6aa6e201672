"""bench train: the same batch in every row, medians, and a table as data."""
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minidist import BadInput
from minidist.bench import train as bench_train
from tests.mpi import need_mpi

ARGS = SimpleNamespace(preset="lesson", batch=8, ranks="1,2")


@pytest.mark.parametrize("ranks, counts", [("1,2", [1, 2]), ("4,2,2", [2, 4]), ("8", [8])])
def test_wanted_ranks(ranks, counts):
    assert bench_train.wanted(SimpleNamespace(preset="nano", batch=8, ranks=ranks)) == counts


@pytest.mark.parametrize("ranks, words", [("0,2", "use 1 to 8 ranks"), ("9", "use 1 to 8 ranks"),
                                          ("two", "such as 1,2,4")])
def test_ranks_that_cannot_be_are_refused(ranks, words):
    with pytest.raises(BadInput, match=words):
        bench_train.wanted(SimpleNamespace(preset="nano", batch=8, ranks=ranks))


def test_rows_are_medians_of_the_same_global_batch():
    laps = {(1, "ours"): [4.0, 2.0, 9.0], (2, "ours"): [2.0, 2.5, 1.0], (2, "torch"): [4.0, 5.0]}
    one, two = bench_train.table(ARGS, [1, 2], laps)
    assert (one["tokens_per_s"], one["scaling"], one["torch_ms"]) == (8 * 16 / 4, 1.0, None)
    assert (two["tokens_per_s"], two["scaling"]) == (64.0, 2.0)
    assert (two["step_min_ms"], two["step_max_ms"]) == (1000.0, 2500.0)
    assert two["ratio_to_torch"] == pytest.approx(2.0 / 4.5)


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
