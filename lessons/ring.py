"""RING ALLREDUCE      How do p ranks sum a vector so that nobody sends more than twice its size?

  lifts   bandwidth   the root of a plain sum has (p-1) S going in and out; here no port has 2 S
  costs   latency     a chain of messages that grows with p, where trees need about 2 log2(p)
  code    minidist/collectives/ring.py, tree.py, double_tree.py
  run     mpirun -n 4 python -m lessons.ring       or: python -m lessons.ring -n 4
"""
import math

import numpy as np

from lessons import clock, kit, questions_arrays, setting
from minidist import cost
from minidist.collectives import all_reduce, double_tree, ring
from minidist.ranks import comm
from minidist.ranks.comm import run_threads

EXERCISE = [ring.reduce_scatter, ring.all_gather, ring.all_reduce]
POINTS = {"reduce_scatter": 2}
ALGORITHMS = "naive", "recursive_doubling", "ring", "double_tree"
NAMES = "to the root", "recursive doubling", "ring", "double tree"


def once_around(lesson):
    """Once around to add, once around to copy

    Cut the vector, of S bytes, into p chunks. In every hop each rank sends one chunk to the right.
    What it receives, it adds to its own; in the second round it keeps it as it is."""
    lesson.predict("4 ranks, a vector of 1 MB: how much does each rank send?", 1.5, "MB",
                   why="6 hops of a quarter",
                   mistakes={3: "that is the root of a plain sum", 6: "that is all ranks together",
                             0.75: "the sums must still reach everybody",
                             1: "3 hops of a quarter, and 3 more to copy"})
    p, states = lesson.comm.size, hop_by_hop(lesson.comm)
    shown = range(len(states)) if p < 5 else [0, 1, p - 1, p, 2 * p - 2]
    lesson.rows([f"hop {i}" if i else "start" for i in shown], [states[i] for i in shown])
    lesson.say(f"""
        A number says how many ranks a chunk has met. {p - 1} hops: chunk r is complete on rank r, a
        reduce_scatter. {p - 1} more copy it, an all_gather.""")


class Watched:
    """A communicator that notes the vector x before every hop."""

    def __init__(self, comm, x):
        self.comm, self.x, self.states = comm, x, []

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def shift(self, chunk, into):
        self.states.append(self.x.copy())
        return self.comm.shift(chunk, into)


def hop_by_hop(comm):
    """All-reduce a vector of p ones.  -> it, before the first and after every hop"""
    watched = Watched(comm, np.ones(comm.size))
    ring.all_reduce(watched.x, watched)
    return watched.states + [watched.x]


def about_2_s(lesson):
    """Less than 2 S, however many ranks

    Counted on thread ranks: what the busiest rank sends, as a multiple of S."""
    n, sizes = 6400, (2, 4, 8, 16, 32)
    counts = lesson.share(lambda: [[busiest(p, n, a) / n / 8 for a in ALGORITHMS] for p in sizes])
    lesson.table(["ranks", *NAMES, "2(p-1)/p"],
                 [[p, *(f"{sent:.3f}" for sent in row), f"{2 * (p - 1) / p:.3f}"]
                  for p, row in zip(sizes, counts)])
    lesson.say("""
        No algorithm sends less. And all ranks together send 2(p-1) S, to a root or around: the ring
        saves no byte, it only lets no port carry more than its part.""")


def busiest(p, n, algorithm):
    """Sum n numbers on p thread ranks.  -> most bytes that one rank sends"""
    def rank(comm):
        with comm.counting() as counted:
            all_reduce(np.ones(n), comm, algorithm=algorithm)
        return counted.bytes
    return max(run_threads(p, rank))


