"""simulate: makespan, bubbles, live activations against closed forms; pictures and command."""
import json
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from minidist import estimate, files, plan, request, schedules
from minidist.schedules import ORDERS, make
from minidist.simulate import cost, lines, picture, step
from tests.mpi import execute

TIMES = [(1, 1, 1), (5, 6, 4), (2, 2, 1), (2, 3, 1), (3, 2, 2)]
GRID = [(4, 8), (4, 16), (8, 32), (4, 4), (3, 7), (2, 5), (1, 4)]


def timeline(name, p, m, v=None, times=(1, 1, 1), message=0):
    """In fractions, so that thirds are exact."""
    return cost(make(name, p, m, v), *map(Fraction, times), message=Fraction(message))


def bubble(t):
    """Time that the whole step takes longer than a rank works."""
    assert len(set(t.work)) == 1
    return t.makespan - t.work[0]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p, m", [*GRID, (4, 2), (8, 3)])
def test_gpipe_and_1f1b_have_the_same_bubble(p, m, times):
    for name in ("gpipe", "1f1b"):
        t = timeline(name, p, m, times=times)
        assert bubble(t) == (p - 1) * sum(times)
        assert t.bubble_of_ideal == Fraction(p - 1, m)
        assert t.bubble_of_total == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p, m", GRID)
def test_interleaving_divides_it_and_zero_bubble_fills_it(p, m, times):
    F, I, W = times                     # noqa: E741      W the shortest, or others wait for it
    for v in (2, 3, 4):
        assert bubble(timeline("interleaved", p, m, v, times)) == Fraction((p - 1) * sum(times), v)
    assert bubble(timeline("zb-h1", p, m, times=times)) == (p - 1) * (F + I - W)


@pytest.mark.parametrize("p, m", [(4, 8), (4, 16), (8, 32), (3, 7), (2, 5), (1, 4)])
def test_folded_schedules(p, m):
    """zb-v: no gap in any rank if F = I = W; what is left is that ranks start one after another.

    Of dualpipe-v, semantics of the paper: (p-1)(F&B + B - 3W), where F&B are one action that takes
    as long as both. Here F's result is sent before B: (p-1)(F + I - W), of chunks half as long."""
    t = timeline("zb-v", p, m)
    assert t.gaps == [0] * p and bubble(t) == Fraction(p - 1, 2)
    assert bubble(timeline("dualpipe-v", p, m)) == Fraction(p - 1, 2)


def test_naive_uses_one_rank_at_a_time():
    for p, m in GRID:
        t = timeline("naive", p, m)
        assert t.makespan == 3 * m * p and t.bubble_of_total == Fraction(p - 1, p)


@pytest.mark.parametrize("p, m", [(p, m) for p in (1, 2, 3, 4) for m in range(1, 9)])
def test_idle_slots_counted_in_the_lists(p, m):
    """Not the simulator's sums: slots of one unit, taken one by one."""
    t = timeline("1f1b", p, m)
    busy = {(rank, slot) for rank, spans in enumerate(t.spans)
            for _, start, end in spans for slot in range(int(start), int(end))}
    idle = p * int(t.makespan) - len(busy)
    assert Fraction(idle, len(busy)) == Fraction(p - 1, m) == t.bubble_of_ideal
    assert Fraction(idle, p * int(t.makespan)) == Fraction(p - 1, m + p - 1) == t.bubble_of_total


def test_the_two_ratios_of_one_example():
    t = timeline("1f1b", 4, 8)
    assert float(t.bubble_of_ideal) == 0.375 and round(float(t.bubble_of_total), 4) == 0.2727
    assert float(timeline("interleaved", 4, 8, 2).bubble_of_ideal) == 0.1875


@pytest.mark.parametrize("p, m", [(p, m) for p in (1, 2, 3, 4, 8)
                                  for m in (1, 2, p, 2 * p, 2 * p + 1)])
