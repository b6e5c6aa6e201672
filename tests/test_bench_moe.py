"""The benchmark of experts: what it prints and writes, on numbers too small to mean anything."""
import json
import sys

from minidist.ranks import launch
from tests.mpi import execute, need_mpi

RUN = [sys.executable, "-m", "minidist.bench", "moe", "--preset", "lesson", "--experts", "4"]


def test_a_layer_beside_a_dense_one(tmp_path):
    need_mpi()
    data = tmp_path / "rows.json"
    status, out = execute(launch.command(2, [*RUN, "--rounds", "1", "--json", str(data)]))
    assert status == 0, out
    rows = json.loads(data.read_text())["rows"]
    assert [row["layer"] for row in rows] == ["dense", "4 experts", "the same, ep=2"]
    assert all(row["ms"] > 0 and row["layer"] in out for row in rows)


def test_losses_of_dense_and_experts(tmp_path):
    data = tmp_path / "rows.json"
    status, out = execute([*RUN, "--losses", "2", "--json", str(data)])
    assert status == 0, out
    dense, *others = json.loads(data.read_text())["rows"]
    assert [row["model"] for row in others] == [f"experts, {b}" for b in ("bias", "aux", "none")]
    for row in others:
        assert row["parameters"] > 2 * dense["parameters"]
        assert dense["flops"] < row["flops"] < 1.02 * dense["flops"]
        assert len(row["val_losses"]) == 3 and row["val_losses"][-1] < row["val_losses"][0]