def small_messages(lesson):
    """Small messages: the ring waits 2(p-1) times

    A message takes alpha + bytes x beta. Recursive doubling takes log2(p) steps of S each, the ring
    2(p-1) of S/p. So the ring pays more alpha and less beta, and wins from some size on."""
    lesson.predict("1024 ranks, alpha 5 us, beta 20 us per MB: the ring wins from which S on?",
                   round(crossover(1024, 5e-6, 2e-11) / 1e6, 1), "MB",
                   why="2036 alphas more against 8 S beta less")
    alpha, beta = clock.link(lesson)
    sizes = [64, 16384, 1 << 20]
    times = [[clock.together(lesson, all_reduce, np.zeros(n // 8), lesson.comm, algorithm=a)
              for a in ALGORITHMS] for n in sizes]
    lesson.table([f"measured here, p = {lesson.comm.size}", *NAMES],
                 [[kit.size(size), *map(kit.duration, row)] for size, row in zip(sizes, times)])
    fastest = [NAMES[int(np.argmin(row))] for row in times]
    here = (f"alpha {kit.duration(alpha)}, beta {kit.duration(1e6 * beta)} per MB; 1024 ranks "
            f"would cross at {kit.size(crossover(1024, alpha, beta))}." if alpha else
            "one rank has nobody to send to.")
    lesson.fill(f"""
        Fastest in this run: {fastest[0]} for the smallest, {fastest[-1]} for the largest. Between
        two neighbours here: {here}""")
    lesson.figure(draw, sizes, times, lesson.comm.size)


def crossover(p, alpha, beta):
    """The size in bytes at which both take the same time (p a power of two, at least 4)."""
    more_steps = 2 * (p - 1) - math.log2(p)
    return alpha * more_steps / (beta * (math.log2(p) - 2 * (p - 1) / p))


def two_trees(lesson):
    """Many ranks: two trees at once

    A tree needs log2(p) steps, but half of its ranks are leaves, which pass nothing on. So take
    two, one for each half of the vector: a leaf of one is inner in the other. p = 8:"""
    lesson.table(["rank", *map(str, range(8))], trees(8))
    (few, tree), (many, wide) = nccl(2), nccl(128)
    lesson.fill(f"""
        NCCL adds latency and bytes / bandwidth for each algorithm and takes the fastest. In its own
        constants (tuning.cc) the latency of an all_reduce on 16 GPUs is {few} by the ring, {tree}
        by two trees; on 1024 GPUs {many}, and {wide}.""")


def trees(p):
    """Who is above whom in the two trees, and what everyone sends, as multiples of S."""
    both = [[tree(r, p) for r in range(p)]
            for tree in (double_tree.first_tree, double_tree.second_tree)]
    rows = [[f"{name} half goes up to", *("-" if up is None else str(up) for up, _ in tree)]
            for name, tree in zip(("first", "second"), both)]
    sent = [sum(len(tree[r][1]) + (tree[r][0] is not None) for tree in both) / 2 for r in range(p)]
    return rows + [["sends, in S", *map("{:g}".format, sent)]]


def nccl(nodes):
    """Latency of NCCL's ring and tree between nodes of 8 GPUs, in its own model's constants."""
    inside, between = 2 * 7 * nodes, 2 * (nodes - 1)
    latencies = inside * 3.4 + between * 14, 2 * (7 * 4.0 + math.log2(nodes) * 14)
    return [kit.duration((8.4 + us) / 1e6) for us in latencies]


def prove(lesson):
    """Is it right, and what does it cost?

    Six lengths, which p divides or not. All numbers are whole, so sums in any order are equal."""
    questions_arrays.of_a_ring(lesson)
    p, r = lesson.comm.size, lesson.comm.rank
    wrong, sent, price = np.zeros(3), np.zeros(2, int), np.zeros(2, int)
    for n in (200 * p, 0, 1, p - 1, p, p + 1):
        mine = [setting.numbers(n, k) for k in range(p)]
        total, sizes = sum(mine), cost.chunks(n, p)
        own = ring.cut(np.arange(n), sizes)[r]
        x = mine[r].copy()
        ring.reduce_scatter(ring.cut(x, sizes), lesson.comm)
        wrong[0] += kit.difference(x[own], total[own])
        x = np.where(np.isin(np.arange(n), own), total, -1)
        ring.all_gather(ring.cut(x, sizes), lesson.comm)
        wrong[1] += kit.difference(x, total)
        x = mine[r].copy()
        with lesson.comm.counting() as counted:
            ring.all_reduce(x, lesson.comm)
        wrong[2] += kit.difference(x, total)
        sent += [counted.messages, counted.bytes]
        price += cost.all_reduce("ring", p, n, 8, r)[1:]
    lesson.check("reduce_scatter: chunk r on rank r, exactly", wrong[0])
    lesson.check("all_gather: every chunk everywhere, exactly", wrong[1])
    lesson.check("all_reduce: the sum, exactly", wrong[2])
    everyone = np.array(lesson.collect([price[1].item(), sent[1].item()])).sum(0)
    lesson.ledger(("messages of a rank, six sums", "6 x 2(p-1)", price[0], sent[0]),
                  ("bytes of all ranks, six sums", "2(p-1) x 8 n", *everyone), p=p, n=203 * p + 1)


@kit.breaks(comm.Comm, "shift", sync=True)
def send_first(self, x, into):
    """Everybody sends to the right first, and then receives from the left.

    So it passes every test on small arrays, and hangs on the first real gradient."""
    self.send(x, (self.rank + 1) % self.size)
    return self.recv(into, (self.rank - 1) % self.size)


@kit.breaks(ring, "reduce_scatter")
def off_by_one(chunks, comm, op=np.add):
    """The chunk index is off by one: rank r ends with chunk r+1.

    Baidu's ring of 2017 was like this: right inside an all_reduce whose second half starts from
    there too, wrong as a reduce_scatter of its own."""
    off_by_one.original([*chunks[1:], chunks[0]], comm, op)


@kit.breaks(ring, "all_gather", ranks=3)
def always_my_own(chunks, comm):
    """Every hop passes on the rank's own chunk, instead of the one that has just come in.

    On two ranks there is only one hop, and all is right."""
    for step in range(comm.size - 1):
        comm.shift(chunks[comm.rank], into=chunks[comm.rank - step - 1])


def draw(figure, sizes, times, p):
    axes = figure.subplots()
    for name, column in zip(NAMES, zip(*times)):
        axes.loglog(sizes, np.array(column) * 1e3, "o-", label=name)
    axes.set(xlabel="bytes", ylabel="ms", title=f"all_reduce on {p} ranks, measured here")
    axes.legend()


TAKEAWAY = "The ring buys bandwidth with latency: right for few ranks and large vectors."
FIELD = "NCCL_ALGO=Ring, Tree; MPI_Allreduce switches by size; Horovod began as a ring"
TRY = ["why must a double tree give each half of the vector to another tree?"]
SCREENS = [once_around, about_2_s, small_messages, two_trees, prove, send_first]

if __name__ == "__main__":
    kit.run(SCREENS)
