"""The benchmark's command: its table, file and picture; its fit; what it refuses."""
import json
import sys

import numpy as np
import pytest

from minidist.bench import collectives as bench_collectives
from minidist.bench import fit as bench_fit
from minidist.bench.collectives import Row
from minidist.collectives.choice import ALGORITHMS
from minidist.cost import seconds
from tests.mpi import execute

COMMAND = [sys.executable, "-m", "minidist.bench", "collectives", "-n", "2"]


def row(collective, algorithm, p, nbytes, t, mpi=None):
    return Row(collective, algorithm, p, nbytes, t * 1e6, t * 1e6, t * 1e6, mpi, None, 0.0, 0.0, 0)


def test_table_file_and_picture(tmp_path):
    file = tmp_path / "rows.json"
    status, output = execute([*COMMAND, "--max-bytes", "4096", "--json", str(file),
                              "--out", str(tmp_path)])
    assert status == 0, output
    assert "2 ranks on" in output and "wrong" in output and "alpha (us/step)" in output
    assert (tmp_path / "bench_collectives.png").read_bytes()[1:4] == b"PNG"
    rows = json.loads(file.read_text())["rows"]
    assert {r["collective"] for r in rows} == set(bench_collectives.CASES)
    assert all(r["wrong"] == 0 and r["t_min_us"] <= r["t_med_us"] <= r["t_max_us"] for r in rows)
    for collective in bench_collectives.CASES:
        names = [r["algorithm"] for r in rows
                 if r["collective"] == collective and r["bytes"] == 1024]
        assert names[0] == "mpi" and names[1].startswith("auto:")
        assert names[2:] == list(ALGORITHMS[collective])
    ours = next(r for r in rows if r["algorithm"] == "ring")
    assert ours["ratio"] == pytest.approx(ours["t_mpi_us"] / ours["t_med_us"])
    assert ours["busbw_GBps"] == pytest.approx(ours["bytes"] / ours["t_med_us"] / 1e3)


@pytest.mark.parametrize("flags, message", [
    (["--collective", "all_reduces"], "no collective all_reduces; there are all_reduce"),
    (["--algorithm", "rings"], "no algorithm rings for that"),
    (["--collective", "broadcast", "--algorithm", "ring"], "no algorithm ring for that"),
    (["--max-bytes", "10"], "10 is out of range"),
    (["--json", "/"], "is a directory"),
])
def test_refusals(flags, message):
    status, output = execute([*COMMAND, *flags])
    assert status == 2 and message in output and "Traceback" not in output


def test_wrong_elements_are_counted():
    """A broken algorithm must show in the table."""
    case = bench_collectives.Case(16, lambda: None, None, None, np.zeros(4), np.array([0, 0, 1, 2]))
    from minidist.ranks.comm import run_threads
    assert run_threads(2, lambda comm: bench_collectives.errors(case, lambda: None, comm)) == [4, 4]


def test_bus_bandwidth_of_a_perfect_ring_is_the_wire():
    """At the time that the wire needs for what each rank must send, busbw is its speed."""
    for p in 2, 3, 4, 8:
        for collective in "all_reduce", "all_gather", "reduce_scatter", "all_to_all":
            factor = bench_collectives.bus_factor(collective, p)
            t = factor * 1e6 / 5e9
            got = bench_collectives.row(collective, "x", 10 ** 6, p, {"x": np.array([t])}, 0)
            assert got.busbw_GBps == pytest.approx(5.0)
    assert bench_collectives.bus_factor("broadcast", 4) == 1


def test_fit_finds_the_constants_that_made_the_times():
    alpha, beta, gamma = 7e-6, 0.3e-9, 0.2e-9
    rows = [row(c, a, 4, nbytes, seconds(c, a, 4, nbytes, alpha, beta, gamma))
            for c in ("all_reduce", "all_gather") for a in bench_fit.AUTOMATIC[c]
            for nbytes in (1 << 10, 1 << 16, 1 << 22)]
    found = bench_fit.fit(rows)
    assert [found[k] for k in ("alpha", "beta", "gamma")] == pytest.approx([alpha, beta, gamma])
    assert found["error"] < 1e-6
    assert bench_fit.fit(rows[:2]) is None


def test_fit_has_no_negative_constants():
    found = bench_fit.not_negative(np.array([[1., 1], [1, 2], [1, 3]]), np.array([3., 2, 1]))
    assert (found >= 0).all() and found[0] > 0


def test_report_names_the_sizes_at_which_the_fit_would_choose_otherwise():
    rows = [row("all_reduce", a, 4, 1024, 1e-3) for a in ALGORITHMS["all_reduce"]]
    fit = {"alpha": 0.0, "beta": 1e-9, "gamma": 0.0, "error": 0.1}
    said = bench_fit.report(fit, rows)
    assert "all_reduce of 1024 bytes: the choice is recursive_doubling" in said
    same = {"alpha": bench_fit.ALPHA, "beta": bench_fit.BETA, "gamma": bench_fit.GAMMA, "error": 0}
    assert "the choice is" not in bench_fit.report(same, rows)
