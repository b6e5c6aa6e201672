"""The planner on the machine at hand: memory as the ledger counts it, time from constants."""
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from minidist import BadInput, calibrate, cost, ledger, machine, parallel, search, trial
from minidist.engine import gpt
from minidist.engine.data import Batch
from minidist.engine.optim import AdamW
from minidist.engine.tensor import graph_bytes
from minidist.estimate import Job
from minidist.machine import Machine
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests.test_strategies import Watch

HERE = Machine(2, 1e9, 1e-10, 2e-10, 3e-11, 1e-4, 1e-10, 5e-9, 2e-5, 3e-10)
AXES = "pp", "dp", "cp", "tp"


def random_job(seed):
    """A small GPT on a random mesh of up to 8 ranks."""
    draw = random.Random(seed)
    tp, cp, pp, dp = draw.choice([(1, 1, 1, 1), (1, 1, 1, 3), (2, 1, 1, 2), (3, 1, 1, 1),
                                  (2, 1, 2, 1), (1, 1, 3, 2), (1, 2, 1, 2), (2, 2, 1, 2),
                                  (1, 2, 2, 1), (4, 1, 1, 2), (1, 1, 2, 2), (1, 3, 1, 1)])
    rows, m = draw.choice([1, 2]), draw.choice([1, 2, 3])
    again = draw.choice([None, "attention", "blocks"] if pp == 1 else [None, "attention"])
    H, e, T = 12, draw.choice([2, 4]), draw.choice([12, 24])
    return Job(draw.choice([3, 4]), H * e, H, draw.choice([13, 32]), T, dp * m * rows,
               tp=tp, cp=cp, pp=pp, dp=dp, rows=rows, sp=tp > 1 and draw.random() < 0.6,
               zero=draw.choice([0, 1, 2, 3] if pp == 1 else [0, 1]) * (dp > 1), again=again)


def counted(world, job):
    """Take two steps on a rank.  -> Held by the ledger, activations at the top of the second"""
    mesh, watch = DeviceMesh(world, **{axis: getattr(job, axis) for axis in AXES}), Watch()
    config = gpt.GPTConfig(job.V, job.T, job.D, job.H, job.L)
    model = gpt.GPT(config, dtype=np.float32)
    for block in model.blocks:
        block.wrap(watch)
    model = parallel.spread(model, mesh, "again" if job.sp else None, zero=job.zero,
                            recompute=job.again)
    opt = parallel.equip(AdamW(model.parameters(), 1e-3), model)
    tokens = np.random.default_rng(0).integers(0, job.V, (2, job.B, job.T))
    batch, most = Batch.of(*tokens, step=0), [0]
    if job.pp > 1:
        model.pipeline.listeners.append(lambda run, *_: most.append(live(run, model)))
    for _ in range(2):
        train_step(model, batch, opt, mesh, job.microbatches)
    held = ledger.held(model, opt)
    if job.pp == 1:
        first = model.localize(batch).split(job.microbatches)[0]
        model.zero_grad()
        watch.known, loss = ledger.known(model, first), model(first)
        watch.graph = ledger.nodes(loss)
        most += [graph_bytes(loss, exclude=watch.known)]
        loss.backward()
        most += [watch.most] * (job.again == "blocks")
    return held[:3] + (max(most),)


def live(run, model):
    """Bytes of all graphs of a pipeline's stage that wait for their backward."""
    shared = [x for b in run.batches for x in vars(b).values() if isinstance(x, np.ndarray)]
    return graph_bytes(*(y for _, y in run.live.values()), exclude=[*model.parameters(), *shared])


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_that_of_the_ledger(seed):
    """To the byte, on the fullest rank of twenty random meshes."""
    job = random_job(seed)
    found = run_threads(job.cards, counted, job)
    assert HERE.held(job) == max(found, key=sum), job


