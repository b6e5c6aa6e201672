"""Bench of what memory costs: a training step with recomputation, or offload, beside a plain one.

All take turns, step by step, and each is compared with the plain step of its own round, so that a
busy machine disturbs both alike.  Beside the measured ratio stands that of the FLOPs of products.

Run:    python -m minidist.bench memory
Lesson: python -m lessons.recompute
"""
import statistics
import tempfile
import time
from functools import partial
from types import SimpleNamespace

from minidist import cost, files, flags, offload, recompute
from minidist.bench.engine import BATCH, VOCAB, start
from minidist.engine import gpt
from minidist.engine.optim import AdamW

WAYS = *recompute.WHAT, "offload"


def parser():
    p = flags.Parser(prog="python -m minidist.bench memory", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.bench memory --preset nano")
    p.add_argument("--preset", default="mini", help="lesson, nano or mini (default mini)")
    p.add_argument("--rounds", type=flags.integer(1), default=15, metavar="N",
                   help="steps of each, after one to warm up (default 15)")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY",
                   help=f"{', '.join(WAYS)} (default: all)")
    p.add_argument("--dir", default=tempfile.gettempdir(), help="for offload's file")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    return p


def main():
    """Measure and print, in one process."""
    args = parser().parse_args()
    ways = ["plain", *args.ways]
    gpt.preset(args.preset, vocab=VOCAB)                    # refuses what it does not know
    files.ready(args.json)
    seconds = in_rounds([maker(args, way) for way in ways], args.rounds)
    rows = [row(args.preset, way, mine, seconds[0]) for way, mine in zip(ways, seconds)]
    print(f"one step of {args.preset}, float32, batch {BATCH[args.preset]}, AdamW, one thread; "
          f"{args.rounds} rounds in turn\n\n{'':10} {'ms':>8} {'of plain':>9} {'by FLOPs':>9}   "
          "medians; of plain: of the ratios within a round")
    for r in rows:
        print(f"{r['way']:10} {r['step_ms']:8.1f} {r['ratio']:9.3f} {r['flops_ratio']:9.3f}")
    return files.deliver(("data", args.json, files.numbers({"rows": rows})))


def maker(args, way):
    """Make a function that takes one step.  Of offload, with its optimizer's state in a file"""
    model, batch = start(args.preset)
    if way in recompute.WHAT:
        recompute.parallelize(model, way)
    optimizer = AdamW(model.parameters(), 1e-3)
    if way == "offload":
        offload.attach(optimizer, SimpleNamespace(), partial(offload.File, folder=args.dir))

    def step():
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step(1 / batch.count)
    return step


def in_rounds(steps, rounds):
    """Take one step of each in every round.  -> for each, seconds by round, the first left out"""
    times = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, mine in zip(steps, times):
            begin = time.perf_counter()
            step()
            mine.append(time.perf_counter() - begin)
    return [mine[1:] for mine in times]


def row(preset, way, mine, plain):
    """Say how long a step takes, by the clock and by the FLOPs of its products."""
    sizes = cost.Sizes.of(gpt.preset(preset, vocab=VOCAB), B=BATCH[preset])
    more = 0 if way not in recompute.WHAT else cost.recomputed_flops(sizes, way)
    return {"way": way, "step_ms": 1e3 * statistics.median(mine),
            "ratio": statistics.median(a / b for a, b in zip(mine, plain)),
            "flops_ratio": 1 + more / cost.gpt_flops(sizes)}
