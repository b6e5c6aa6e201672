"""bench, bench engine, bench tp: tables and files, what times become, what is refused."""
import json
import sys

import pytest

from minidist import cost
from minidist.bench import engine as bench_engine
from minidist.bench import memory as bench_memory
from minidist.engine import gpt
from tests.mpi import execute, need_mpi

BENCH = [sys.executable, "-m", "minidist.bench"]


@pytest.mark.parametrize("words, told", [
    (["engines"], "no benchmark engines; there are engine, attention, collectives, memory, "
     "train, moe, tp"),
    (["engine", "--preset", "huge"], "huge"),
    (["engine", "--rounds", "0"], "0 is out of range"),
    (["engine", "--json", "/"], "is a directory"),
    (["tp", "-n", "2", "--json", "/"], "is a directory"),
    (["tp"], "1 rank shares no layer"),
])
def test_refusals(words, told):
    status, output = execute([*BENCH, *words])
    assert status == 2 and told in output and "Traceback" not in output
    assert output.count("error:") == 1 and len(output.splitlines()) == 1


def test_the_table_of_attention(tmp_path):
    path = tmp_path / "rows.json"
    status, output = execute([*BENCH, "attention", "-n", "2", "--tokens", "64", "--rounds", "1",
                              "--no-torch", "--json", str(path)])
    assert status == 0, output
    rows = json.loads(path.read_text())["rows"]
    assert [row["attention"] for row in rows] == ["plain", "tiled", "ring, 2 ranks"]
    assert all(row["ms"] > 0 and row["tokens"] == 64 for row in rows)
    assert rows[0]["of_plain"] == rows[1]["of_tiled"] == 1


def test_the_table_of_what_memory_costs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["memory", "--preset", "lesson", "--rounds", "1", "--json",
                                      str(path), "--dir", str(tmp_path)])
    assert bench_memory.main() == 0
    plain, blocks, _, attention, offload = json.loads(path.read_text())["rows"]
    assert (plain["ratio"], offload["flops_ratio"]) == (1, 1)
    assert 1 < attention["flops_ratio"] < blocks["flops_ratio"] < 4 / 3
    assert f"{blocks['step_ms']:.1f}" in capsys.readouterr().out


def test_the_engine_s_table_and_file(tmp_path):
    file = tmp_path / "rows.json"
    status, output = execute([*BENCH, "engine", "--preset", "lesson", "--rounds", "1", "--no-torch",
                              "--json", str(file)])
    assert status == 0, output
    row, = json.loads(file.read_text())["rows"]
    assert row["preset"] == "lesson" and row["torch_ms"] is row["ratio_to_torch"] is None
    c = gpt.preset("lesson", vocab=bench_engine.VOCAB)
    flops = cost.gpt_flops(cost.Sizes.of(c, B=row["batch"]))
    assert row["gflops"] == pytest.approx(flops / row["step_ms"] / 1e6)
    peak = row["gflops"] / row["peak_share"]               # what sgemm reached, GFLOP/s
    assert peak > 0 and f"{row['peak_share']:.0%}" in output
    assert f"{row['step_ms']:.1f}" in output and "no PyTorch here" in output


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch):
    """Each call lasts what the clock says: 100 ms to warm up, then 1, 5, 2 and 10, 50, 20."""
    lasts = {"a": iter([0.1, 0.001, 0.005, 0.002]), "b": iter([0.1, 0.010, 0.050, 0.020])}
    now, calls = [0.0], []

    def make(name):
        def call():
            calls.append(name)
            now[0] += next(lasts[name])
        return call
    monkeypatch.setattr(bench_engine.time, "perf_counter", lambda: now[0])
    ms = bench_engine.in_turn({name: make(name) for name in lasts}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert ms == pytest.approx({"a": 2, "b": 20})


def test_the_step_that_is_timed_trains():
    """The timed step is a whole one: its fourth loss is below its first."""
    step = bench_engine.our_step("lesson")
    model, batch = next(cell.cell_contents for cell in step.__closure__
                        if isinstance(cell.cell_contents, gpt.GPT)), bench_engine.start("lesson")[1]
    before = model(batch).item()
    for _ in range(3):
        step()
    assert model(batch).item() < before - 10


def test_tensor_parallel_table_and_file(tmp_path):
    need_mpi()
    file = tmp_path / "rows.json"
    for words in [], ["--sp"]:
        status, output = execute([*BENCH, "tp", "-n", "2", "--preset", "lesson", "--steps", "1",
                                  "--json", str(file), *words])
        assert status == 0, output
        row, = json.loads(file.read_text())["rows"]
        assert (row["ranks"], row["sp"]) == (2, bool(words))
        assert row["ratio"] == pytest.approx(row["tp_ms"] / row["one_rank_ms"], rel=0.1)
        assert f"{row['ratio']:.2f}" in output