def test_time_is_the_sum_of_what_is_counted():
    """With one constant at a time: FLOPs, bytes sent, parameters that are updated."""
    nothing = Machine(2, 1e9, *[0.0] * 8)
    job = Job(4, 48, 12, 32, 24, 8, dp=2, rows=4)
    sizes = cost.Sizes(B=8, T=24, D=48, H=12, V=32, L=4)
    step = cost.step(sizes, machine.layout(job))
    assert replace(nothing, flop=2.0).seconds(job).all == 2 * cost.gpt_flops(sizes) / 2
    assert replace(nothing, wire=3.0).seconds(job).all == 3 * sum(
        price.bytes for price in step.sent.values())
    assert replace(nothing, update=1.0).seconds(job).all == cost.gpt_parameters(sizes)
    cut = replace(job, dp=1, tp=2, rows=8)
    assert replace(nothing, wire=1.0).seconds(cut).dp == 0 < replace(
        nothing, wire=1.0).seconds(cut).tp
    stages = replace(job, dp=1, pp=2, rows=2)
    assert replace(nothing, layer=1.0).seconds(stages)[1:6] == (8, 0, 0, 0, 8 / 4)
    assert replace(nothing, end=1.0).seconds(job).all == 2 * 4 * 4 * 24 * 48
    assert replace(nothing, end=1.0).seconds(stages)[1] == 8 * 24 * 48 * 4
    again = replace(job, again="blocks")
    assert replace(nothing, layer=3.0).seconds(again).all == pytest.approx(16)


def test_constants_are_found_again():
    """From times that were made up; and none is negative, whatever was measured."""
    draw = np.random.default_rng(0)
    rows, constants = draw.uniform(1, 9, (12, 4)), [1e-3, 0.0, 2e-2, 5.0]
    assert calibrate.fit(rows, rows @ constants) == pytest.approx(constants, abs=1e-9)
    assert min(calibrate.fit(rows, rows @ [1, -0.2, 1, 1])) == 0
    whole = rows @ [2.0, 3.0, 4.0, 5.0]
    assert calibrate.fit(rows[:, :2], whole, whole - rows[:, :2] @ [2.0, 3.0]) == pytest.approx(
        [2, 3])


def test_a_calibration_on_thread_ranks(monkeypatch, tmp_path):
    """Written, read again, and what no calibration wrote is refused."""
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "PROBES", [(1, 64, 8, n) for n in (1, 2, 3, 4)])
    monkeypatch.setattr(calibrate, "LENGTHS", [16, 4096])
    monkeypatch.setattr(calibrate, "TOKENS", [2, 16])
    found, other = run_threads(2, calibrate.look)
    assert found == other and found.ranks == 2 and found.update > 0
    assert len(calibrate.told(found)) == 9
    path = tmp_path / "here.json"
    path.write_text(json.dumps(machine.written(found)))
    assert machine.read(path) == found
    for text in ("{}", "[1]", '{"ranks": 2}', "x"):
        path.write_text(text)
        with pytest.raises(BadInput, match="nothing that --calibrate has written"):
            machine.read(path)


def test_what_is_tried_is_the_fastest_of_its_kind():
    plans = search.search(Job(4, 48, 12, 32, 24, 8), HERE, 2)[0]
    some = trial.chosen(plans)
    kinds = {(job.tp, job.cp, job.pp, job.zero) for _, job in some}
    assert kinds == {(1, 1, 1, 0), (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3), (2, 1, 1, 0),
                     (1, 2, 1, 0), (1, 1, 2, 0)}
    for took, job in some:
        assert job.again is None and took.all == min(
            other.all for other, each in plans if (each.tp, each.cp, each.pp, each.zero, each.again)
            == (job.tp, job.cp, job.pp, job.zero, None))


def test_a_plan_is_tried(monkeypatch):
    """One step of one plan as a job of its own, beside its prediction."""
    monkeypatch.setattr(trial, "ROUNDS", 1)
    monkeypatch.setattr(trial, "STEPS", 1)
    job = Job(4, 48, 12, 32, 16, 4, tp=2, rows=2)
    lines = trial.compare([(HERE.seconds(job), job)], "lesson")
    assert len(lines) == 4 and lines[2].endswith("tp=2, 2 rows at a time")
    assert lines[-1] == "what was ranked first takes 1.00 of the fastest's time"
