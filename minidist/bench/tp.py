"""Bench of tensor parallelism: one training step on all ranks, beside the same step on one.

The two take turns, step by step, so that a busy machine disturbs both alike.

Run:    python -m minidist.bench tp -n 2
Lesson: mpirun -n 4 python -m lessons.tp
"""
import statistics
import time

from minidist import BadInput, files, flags, sp, tp
from minidist.engine import gpt
from minidist.engine.data import random_batch
from minidist.engine.optim import AdamW
from minidist.mesh import DeviceMesh
from minidist.ranks import comm
from minidist.step import train_step

VOCAB = 98                              # about as many characters as an English text has


def parser():
    p = flags.Parser(prog="python -m minidist.bench tp", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.bench tp -n 2 --sp")
    p.add_argument("--preset", default="mini", help="lesson, nano or mini (default mini)")
    p.add_argument("--batch", type=flags.integer(1), default=8, metavar="B", help="default 8")
    p.add_argument("--steps", type=flags.integer(1), default=7, metavar="N",
                   help="measured, after one to warm up (default 7)")
    p.add_argument("--sp", action="store_true", help="sequence parallelism too")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    return p


def main():
    args = parser().parse_args()
    world = comm.world()
    if world.size < 2:
        raise BadInput("1 rank shares no layer; start two: python -m minidist.bench tp -n 2")
    config = gpt.preset(args.preset, vocab=VOCAB)
    files.ready(args.json)
    alone, together = measure(args, config, world)
    if world.rank == 0:
        row = {"preset": args.preset, "batch": args.batch, "ranks": world.size, "sp": args.sp,
               "one_rank_ms": milliseconds(alone), "tp_ms": milliseconds(together),
               "ratio": round(statistics.median(together) / statistics.median(alone), 3)}
        print(table(row, alone, together))
        return files.deliver(("data", args.json, files.numbers({"rows": [row]})))
    return 0


def measure(args, config, world):
    """Time both in turn.  -> seconds of each step of one rank alone, and of all together"""
    mesh, batch = DeviceMesh(world, tp=world.size), random_batch(
        config.vocab, config.context, args.batch, seed=0, step=0, ragged=False)
    model = gpt.GPT(config)
    if args.sp:
        sp.parallelize(tp.parallelize(model, mesh["tp"], sp.enter, sp.leave), mesh["tp"])
    else:
        tp.parallelize(model, mesh["tp"])
    shared = model, batch, AdamW(model.parameters(), 1e-3), mesh
    if world.rank == 0:
        whole = gpt.GPT(config)
        own = whole, batch, AdamW(whole.parameters(), 1e-3)
    alone, together = [], []
    for _ in range(args.steps + 1):
        alone.append(timed(world, *own) if world.rank == 0 else timed(world))
        together.append(timed(world, *shared))
    return alone[1:], together[1:]


def timed(world, *step):
    """Take a step, or none, between two barriers.  -> seconds"""
    world.barrier()
    start = time.perf_counter()
    if step:
        train_step(*step)
    world.barrier()
    return time.perf_counter() - start


def milliseconds(times):
    return round(statistics.median(times) * 1e3, 1)


def table(row, alone, together):
    """Write down medians, with the fastest and the slowest."""
    lines = [f"one step of {row['preset']}, float32, batch {row['batch']}, "
             f"{len(alone)} steps each, in turn", "",
             f"{'':18} {'ms':>8}  {'fastest':>8}  {'slowest':>8}  of one rank's"]
    name = f"tp={row['ranks']}" + (" with sp" if row["sp"] else "")
    for label, times, share in (("one rank", alone, 1.0), (name, together, row["ratio"])):
        cells = "  ".join(f"{x * 1e3:8.1f}" for x in (statistics.median(times), min(times),
                                                      max(times)))
        lines.append(f"{label:18} {cells}  {share:12.2f}")
    return "\n".join(lines)
