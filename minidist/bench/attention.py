"""Bench of attention: plain, in tiles, PyTorch's fused one, on one thread; a ring over all ranks.

Forward and backward, causal, float32, one row, with mini's heads.  All take turns, so that a busy
machine disturbs them alike; a ratio is the median of the ratios of the rounds.

Run:    python -m minidist.bench attention -n 2
Lesson: mpirun -n 4 python -m lessons.flash
"""
import statistics
import time

import numpy as np

from minidist import cp, files, flags, flash
from minidist.engine.attention import scaled_dot_product_attention
from minidist.engine.tensor import Tensor
from minidist.ranks import comm, environment

HEADS, WIDTH = 6, 64                    # those of mini
LENGTHS = 2048, 4096


def parser():
    p = flags.Parser(prog="python -m minidist.bench attention",
                     description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.bench attention -n 2")
    p.add_argument("--tokens", type=flags.integer(1), metavar="T",
                   help="one length (default: 2048 and 4096)")
    p.add_argument("--rounds", type=flags.integer(1), default=7, metavar="N",
                   help="measured, after one to warm up (default 7)")
    p.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    return p


def main():
    args = parser().parse_args()
    world = comm.world() if environment.launched() else comm.solo()
    lengths = [args.tokens] if args.tokens else LENGTHS
    for T in lengths:
        cp.refuse_uneven_tokens(T, world.size, "zigzag")
    files.ready(args.json)
    rows = [row for T in lengths for row in measure(T, world, args.rounds, not args.no_torch)]
    if world.rank == 0:
        print("\n".join([header(), *map(line, rows)]))
        return files.deliver(("data", args.json, files.numbers({"rows": rows})))
    return 0


# ------------------------------------------------------------------------ what is measured

def measure(T, world, rounds, with_torch=True):
    """Time all of them in turn, rank 0 alone, then all ranks.  Collective.  -> rows, on rank 0"""
    arrays = np.random.default_rng(0).standard_normal((4, 1, HEADS, T, WIDTH), np.float32)
    works = {"plain": ours(scaled_dot_product_attention, arrays),
             "tiled": ours(flash.attention, arrays)}
    torch_work = theirs(arrays) if with_torch else None
    if torch_work:
        works["PyTorch fused"] = torch_work
    times = {name: [] for name in works}
    over_all, shared = f"ring, {world.size} ranks", ring(world, arrays)
    for _ in range(rounds + 1):
        for name, work in works.items():
            times[name].append(alone(world, work))
        if world.size > 1:
            times.setdefault(over_all, []).append(together(world, shared))
    if world.rank:
        return []
    return [row(T, name, [laps[1:] for laps in (series, times["tiled"], times["plain"])])
            for name, series in times.items()]


def ours(attention, arrays):
    """Make a function that goes forward and backward once."""
    def work():
        q, k, v = (Tensor(x, requires_grad=True) for x in arrays[:3])
        attention(q, k, v).backward(arrays[3])
    return work


def theirs(arrays):
    """The same with PyTorch on one thread, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)

    def work():
        q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays[:3])
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.backward(torch.from_numpy(arrays[3]))
    return work


def ring(world, arrays):
    """The same over all ranks, in zigzag."""
    places = cp.zigzag(arrays.shape[3], world.size)
    sights = [flash.Sight(places[world.rank], keys, True, HEADS) for keys in places]
    mine = np.ascontiguousarray(arrays[:, :, :, places[world.rank]])
    return ours(lambda q, k, v: cp.ring_attention(q, k, v, world, sights), mine)


def alone(world, work):
    """Let rank 0 work; the others wait asleep, since waiting ranks take a core.  -> its seconds"""
    done = np.empty(0, np.uint8)
    if world.rank:
        coming = world.irecv(done, 0)
        while not coming.ready():
            time.sleep(0.001)
        coming.wait()
        return 0.0
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    for r in range(1, world.size):
        world.send(done, r)
    return seconds


def together(world, work):
    """Work on all ranks, between two barriers.  -> seconds of the slowest"""
    world.barrier()
    start = time.perf_counter()
    work()
    world.barrier()
    return time.perf_counter() - start


def row(T, name, laps):
    """One line of the table: medians, and of rounds the ratios to the tiled and the plain one."""
    own, tiled, plain = laps
    ratio = [statistics.median(a / b for a, b in zip(own, other)) for other in (tiled, plain)]
    return dict(tokens=T, attention=name, ms=1e3 * statistics.median(own), of_tiled=ratio[0],
                of_plain=ratio[1])


# ------------------------------------------------------------------------ what is printed

def header():
    return (f"attention forward and backward, causal, float32, {HEADS} heads of {WIDTH}; one "
            "thread per rank;\nmedians of rounds taken in turn\n\n"
            f"{'tokens':>6}  {'attention':16} {'ms':>8} {'of tiled':>9} {'of plain':>9}")


def line(row):
    return (f"{row['tokens']:6}  {row['attention']:16} {row['ms']:8.1f} {row['of_tiled']:9.2f} "
            f"{row['of_plain']:9.2f}")