def test_live_activations(p, m):
    ranks = range(p)
    assert timeline("naive", p, m).live == [1] * p
    assert timeline("gpipe", p, m).live == [m] * p
    assert timeline("1f1b", p, m).live == [min(p - r, m) for r in ranks]
    assert timeline("zb-h1", p, m).live == [min(p, m)] * p
    for v in (2, 3):
        more = (v - 1) * -(-m // max(1, m // p))            # p where p divides m
        assert timeline("interleaved", p, m, v).live == [
            min(2 * (p - 1 - r) + more + 1, m * v) for r in ranks]
    if m >= 2 * p:
        assert timeline("zb-v", p, m).live == [2 * p] * p           # p whole micro-batches
        assert timeline("dualpipe-v", p, m).live == [2 * p + 1] * p


def test_messages_take_time_only_between_ranks():
    t = timeline("1f1b", 3, 1, message=Fraction(1, 4))
    assert t.makespan == 3 * 3 + 4 * Fraction(1, 4)
    assert timeline("interleaved", 1, 2, 2, message=5).makespan == 6


def test_no_rank_does_two_things_at_once_or_starts_without_its_input():
    for name in ORDERS:
        t = timeline(name, 3, 7, times=(2, 3, 1), message=1)
        ends = {}
        for rank, spans in enumerate(t.spans):
            assert all(a[2] <= b[1] for a, b in zip(spans, spans[1:]))
            for (kind, i, c), _, end in spans:
                ends[schedules.passed(kind), i, t.schedule.stage(rank, c)] = rank, end
        for rank, spans in enumerate(t.spans):
            for action, start, _ in spans:
                source, _ = t.schedule.neighbours(rank, action)
                if source is not None:
                    there, end = ends[schedules.passed(action[0]), action[1], source]
                    assert start >= end + (there != rank)


# ------------------------------------------------------------------ pictures and command

def test_rows_of_text():
    assert lines(timeline("1f1b", 2, 2), ascii=True) == [
        "rank 0  F0 F1 ......B0--- ...B1---   idle 3, live 2",
        "rank 1  ...F0 B0--- F1 B1--- ......  idle 3, live 1"]
    assert lines(timeline("zb-v", 1, 1), ascii=True)[0].startswith(
        "rank 0  F0a F0b I0b W0b I0a W0a ")
    assert "█" in lines(timeline("1f1b", 4, 8))[0] and "▒▒" in lines(timeline("1f1b", 4, 8))[0]
    long = lines(timeline("1f1b", 4, 100), columns=80, ascii=True)
    assert all(len(row) <= 80 and " ... " in row for row in long)
    assert len(lines(timeline("1f1b", 100, 2))) <= 32


def test_hundreds_of_ranks_and_a_picture(tmp_path):
    t = timeline("interleaved", 128, 256, 2)
    assert t.bubble_of_ideal == Fraction(127, 512)
    files.write(tmp_path / "x.png", picture([timeline("gpipe", 4, 8), timeline("zb-v", 4, 8)]))
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command(tmp_path):
    def simulate(*args):
        return execute([sys.executable, "-m", "minidist.simulate", *args])

    path = tmp_path / "x.json"
    status, output = simulate("--schedule", "all", "-p", "4", "-m", "8", "--json", str(path))
    rows = {row["schedule"]: row for row in json.loads(path.read_text())["rows"]}
    assert status == 0 and rows.keys() == ORDERS.keys() and "rank 3" in output
    assert rows["1f1b"]["bubble_of_ideal"] == 0.375 and rows["1f1b"]["messages"] == 2 * 3 * 8
    assert rows["interleaved"]["messages"] == 2 * 7 * 8
    for args, message in ((["--schedule", "x"], "there is no schedule 'x'; use one of naive"),
                          (["-p", "0"], "-p: 0 is out of range"),
                          (["--W", "0"], "F, I and W take 1, 1 and 0; use a time above 0"),
                          (["--chunks", "2"], "1f1b works on 1 chunk per rank, not 2")):
        status, output = simulate(*args)
        assert status == 2 and message in output and "Traceback" not in output


# ------------------------------------------------------------------ whole steps

@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_a_step_without_gradients_is_its_schedule(name, v):
    made = cost(make(name, 4, 8, v), 2, 2, 2)
    for overlap in (True, False):
        assert step(made, 0, 3, overlap) == [spans[-1][2] for spans in made.spans]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_gradients_hide_behind_the_last_backward(layers):
    """One rank: B of the last micro-batch takes 4; all but the last layer's share may hide."""
    made = cost(make("1f1b", 1, 3, 1), 2, 2, 2)
    assert step(made, 6, layers, overlap=False) == [pytest.approx(3 * 6 + 6)]
    for gradients in (1, 3.9, 6, 40):
        each = gradients / layers
        hidden = max(4 + each, 4 / layers + gradients)          # held up by backward, or the wire
        assert step(made, gradients, layers) == [
            pytest.approx(3 * 6 - 4 + hidden)]


def test_a_pipeline_hides_more_on_its_later_stages():
    """A later stage ends its last backward earlier, so its gradients have more time."""
    made = cost(make("1f1b", 4, 8, 1), 1, 1, 1)
    ends = step(made, 3, 1)
    assert ends == [made.makespan + 3 - 2 * rank for rank in range(4)]
    assert max(step(made, 3, 4)) < ends[0]


def test_ten_thousand_cards_are_simulated():
    """GPT-3 on 10,240: the stages of one replica stand for all."""
    job = replace(request.MODELS["gpt3"], B=1280, tp=8, pp=16, dp=80, v=3, again="attention")
    took = estimate.CARDS["a100"].seconds(job)
    line = plan.simulated(took, job)
    late = float(line.split()[1])
    assert "on 10240 cards" in line and late == pytest.approx(took.all, rel=0.02)
    assert float(line.split("; ")[1].split()[0]) < late
