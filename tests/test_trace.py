"""Spans of time: how long something was going on, and the file for a trace viewer."""
import json
import time

import numpy as np
import pytest

from minidist import dp, trace
from minidist.collectives import all_reduce
from minidist.engine.data import random_batch
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.trace import Span
from tests.models import tiny


def spans(*pairs):
    return [Span(0, "wire", "x", start, end) for start, end in pairs]


@pytest.mark.parametrize("pairs, until, expected", [
    ([], 9, 0), ([(1, 3)], 9, 2), ([(1, 3), (2, 5)], 9, 4), ([(4, 5), (1, 2)], 9, 2),
    ([(1, 9), (2, 3), (4, 5)], 99, 8), ([(1, 3), (2, 5)], 4, 3), ([(1, 3)], 0, 0),
    ([(1, 2), (5, 7)], 6, 2)])
def test_busy_counts_every_moment_once(pairs, until, expected):
    assert trace.busy(spans(*pairs), until) == expected


def test_hidden_is_what_passes_before_the_last_computation_ends():
    found = [Span(0, "compute", "forward", 0, 1), Span(0, "compute", "backward", 1, 4),
             Span(1, "compute", "backward", 0, 2),
             Span(0, "wire", "a", 2, 3), Span(0, "wire", "b", 3.5, 5), Span(1, "wire", "a", 1, 3)]
    assert trace.hidden(found) == ((2.5 + 2) / 2, (1.5 + 1) / 2)
    assert trace.hidden(found[:3]) == (0, 0)


def test_an_event_log_becomes_a_trace():
    def fn(comm):
        start = time.perf_counter()
        with comm.recording() as events:
            all_reduce(np.zeros(1000), comm, algorithm="ring")
        return Span(comm.rank, "compute", "backward", start, time.perf_counter()), events

    computed, events = zip(*run_threads(3, fn))
    found = [*computed, *trace.wire(sum(events, []))]
    assert trace.length(found) == trace.length(list(computed))
    messages = [s for s in found if s.lane == "wire"]
    assert len(messages) == 3 * 4                               # 2(p-1) received by each
    inside = {s.rank: s for s in found if s.lane == "compute"}
    assert all(inside[s.rank].start <= s.start <= s.end <= inside[s.rank].end for s in messages)

    data = json.loads(json.dumps(trace.chrome(found)))["traceEvents"]
    boxes = [event for event in data if event["ph"] == "X"]
    assert len(boxes) == len(found) and min(box["ts"] for box in boxes) == 0
    assert {box["pid"] for box in boxes} == {0, 1, 2}
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in data if e["name"] == "thread_name"}
    assert {labels[box["pid"], box["tid"]] for box in boxes} == {"compute", "wire"}


def test_a_recorded_step_becomes_spans_of_all_ranks():
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = dp.DistributedDataParallel(tiny(), mesh["dp"], bucket_bytes=4000)
        mine = model.localize(random_batch(13, 8, 4, 0, 0))
        return json.loads(json.dumps(trace.record(model, mine, world, lambda: None)))

    found = trace.spans(run_threads(2, fn))
    names = [s.name for s in found if s.rank == 0 and s.lane == "compute"]
    assert names == ["forward", "backward"]
    busy, hidden = trace.hidden(found)
    assert 0 <= hidden <= busy and len([s for s in found if s.lane == "wire"]) > 2


def test_waiting_for_a_late_sender_is_not_time_on_the_wire():
    def fn(comm):
        with comm.recording() as events:
            if comm.rank == 0:
                time.sleep(0.05)
                comm.send(np.zeros(3), 1)
            else:
                comm.recv(np.empty(3), 0)
        return events

    events = sum(run_threads(2, fn), [])
    [message] = trace.wire(events)
    late = next(e.start for e in events if e.kind == "send")
    assert message.rank == 1 and message.start == late > min(e.start for e in events) + 0.04


def test_the_picture_has_a_row_per_rank_and_lane():
    from matplotlib.figure import Figure
    axes = Figure().subplots()
    trace.draw(axes, [Span(1, "wire", "a", 2.0, 2.5), Span(0, "compute", "forward", 1.0, 2.0)])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0 compute", "rank 1 wire"]
    boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    assert sorted((box.x0, box.x1) for box in boxes) == [(0.0, 1000.0), (1000.0, 1500.0)]
