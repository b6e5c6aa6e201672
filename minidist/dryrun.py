"""Dry run: ranks follow a pipeline schedule for real, with layers that sleep instead of computing.

    simulate   F0 F1 F2 F3 .  .  .  .  .  .  B0 -- .  B1 --       on paper
    dryrun     F0 F1 F2 F3 .  .  .  .  .  .  B0 --  .  B1 --      minidist.pp, by the clock

Sleeping takes no core, so many ranks fit on few. Actions, messages and their order are those of
training; what a plan leaves out is the time to hand a message over and to wake up, about 1 ms.
Sleep much longer than that: with v chunks per rank, an action takes 1/v of the time.

Run:    python -m minidist.dryrun --schedule gpipe,1f1b,zb-h1 --ms 100 --trace out.json
Lesson: python -m lessons.schedules
"""
import time
from types import SimpleNamespace

import numpy as np

from minidist import files, flags, pp, schedules, simulate
from minidist.engine.tensor import Tensor
from minidist.ranks import environment, launch
from minidist.ranks.comm import run_threads
from minidist.simulate import Timeline, lines, name
from minidist.trace import Span, chrome


def run(schedule, F=1, I=1, W=1, message=0, unit=0.1):                             # noqa: E741
    """Let thread ranks follow a schedule.  -> what happened, as a Timeline

    Times as in simulate.cost; unit: seconds that stand for a time of 1."""
    times = [unit * time / schedule.v for time in (F, I, W)]
    spans = run_threads(schedule.p, follow, schedule, times, link=(unit * message, float("inf")))
    zero = min(mine[0][1] for mine in spans)
    return Timeline(schedule, [[(action, (start - zero) / unit, (end - zero) / unit)
                                for action, start, end in mine] for mine in spans])


def follow(comm, schedule, times):
    """Be one rank of a pipeline whose layers sleep.  -> [(action, start, end)], in seconds"""
    stages, spans = [schedule.stage(comm.rank, chunk) for chunk in range(schedule.v)], []
    parts = {s: asleep(*times, last=s == schedule.stages - 1) for s in stages}
    model = SimpleNamespace(parts=parts, parameters=lambda: [np.zeros(1)],
                            config=SimpleNamespace(width=1))
    pipeline = pp.Pipeline(model, comm, schedule, [[s] for s in stages])
    pipeline.listeners.append(lambda run, *span: spans.append(span))
    comm.barrier()
    pp.Run(pipeline, schedule, schedule.m * [SimpleNamespace(rows=[0], stream=[0])]).all()
    return spans


def asleep(F, I, W, last):                                                         # noqa: E741
    """Make a stage that only takes time: forward, and in both halves of backward."""
    weight, result = Tensor(np.zeros(1), requires_grad=True), np.zeros(() if last else (1, 1, 1))

    def late():
        time.sleep(W)
        return np.zeros(1)

    def vjp(g):
        time.sleep(I)
        return late, np.zeros((1, 1, 1))                    # late: not called before W

    def stage(x, batch):
        time.sleep(F)
        x = Tensor(np.zeros((1, 1, 1))) if x is None else x
        return Tensor(result, (weight, x), vjp)

    return stage


# === The command ===

def parser():
    p = simulate.parser()
    p.prog, p.description = "python -m minidist.dryrun", __doc__.split("\n")[0]
    p.epilog = "example: python -m minidist.dryrun --schedule gpipe,1f1b --trace out.json"
    p.add_argument("--ms", type=flags.real(1), default=100.0, metavar="MS",
                   help="milliseconds that stand for a time of 1 (default 100)")
    p.add_argument("--trace", metavar="FILE",
                   help="write plan and run as a Chrome/Perfetto trace, side by side on each rank")
    return p


def spans(timeline, lane, unit):
    """Turn a timeline into spans for a trace, on one lane of each rank."""
    return [Span(rank, lane, name(timeline.schedule, action), float(unit * start), unit * end)
            for rank, mine in enumerate(timeline.spans) for action, start, end in mine]


def compared(plans, runs):
    """Lay what was measured beside the plans.  -> lines"""
    rows = ["bubble/ideal     plan       run   run / plan"]
    for plan, done in zip(plans, runs):
        a, b = plan.bubble_of_ideal, done.bubble_of_ideal
        rows.append(f"{plan.schedule.name:12} {a:8.4f}  {b:8.4f}" + (f"{b / a:13.2f}" if a else ""))
    return rows


def main():
    args = parser().parse_args()
    names = list(schedules.ORDERS) if args.schedule == "all" else args.schedule.split(",")
    simulate.look(args, args.json, args.trace)
    made = [schedules.make(name, args.p, args.m, args.chunks) for name in names]
    times, unit = (args.F, args.I, args.W, args.message), args.ms / 1e3
    plans = [simulate.cost(s, *times) for s in made]
    if environment.rank() != 0:
        return
    runs = [run(s, *times, unit) for s in made]
    for pair in zip(plans, runs):
        print(f"{pair[0].schedule.name}: plan, and run at {args.ms:g} ms for a time of 1")
        for timeline in pair:
            print(*lines(timeline, args.columns, args.ascii), "", sep="\n")
    print(*compared(plans, runs), sep="\n")
    return write(args, plans, runs, unit)


def write(args, plans, runs, unit):
    """Write the files that were asked for.  -> exit status"""
    found = [span for lane, some in (("plan", plans), ("run", runs))
             for t in some for span in spans(t, f"{t.schedule.name} {lane}", unit)]
    data = {lane: [simulate.numbers(t) for t in some]
            for lane, some in (("plan", plans), ("run", runs))}
    return files.deliver(("data", args.json, files.numbers(data)),
                         ("trace", args.trace, files.numbers(chrome(found))),
                         ("picture", args.figure, simulate.picture(plans + runs)))


if __name__ == "__main__":
    launch.run(main)
