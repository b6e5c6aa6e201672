"""Simulate: what a pipeline schedule costs, on paper, for any number of ranks, and how it looks.

    schedule, time of F, I, W and of a message -> start and end of every action -> numbers, picture

A rank takes the actions of its list in order, each as soon as its input is there. Two ratios are
called "bubble", and they differ: idle time over working time (the ideal), and over the whole.

    1f1b, gpipe     bubble / ideal  (p - 1) / m        bubble / total  (p - 1) / (m + p - 1)

All micro-batches and all stages take the same time. Ranks of other axes do the same at the same
time, so a pipeline of 16 stages stands for as many thousand ranks as there are replicas of it.

Run:    python -m minidist.simulate --schedule 1f1b -p 8 -m 32
Lesson: python -m lessons.schedules
"""
import sys
from dataclasses import dataclass
from functools import cached_property

from minidist import BadInput, files, flags, schedules
from minidist.ranks import environment, launch
from minidist.schedules import Walk, borders, passed

COLORS = {"F": "#4878a8", "B": "#e08030", "I": "#e08030", "W": "#b8a030"}
IDLE = "#ececec"
BLOCKS = {"F": "█", "B": "▒", "I": "▒", "W": "░"}
ROWS = 32                                               # of a timeline in the terminal


@dataclass(frozen=True)
class Timeline:
    """When every rank does what, and the numbers that follow from it."""
    schedule: schedules.Schedule
    spans: list                                         # [rank] -> [(action, start, end)]

    @cached_property
    def makespan(self):
        """Time from the first start to the last end."""
        return max(end for spans in self.spans for _, _, end in spans)

    @cached_property
    def work(self):
        """Time that each rank works.  -> [rank]"""
        return [sum(end - start for _, start, end in spans) for spans in self.spans]

    @cached_property
    def idle(self):
        """Time that each rank does nothing while others work.  -> [rank]"""
        return [self.makespan - work for work in self.work]

    @cached_property
    def gaps(self):
        """Time that each rank does nothing between its first and last action.  -> [rank]"""
        return [spans[-1][2] - spans[0][1] - work for spans, work in zip(self.spans, self.work)]

    @property
    def bubble_of_ideal(self):
        return sum(self.idle) / sum(self.work)

    @property
    def bubble_of_total(self):
        return sum(self.idle) / (self.makespan * len(self.spans))

    @cached_property
    def live(self):
        """Count the activations that each rank holds at worst, in chunks.  -> [rank]"""
        return [peak_live(actions) for actions in self.schedule.actions]


def cost(schedule, F=1, I=1, W=1, message=0):                                      # noqa: E741
    """Work out when everything happens.  B takes I + W; a message, from rank to rank.

    F, I, W: one micro-batch through all layers of a rank; through one of v chunks, 1/v of it."""
    if min(F, I, W) <= 0:
        raise BadInput(f"F, I and W take {F:g}, {I:g} and {W:g}; use a time above 0 for each")
    v = schedule.v
    time = {"F": F / v, "I": I / v, "W": W / v, "B": (I + W) / v}
    spans, ready = [[] for _ in range(schedule.p)], {}
    for rank, action in Walk(schedule):
        kind, i, chunk = action
        source, _ = schedule.neighbours(rank, action)
        start = spans[rank][-1][2] if spans[rank] else 0
        if source is not None:
            far = schedule.home(source)[0] != rank
            start = max(start, ready[passed(kind), i, source] + (message if far else 0))
        spans[rank].append((action, start, start + time[kind]))
        ready[passed(kind), i, schedule.stage(rank, chunk)] = start + time[kind]
    return Timeline(schedule, spans)


def peak_live(actions):
    """Count the activations alive at worst: from an F to its B, or to its W."""
    alive = peak = 0
    for kind, _, _ in actions:
        alive += {"F": 1, "I": 0}.get(kind, -1)
        peak = max(peak, alive)
    return peak


def step(timeline, gradients, layers=1, overlap=True):
    """Go on with a step: when each rank has summed its gradients over its replicas.  -> [end]

    gradients: time that those of all layers of a rank take on the wire.  layers: in a chunk.
    overlap: each layer's leave as soon as its last backward has run; else all at the end."""
    each, ends = gradients / timeline.schedule.v / layers, []
    for spans in timeline.spans:
        last = {chunk: (start, end) for (kind, _, chunk), start, end in spans if kind in "BW"}
        ready = sorted(start + (i + 1) / layers * (end - start) for start, end in last.values()
                       for i in range(layers)) if overlap else [spans[-1][2]] * len(last) * layers
        wire = 0
        for time in ready:
            wire = max(wire, time) + each
        ends.append(max(wire, spans[-1][2]))
    return ends


