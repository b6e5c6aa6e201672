"""Trace: who did what when, as spans of time; a picture of them, and a file for Perfetto.

    rank 0   compute  |== forward ==|==== backward ====|      |= step =|
             wire                       |--- bucket 0 ---|- bucket 1 -|
                                                         ^ exposed: the wire is busy, nobody computes

Spans come from the clock and from a Comm's event log. All ranks of one machine share one clock.

Lesson: mpirun -n 4 python -m lessons.dp
"""
import time
from contextlib import contextmanager
from typing import NamedTuple

COLORS = {"forward": "#4878a8", "backward": "#e08030", "step": "#909090", "wire": "#509050"}


class Span(NamedTuple):
    """Something that took a while.  start, end: seconds (perf_counter)"""
    rank: int
    lane: str
    name: str
    start: float
    end: float


class Clock:
    """Collects the spans of one rank."""

    def __init__(self, rank):
        self.rank, self.spans = rank, []

    @contextmanager
    def span(self, name, lane="compute"):
        """Note how long the block takes."""
        start = time.perf_counter()
        yield
        self.spans.append(Span(self.rank, lane, name, start, time.perf_counter()))


def wire(events):
    """Turn the events of a Comm's recording() into spans, one for each message received."""
    return [Span(e.rank, "wire", f"{e.op} {e.nbytes} B from {e.peer}", e.start, e.end)
            for e in events if e.kind == "recv"]


def busy(spans, until=float("inf")):
    """Seconds during which at least one of the spans was going on, counted up to `until`."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, until)
        total += max(0.0, end - start)
        reached = max(reached, end)
    return total


def chrome(spans):
    """Lay spans out for chrome://tracing and ui.perfetto.dev.  -> what json.dump takes"""
    zero = min((span.start for span in spans), default=0.0)
    lanes = sorted({(span.rank, span.lane) for span in spans})
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
             for rank in sorted({rank for rank, _ in lanes})]
    names += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": lane}}
              for i, (rank, lane) in enumerate(lanes)]
    return {"displayTimeUnit": "ms", "traceEvents": names + [
        {"ph": "X", "name": span.name, "pid": span.rank, "tid": lanes.index((span.rank, span.lane)),
         "ts": 1e6 * (span.start - zero), "dur": 1e6 * (span.end - span.start)}
        for span in spans]}


def draw(axes, spans, zero=None):
    """Draw one row per rank and lane on matplotlib axes; milliseconds from the first start on."""
    zero = min(span.start for span in spans) if zero is None else zero
    lanes = sorted({(span.rank, span.lane) for span in spans})
    for span in spans:
        color = COLORS.get(span.name, COLORS.get(span.lane, "#b0b0b0"))
        axes.barh(lanes.index((span.rank, span.lane)), 1e3 * (span.end - span.start), height=0.7,
                  left=1e3 * (span.start - zero), color=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [f"rank {rank} {lane}" for rank, lane in lanes])
    axes.invert_yaxis()
