"""Spans of time: how long something was going on, and the file for a trace viewer."""
import json

import numpy as np
import pytest

from minidist import trace
from minidist.collectives import all_reduce
from minidist.comm import run_threads
from minidist.trace import Span


def spans(*pairs):
    return [Span(0, "wire", "x", start, end) for start, end in pairs]


@pytest.mark.parametrize("pairs, until, expected", [
    ([], 9, 0), ([(1, 3)], 9, 2), ([(1, 3), (2, 5)], 9, 4), ([(4, 5), (1, 2)], 9, 2),
    ([(1, 9), (2, 3), (4, 5)], 99, 8), ([(1, 3), (2, 5)], 4, 3), ([(1, 3)], 0, 0),
    ([(1, 2), (5, 7)], 6, 2)])
def test_busy_counts_every_moment_once(pairs, until, expected):
    assert trace.busy(spans(*pairs), until) == expected


def test_a_clock_and_an_event_log_become_a_trace():
    def fn(comm):
        clock = trace.Clock(comm.rank)
        with comm.recording() as events, clock.span("backward"):
            all_reduce(np.zeros(1000), comm, algorithm="ring")
        return clock.spans + trace.wire(events)

    found = sum(run_threads(3, fn), [])
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


def test_the_picture_has_a_row_per_rank_and_lane():
    from matplotlib.figure import Figure
    axes = Figure().subplots()
    trace.draw(axes, [Span(1, "wire", "a", 2.0, 2.5), Span(0, "compute", "forward", 1.0, 2.0)])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0 compute", "rank 1 wire"]
    assert sorted(bar.get_x() for bar in axes.patches) == [0.0, 1000.0]
