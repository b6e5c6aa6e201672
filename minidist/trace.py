"""Trace: who did what when, as spans of time; a picture of them, and a file for Perfetto.

    rank 0   compute  |== forward ==|==== backward ====|
             wire                       |-- bucket 0 --|-- bucket 1 --|
                                                       ^ from here on nothing hides it

Spans come from the clock and from a Comm's event log. All ranks of one machine share one clock.

Lesson: mpirun -n 4 python -m lessons.dp
"""
import time
from typing import NamedTuple

from minidist.ranks.counting import Event

COLORS = {"forward": "#4878a8", "backward": "#e08030", "step": "#909090", "wire": "#509050"}


class Span(NamedTuple):
    """Something that took a while.  start, end: seconds (perf_counter)"""
    rank: int
    lane: str
    name: str
    start: float
    end: float


def record(model, batch, comm, finish):
    """Run forward, backward and finish() of one batch, and note when things happened on my rank.

    -> [start, forward's end, last gradient, messages], which collects and travels as text"""
    ready = []
    hooks = [p.register_post_accumulate_grad_hook(lambda p: ready.append(time.perf_counter()))
             for p in model.parameters()]
    model.zero_grad()
    with comm.recording() as events:
        times = [time.perf_counter()]
        loss = model(batch)
        times.append(time.perf_counter())
        loss.backward()
        finish()
    for hook in hooks:
        hook.remove()
    return [*times, ready[-1], [list(vars(event).values()) for event in events]]


def spans(notes):
    """Make spans of what all ranks noted, in rank order, with record()."""
    found = wire([Event(*values) for *_, events in notes for values in events])
    for rank, (start, middle, end, _) in enumerate(notes):
        found += [Span(rank, "compute", "forward", start, middle),
                  Span(rank, "compute", "backward", middle, end)]
    return found


def wire(events):
    """Turn the event logs of all ranks into spans, one per message, on the receiver's lane.

    A message is under way from when both ends are there, so waiting for a rank that is late
    does not count."""
    sent, spans = {}, []
    for e in sorted(events, key=lambda e: e.start):
        if e.kind == "send":
            sent.setdefault((e.group, e.rank, e.peer), []).append(e)
    for e in sorted(events, key=lambda e: e.start):
        if e.kind == "recv":
            start = max(e.start, sent[e.group, e.peer, e.rank].pop(0).start)
            spans.append(Span(e.rank, "wire", f"{e.op} {e.nbytes} B from {e.peer}", start, e.end))
    return spans


def busy(spans, until=float("inf")):
    """Add up the seconds during which at least one of the spans was going on, up to `until`."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, until)
        total += max(0.0, end - start)
        reached = max(reached, end)
    return total


def hidden(spans):
    """Split the time on the wire, mean over ranks.  -> (seconds busy, of these while computing)

    Computing ends with the rank's last span on the lane "compute"."""
    last, messages = {}, {}
    for span in spans:
        if span.lane == "compute":
            last[span.rank] = max(last.get(span.rank, span.end), span.end)
        else:
            messages.setdefault(span.rank, []).append(span)
    total = sum(busy(mine) for mine in messages.values())
    during = sum(busy(mine, until=last[rank]) for rank, mine in messages.items())
    return total / len(last), during / len(last)


def length(spans):
    """Measure from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


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
    lanes, rows = sorted({(span.rank, span.lane) for span in spans}), {}
    for span in spans:
        color = COLORS.get(span.name, COLORS.get(span.lane, "#b0b0b0"))
        bar = 1e3 * (span.start - zero), 1e3 * (span.end - span.start)
        rows.setdefault((lanes.index((span.rank, span.lane)), color), []).append(bar)
    for (row, color), bars in rows.items():
        axes.broken_barh(bars, (row - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [f"rank {rank} {lane}" for rank, lane in lanes])
    axes.invert_yaxis()