# === Pictures ===

def name(schedule, action):
    """Label an action: "F3", and with several chunks "F3a", "F3b"."""
    kind, i, chunk = action
    return f"{kind}{i}" + ("abcdefghijklmnopqrstuvwxyz"[chunk % 26] if schedule.v > 1 else "")


def lines(timeline, columns=100, ascii=False):
    """Draw one row of text per rank, with its idle time and live activations at the end.

    Labels where they fit into `columns`, else one sign per unit of time, and of what is too long
    the beginning and the end; of many ranks, some."""
    shown = range(0, timeline.schedule.p, -(-timeline.schedule.p // ROWS))
    heads = [f"rank {r}".ljust(len(f"rank {shown[-1]}")) for r in shown]
    ends = [f"idle {float(timeline.idle[r]):g}, live {timeline.live[r]}" for r in shown]
    room = columns - len(heads[0]) - max(map(len, ends)) - 4
    shortest = min(end - start for spans in timeline.spans for _, start, end in spans)
    widest = 1 + max(len(name(timeline.schedule, action)) for action, _, _ in timeline.spans[0])
    labelled = widest * timeline.makespan <= room * shortest
    scale = (widest if labelled else 1) / shortest
    rows = [elide(paint(timeline, r, scale, labelled, ascii), room) for r in shown]
    return [f"{head}  {row}  {end}" for head, row, end in zip(heads, rows, ends)]


def paint(timeline, rank, scale, labelled, ascii):
    """Draw what one rank does, `scale` characters per unit of time."""
    row = ["." if ascii else "·"] * round(timeline.makespan * scale)
    for action, start, end in timeline.spans[rank]:
        start, end = round(start * scale), round(end * scale)
        if labelled:
            more = "-" if ascii else "─"
            row[start:end] = name(timeline.schedule, action).ljust(end - start - 1, more) + " "
        else:
            row[start:end] = (action[0] if ascii else BLOCKS[action[0]]) * (end - start)
    return "".join(row)


def elide(text, room):
    """Keep the beginning and the end of what is longer than room."""
    if len(text) <= room:
        return text
    left = (room - 5) // 2
    return f"{text[:left]} ... {text[-(room - 5 - left):]}"


def draw(axes, timeline, colors=COLORS):
    """Draw the timeline on matplotlib axes, one row per rank; later chunks are paler."""
    s, bars = timeline.schedule, {}
    for rank, spans in enumerate(timeline.spans):
        for (kind, _, chunk), start, end in spans:
            bars.setdefault((rank, kind, chunk), []).append((float(start), float(end - start)))
    for (rank, kind, chunk), some in bars.items():
        axes.broken_barh(some, (rank - 0.45, 0.9), color=colors[kind], edgecolor="white",
                         alpha=1 - 0.5 * chunk / s.v, linewidth=0.4 if s.p * s.m < 2000 else 0)
    if s.p * s.m * s.v <= 200:
        for rank, spans in enumerate(timeline.spans):
            for (_, i, _), start, end in spans:
                axes.text(float(start + end) / 2, rank, i, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, float(timeline.makespan)), ylim=(s.p - 0.5, -0.5), ylabel="rank",
             facecolor=IDLE)
    ideal, total = float(timeline.bubble_of_ideal), float(timeline.bubble_of_total)
    axes.set_title(f"{s.name}: {s.p} ranks, {s.m} micro-batches, bubble {ideal:.3f} of the ideal, "
                   f"{total:.3f} of the total", fontsize=9, loc="left")


def picture(timelines):
    """Make what files.write needs for one picture of several timelines on one time axis."""
    height = sum(min(3, 0.8 + 0.25 * t.schedule.p) for t in timelines) + 0.5
    return files.picture(draw_all, timelines, size=(11, height))


def draw_all(figure, timelines):
    """Draw timelines one below the other, with one legend."""
    from matplotlib.patches import Patch
    for axes, timeline in zip(figure.subplots(len(timelines), squeeze=False).flat, timelines):
        draw(axes, timeline)
        axes.set_xlim(0, float(max(t.makespan for t in timelines)))
    words = {"F forward": COLORS["F"], "B or I backward": COLORS["B"],
             "W weight gradients": COLORS["W"], "idle": IDLE}
    figure.legend(handles=[Patch(color=color, label=text) for text, color in words.items()],
                  loc="outside lower center", ncols=4)


# === The command ===

LEGEND = """\
bubble/ideal  idle time / working time              bubble/total  idle time / (ranks x makespan)
live          activations alive on the worst rank, in micro-batches through all its layers
messages      between ranks, per step"""


def numbers(timeline):
    """Collect what a timeline says, as data."""
    t, s = timeline, timeline.schedule
    return {"schedule": s.name, "ranks": s.p, "microbatches": s.m, "chunks": s.v,
            "makespan": t.makespan, "work": max(t.work), "idle": t.idle, "gaps": t.gaps,
            "bubble_of_ideal": t.bubble_of_ideal, "bubble_of_total": t.bubble_of_total,
            "live": t.live, "messages": sum(len(sent) for sent, _ in borders(s).values())}


def table(timelines):
    """Compare schedules in numbers.  -> lines"""
    rows = [("schedule", "chunks", "makespan", "work", "bubble/ideal", "bubble/total", "live",
             "messages")]
    for t in map(numbers, timelines):
        rows.append((t["schedule"], t["chunks"], f"{t['makespan']:g}", f"{t['work']:g}",
                     f"{t['bubble_of_ideal']:.4f}", f"{t['bubble_of_total']:.4f}",
                     f"{max(t['live']) / t['chunks']:g}", t["messages"]))
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join([str(row[0]).ljust(widths[0]),
                       *(str(x).rjust(w) for x, w in zip(row[1:], widths[1:]))]) for row in rows]


