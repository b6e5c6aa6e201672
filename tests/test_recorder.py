"""recorder: each action and message of the last step, on its rank, and the same ones planned."""
import json
import sys
from collections import Counter

import numpy as np
import pytest

from minidist import dp, pp, schedules, simulate
from minidist.engine.data import random_batch
from minidist.engine.nn import digest
from minidist.engine.optim import SGD
from minidist.mesh import DeviceMesh
from minidist.ranks import launch
from minidist.ranks.comm import run_threads
from minidist.recorder import Recorder
from minidist.step import train_step
from minidist.trace import chrome
from tests.models import tiny
from tests.mpi import execute, need_mpi


def steps(world, sizes, schedule="1f1b", record=True, count=2):
    """Train, with a recorder or without.  -> spans, messages sent in the last step, digest"""
    mesh, model = DeviceMesh(world, **sizes), tiny(layers=4)
    if mesh.sizes["pp"] > 1:
        pp.split(model, mesh["pp"], schedule)
    dp.parallelize(model, mesh["dp"])
    optimizer, recorder = SGD(model.parameters(), 0.1), Recorder(model, mesh)
    for step in range(count):
        batch = random_batch(13, 8, 4, 0, step)
        with world.counting() as counted:
            if record:
                with recorder.step():
                    train_step(model, batch, optimizer, mesh, 3, passes=recorder.passes)
            else:
                train_step(model, batch, optimizer, mesh, 3)
    return recorder.spans() if record else [], counted.messages, digest(model), mesh.coords


def lane(spans, rank, name):
    mine = [s for s in spans if (s.rank, s.lane) == (rank, name)]
    return sorted(mine, key=lambda s: s.start)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_a_step_of_pipelines_side_by_side(schedule):
    sizes = dict(dp=2, pp=2)
    spans, sent, _, coords = zip(*run_threads(4, steps, sizes, schedule))
    plan = schedules.make(schedule, 2, 3)
    assert spans[0] == spans[3] and sum(sent) == sum(s.lane == "wire" for s in spans[0])
    for rank in range(4):
        wanted = [simulate.name(plan, action) for action in plan.actions[coords[rank]["pp"]]]
        done, planned = lane(spans[0], rank, "compute"), lane(spans[0], rank, "plan")
        assert [s.name for s in done] == [*wanted, "rest"]
        assert sorted(s.name for s in planned) == sorted(wanted)
        assert all(a.end <= b.start for a, b in zip(done, done[1:]))
        for message in lane(spans[0], rank, "wire"):
            assert done[0].start - 1 < message.start <= message.end <= done[-1].end
        kinds = Counter(s.name[0] for s in planned)
        for kind in set(kinds) & {"F", "B"}:                # a plan's time is the mean of the run
            took = [s.end - s.start for s in spans[0] if s.lane == "compute" and s.name[0] == kind]
            mine = next(s for s in planned if s.name[0] == kind)
            if kind == "F" or "I" not in kinds:
                np.testing.assert_allclose(mine.end - mine.start, np.mean(took), rtol=1e-6)
    assert json.loads(json.dumps(chrome(spans[0])))["traceEvents"]


def test_without_a_pipeline_it_notes_the_passes_and_trains_the_same():
    sizes = dict(dp=2)
    spans, sent, digests, _ = zip(*run_threads(2, steps, sizes))
    assert [s.name for s in lane(spans[0], 1, "compute")] == [
        "F0", "B0", "F1", "B1", "F2", "B2", "rest"]
    assert sum(sent) == sum(s.lane == "wire" for s in spans[0])
    assert not [s for s in spans[0] if s.lane == "plan"]
    plain = run_threads(2, lambda world: steps(world, sizes, record=False)[2])
    assert list(digests) == plain


def test_the_command_writes_the_trace_of_its_last_step(tmp_path):
    need_mpi()
    path = tmp_path / "trace.json"
    status, output = execute(launch.command(2, [
        sys.executable, "-m", "minidist.train", "--preset", "lesson", "--pp", "2", "--steps", "1",
        "--sample", "0", "--no-figure", "--trace", str(path), "--save-every", "1",
        "--out", str(tmp_path)]))
    assert status == 0 and f"trace      {path}" in output, output
    boxes = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert Counter(box["name"][0] for box in boxes)["F"] == 2 * 2 * 8    # rank, lane, micro-batch
    status, output = execute([sys.executable, "-m", "minidist.train", "--resume", str(tmp_path),
                              "--sample", "0", "--no-figure", "--trace", str(path)])
    assert status == 0, "a run that goes on may be traced: " + output
