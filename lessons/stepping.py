"""Pictures that can be stepped through: pipeline schedules and meshes, as SVG.

    schedule(timeline)   a row per rank, a box per action     step by step: what begins next
    groups(sizes)        a grid per axis, a box per rank      step by step: one group after another

A picture is drawn whole. Each of its parts says from which step to which it is the present one, and
the figure says what happens at each step; the rest is lessons.look's script.
"""
import json
import math
from bisect import bisect_left
from fractions import Fraction

from lessons.markup import escape, scrolled, tag
from minidist import mesh, schedules, simulate

LETTER = 7.3                                          # pixels, of the pictures' font
ROW, BOX = 30, 62
FILLS = ("F", "B", "W", "odd")                        # of groups; their numbers tell them apart
RANKS, MICROBATCHES = 4, 6
MESHES = (dict(pp=2, dp=2, tp=2), dict(pp=2, dp=2, cp=2, tp=2))


def drawings():
    """All pictures.  -> [(title, [HTML])]"""
    unit = Fraction(1)
    made = [simulate.cost(schedules.make(name, RANKS, MICROBATCHES), unit, unit, unit)
            for name in schedules.ORDERS]
    return [("Schedules", list(map(schedule, made))), ("Meshes", list(map(groups, MESHES)))]


def figure(caption, steps, size, parts):
    """A picture, and what its steps are."""
    width, height = (math.ceil(x) for x in size)
    svg = tag("svg", "\n".join(parts), role="img", aria_label=caption, width=width, height=height,
              viewBox=f"0 0 {width} {height}")
    return tag("figure", tag("figcaption", escape(caption)) + scrolled(svg), tabindex=0,
               data_steps=json.dumps(steps))


def box(x, y, width, height, fill, *lines, when=(None, None)):
    """A rectangle with lines of text in its middle; when: the steps at which it begins and ends."""
    middle = y + height / 2 + 4 - 7 * (len(lines) - 1)
    texts = [text(x + width / 2, middle + 14 * i, line, "middle") for i, line in enumerate(lines)]
    rect = tag("rect", x=f"{x:g}", y=f"{y:g}", width=f"{width:g}", height=f"{height:g}",
               class_=fill)
    return tag("g", rect + "".join(texts), data_from=when[0], data_to=when[1])


def text(x, y, content, anchor="start"):
    return tag("text", escape(content), x=f"{x:g}", y=f"{y:g}", text_anchor=anchor)


# ---- schedules

def schedule(timeline):
    """Draw who does what when, and list for each moment at which something begins who is busy."""
    moments = sorted({start for spans in timeline.spans for _, start, _ in spans})
    longest = max(len(label(timeline, action)) for spans in timeline.spans
                  for action, _, _ in spans)
    shortest = min(end - start for spans in timeline.spans for _, start, end in spans)
    scale, left = (longest + 1) * LETTER / shortest, 8 * LETTER
    parts = []
    for rank, spans in enumerate(timeline.spans):
        y = 4 + rank * (ROW + 4)
        parts += [text(0, y + ROW / 2 + 4, f"rank {rank}"),
                  box(left, y, float(timeline.makespan * scale), ROW, "idle")]
        parts += [box(left + float(start * scale), y, float((end - start) * scale) - 1, ROW,
                      action[0], label(timeline, action),
                      when=(bisect_left(moments, start), bisect_left(moments, end)))
                  for action, start, end in spans]
    return figure(said(timeline), [busy(timeline, moment) for moment in moments],
                  (left + timeline.makespan * scale + 4, len(timeline.spans) * (ROW + 4) + 8),
                  parts)


def label(timeline, action):
    return simulate.name(timeline.schedule, action)


def busy(timeline, moment):
    """Say what every rank does just after a moment."""
    now = {rank: label(timeline, action) for rank, spans in enumerate(timeline.spans)
           for action, start, end in spans if start <= moment < end}
    return f"time {float(moment):g}: " + ", ".join(f"rank {rank} {now.get(rank, 'idle')}"
                                                   for rank in range(len(timeline.spans)))


def said(timeline):
    """The numbers of a schedule, all from its timeline."""
    n = simulate.numbers(timeline)
    return (f"{n['schedule']}: {n['ranks']} ranks, {n['microbatches']} micro-batches"
            + (f", {n['chunks']} chunks" if n["chunks"] > 1 else "")
            + f"; takes {float(n['makespan']):g}, idle / working time "
            f"{float(n['bubble_of_ideal']):.3f}, at most {max(n['live']) / n['chunks']:g} "
            f"micro-batches alive on a rank, {n['messages']} messages")


# ---- meshes

def groups(sizes):
    """Draw the ranks once for each axis, those of a group alike; the axis that talks most first."""
    parts, steps, y = [], [], 0
    for axis in reversed(sizes):
        found = mesh.groups(sizes, axis)
        parts.append(text(0, y + 16, f"{axis} talks {mesh.AXES[axis].talks}"))
        parts += heads(sizes, y + 38)
        number = {rank: i for i, group in enumerate(found) for rank in group}
        for rank in range(math.prod(sizes.values())):
            at, k = place(sizes, rank), len(steps) + number[rank]
            parts.append(box(at[0], y + 44 + at[1], BOX - 3, 39, FILLS[number[rank] % len(FILLS)],
                             f"rank {rank}", f"group {number[rank]}", when=(k, k + 1)))
        steps += [f"{axis} group {i}: ranks {', '.join(map(str, group))}"
                  for i, group in enumerate(found)]
        y += 44 + 42 * rows(sizes) + 16
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    wide = left(sizes) + BOX * math.prod(list(sizes.values())[-2:])
    return figure(f"{shape}: {math.prod(sizes.values())} ranks", steps, (wide, y), parts)


def left(sizes):
    return 5.5 * LETTER * (len(sizes) - 2) + 8


def rows(sizes):
    return math.prod(list(sizes.values())[:-2])


def place(sizes, rank):
    """Where a rank stands: the two innermost axes from left to right.  -> x, y"""
    wide = math.prod(list(sizes.values())[-2:])
    return left(sizes) + BOX * (rank % wide), 42 * (rank // wide)


def heads(sizes, y):
    """Coordinates above the columns and beside the rows."""
    *outer, second, last = sizes
    found = []
    for rank in range(math.prod(sizes.values())):
        at, (x, down) = mesh.coordinates(rank, sizes), place(sizes, rank)
        if not down:
            found.append(text(x + BOX / 2, y, f"{second}{at[second]} {last}{at[last]}", "middle"))
        if x == left(sizes):
            found.append(text(0, y + 30 + down, " ".join(f"{a}{at[a]}" for a in outer)))
    return found