def parser():
    p = flags.Parser(prog="python -m minidist.simulate", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.simulate --schedule gpipe,1f1b -p 4 -m 8")
    p.add_argument("--schedule", default="1f1b", metavar="NAME,...",
                   help=f"all, or some of {', '.join(schedules.ORDERS)} (default 1f1b)")
    p.add_argument("-p", type=flags.integer(1), default=4, metavar="P", help="ranks (default 4)")
    p.add_argument("-m", type=flags.integer(1), default=8, metavar="M",
                   help="micro-batches (default 8)")
    p.add_argument("--chunks", type=flags.integer(1), metavar="V",
                   help="chunks per rank (default: as few as the schedule allows)")
    for kind, what in (("F", "a forward"), ("I", "the gradient of the input"),
                       ("W", "the gradients of the weights")):
        p.add_argument(f"--{kind}", type=flags.real(0), default=1.0, metavar="TIME",
                       help=f"time of {what}, of one micro-batch through all layers of a rank "
                            "(default 1)")
    p.add_argument("--message", type=flags.real(0), default=0.0, metavar="TIME",
                   help="time from rank to rank (default 0)")
    p.add_argument("--columns", type=flags.integer(60), default=100, metavar="N",
                   help="width of the drawing (default 100)")
    p.add_argument("--ascii", action="store_true",
                   help="draw with plain characters, as is done where the output has no others")
    p.add_argument("--figure", metavar="FILE", help="write a picture (PNG)")
    p.add_argument("--json", metavar="FILE", help="write the numbers as data")
    return p


def main():
    args = parser().parse_args()
    names = list(schedules.ORDERS) if args.schedule == "all" else args.schedule.split(",")
    look(args, args.json)
    made = [schedules.make(name, args.p, args.m, args.chunks) for name in names]
    timelines = [cost(s, args.F, args.I, args.W, args.message) for s in made]
    if environment.rank() != 0:
        return
    for timeline in timelines:
        s = timeline.schedule
        print(f"{s.name}: {s.p} ranks, {s.m} micro-batches; B = I + W = {args.I + args.W:g} F",
              *lines(timeline, args.columns, args.ascii), "", sep="\n")
    print(*table(timelines), "", LEGEND, sep="\n")
    return files.deliver(
        ("data", args.json, files.numbers({"rows": [numbers(t) for t in timelines]})),
        ("picture", args.figure, picture(timelines)))


def look(args, *paths):
    """See before the work that what it makes can be shown and written."""
    files.ready(*paths, args.figure)
    if args.figure:
        files.drawable()
    try:
        "".join(BLOCKS.values()).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        args.ascii = True


if __name__ == "__main__":
    launch.run(main)
