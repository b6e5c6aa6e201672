"""RING ALLREDUCE      How do p ranks sum a vector so that nobody sends more than twice its size?

  lifts   bandwidth   at the root of a plain sum (p-1) S go in and out; here each port carries < 2 S
  costs   latency     2(p-1) messages one after the other, where trees need about 2 log p
  code    minidist/collectives/ring.py, tree.py, double_tree.py
  before  lessons.collectives  (the six primitives)            next  lessons.dp
  run     mpirun -n 4 python -m lessons.ring       or: python -m lessons.ring -n 4
"""
import math
import time

import numpy as np

from lessons import kit
from minidist import cost
from minidist.collectives import double_tree, ring
from minidist.collectives import all_reduce
from minidist.ranks.comm import run_threads

EXERCISE = [ring.reduce_scatter, ring.all_gather, ring.all_reduce]
ALGORITHMS = "naive", "recursive_doubling", "ring", "double_tree"


def main(lesson):
    comm = lesson.comm
    p = comm.size

    lesson.part("Once around to add, once around to copy")
    lesson.say("""
        Cut the vector into p chunks. In every hop each rank sends one chunk to the right; what it
        receives, it first adds to its own, then, in the second round, keeps as it is.""")
    lesson.source(ring.reduce_scatter, "for step")
    states = hop_by_hop(comm)
    shown = range(len(states)) if p < 5 else [0, 1, p - 1, p, 2 * p - 2]
    lesson.rows([f"hop {i}" if i else "start" for i in shown], [states[i] for i in shown])
    lesson.say(f"""
        All vectors start as ones: a number says how many ranks a chunk has met. After {p - 1} hops
        chunk r is complete on rank r: a reduce_scatter. {p - 1} more copy it to all ranks: an
        all_gather.""")

    lesson.part("About 2 S, however many ranks")
    lesson.predict("4 ranks, a vector of 1 MB: how much does each rank send?", 1.5, "MB",
                   why="6 hops of a quarter",
                   mistakes={3: "that is the root of a plain sum", 6: "that is all ranks together",
                             1: "once around is half of it: the sums must still reach everybody"})
    n = 6400
    counts = lesson.share(lambda: [[count(q, n, a) for a in ALGORITHMS] for q in (2, 4, 8, 16, 32)])
    lesson.say("\nCounted on thread ranks: what the busiest rank sends, as a multiple of S")
    lesson.table(["ranks", "to the root", "recursive doubling", "ring", "double tree", "2(p-1)/p"],
                 [[q, *(f"{sent / n / 8:.3f}" for sent, _ in row), f"{2 * (q - 1) / q:.3f}"]
                  for q, row in zip((2, 4, 8, 16, 32), counts)])
    lesson.say("""
        No algorithm sends less. And neither does the ring in total: all ranks together send
        2(p-1) S, to a root or around; the ring only lets no port do more than its part.""")

    lesson.part("Small messages: the ring waits 2(p-1) times")
    lesson.say("time of one message = alpha + bytes x beta, measured here between neighbours:")
    alpha, beta = measured_link(lesson)
    lesson.say(f"""
        alpha {kit.duration(alpha)}, beta {kit.duration(1e6 * beta)} per MB. Recursive doubling:
        log p steps of S; ring: 2(p-1) of S/p; equally long at S = {crossover(p, alpha, beta)}.""")
    sizes = [64, 4096, 65536, 1 << 20]
    times = [[timed(lesson, algorithm, size) for algorithm in ALGORITHMS] for size in sizes]
    lesson.table([f"measured, p = {p}", "to the root", "recursive doubling", "ring", "double tree"],
                 [[kit.size(size), *map(kit.duration, row)] for size, row in zip(sizes, times)])

    lesson.part("Many ranks: two trees at once")
    lesson.say("""
        A tree needs log p steps, but half of its ranks are leaves, which pass nothing on. So take
        two, one for each half of the vector: a leaf of one is inner in the other. p = 8:""")
    lesson.table(["rank", *map(str, range(8))], trees(8))
    lesson.say("""
        NCCL adds latency and bytes / bandwidth for each algorithm, and takes the fastest. In its
        own constants (tuning.cc; nodes of 8 GPUs), the latency of an all_reduce:""")
    lesson.table(["GPUs", "ring", "double tree"], [nccl(nodes) for nodes in (2, 16, 128)])
    lesson.figure(draw, sizes, times, p)

    lesson.part("Is it right, and what does it cost?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(send_first)
    lesson.takeaway(
        "The ring buys bandwidth with latency: right for few ranks and large vectors.",
        field="NCCL_ALGO=Ring, Tree; MPI_Allreduce switches by size; Horovod began as a ring",
        tries=["at 1024 ranks, from which S on does the ring beat recursive doubling?",
               "write all three functions: --stub mine.py, then --mine mine.py"])


def prove(lesson):
    """Check all three functions for lengths that divide and that do not, and count them."""
    comm = lesson.comm
    p, r = comm.size, comm.rank
    wrong, sent, expected = [0.0, 0.0, 0.0], np.zeros(2, int), np.zeros(2, int)
    for n in (1000, 0, 1, p - 1, p, p + 1):
        mine = [np.arange(n) * (k + 2.0) + k for k in range(p)]
        total = sum(mine)
        x = mine[r].copy()
        ring.reduce_scatter(ring.cut(x, cost.chunks(n, p)), comm)
        own = ring.cut(np.arange(n), cost.chunks(n, p))[r]
        wrong[0] += kit.difference(x[own], total[own])
        x = np.where(np.isin(np.arange(n), own), total, -1)
        ring.all_gather(ring.cut(x, cost.chunks(n, p)), comm)
        wrong[1] += kit.difference(x, total)
        x = mine[r].copy()
        with comm.counting() as counted:
            ring.all_reduce(x, comm)
        wrong[2] += kit.difference(x, total)
        sent += [counted.messages, counted.bytes]
        expected += cost.all_reduce("ring", p, n, 8, r)[1:]
    lesson.check("reduce_scatter: chunk r on rank r, exactly", wrong[0])
    lesson.check("all_gather: every chunk everywhere, exactly", wrong[1])
    lesson.check("all_reduce: the sum, exactly", wrong[2])
    lesson.ledger(("messages sent, six lengths together", "6 x 2(p-1)", expected[0], sent[0]),
                  ("bytes sent, six lengths together", "2(p-1)/p S, uneven", expected[1], sent[1]))


# ---- breaks

@kit.breaks(ring, "reduce_scatter", sync=True, first="for step")
def send_first(chunks, comm, op=np.add):
    """Everybody sends to the right first, and then receives from the left.

    So it passes every test on small arrays, and hangs on the first real gradient."""
    incoming = comm.scratch(max(chunk.size for chunk in chunks), chunks[0].dtype)
    for step in range(1, comm.size):
        mine = chunks[comm.rank - step - 1]
        comm.send(chunks[comm.rank - step], (comm.rank + 1) % comm.size)
        op(mine, comm.recv(incoming[:mine.size], (comm.rank - 1) % comm.size), out=mine)


@kit.breaks(ring, "reduce_scatter")
def off_by_one(chunks, comm, op=np.add):
    """The chunk index is off by one: rank r ends with chunk r+1.

    So the ring was first described for deep learning (Baidu, 2017): right inside an all_reduce
    whose second half starts from there too, wrong as a reduce_scatter of its own."""
    incoming = comm.scratch(max(chunk.size for chunk in chunks), chunks[0].dtype)
    for step in range(comm.size - 1):
        mine = chunks[comm.rank - step - 1]
        op(mine, comm.shift(chunks[comm.rank - step], into=incoming[:mine.size]), out=mine)


@kit.breaks(ring, "reduce_scatter")
def added_too_early(chunks, comm, op=np.add):
    """The receive buffer is added before the message has arrived.

    A race: right where the neighbour happened to be early, wrong elsewhere, and so in every run
    somewhere else."""
    incoming = comm.scratch(max(chunk.size for chunk in chunks), chunks[0].dtype)
    for step in range(1, comm.size):
        mine = chunks[comm.rank - step - 1]
        came = comm.irecv(incoming[:mine.size], (comm.rank - 1) % comm.size)
        gone = comm.isend(chunks[comm.rank - step].copy(), (comm.rank + 1) % comm.size)
        op(mine, incoming[:mine.size], out=mine)
        came.wait(), gone.wait()


# ---- what the screens above count

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
    x = np.ones(comm.size)
    watched = Watched(comm, x)
    ring.all_reduce(x, watched)
    return watched.states + [x]


def count(p, n, algorithm):
    """Sum n numbers on p thread ranks.  -> most bytes that one rank sends, most messages"""
    def rank(comm):
        with comm.counting() as counted:
            all_reduce(np.ones(n), comm, algorithm=algorithm)
        return counted.bytes, counted.messages
    return [max(counts) for counts in zip(*run_threads(p, rank))]


def timed(lesson, algorithm, nbytes):
    """Median time of an all_reduce, each one's the time of the slowest rank."""
    comm, x, laps = lesson.comm, np.zeros(nbytes // 4, np.float32), []
    for _ in range(5):
        comm.barrier()
        start = time.perf_counter()
        all_reduce(x, comm, out=x, algorithm=algorithm)
        laps.append(time.perf_counter() - start)
    return float(np.median(np.max(lesson.collect(laps), axis=0)))


def measured_link(lesson):
    """Time of the shortest shift, and of each further byte.  -> seconds, seconds per byte"""
    def shift(nbytes):
        x, into, laps = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8), []
        for _ in range(20):
            start = time.perf_counter()
            lesson.comm.shift(x, into)
            laps.append(time.perf_counter() - start)
        return float(np.median(lesson.collect(laps)))
    alpha = shift(8)
    return alpha, (shift(1 << 21) - alpha) / (1 << 21)


def crossover(p, alpha, beta):
    """The size at which ring and recursive doubling take the same time (p a power of two)."""
    log = math.log2(p)
    more_steps, fewer_bytes = 2 * (p - 1) - log, log - 2 * (p - 1) / p
    if fewer_bytes <= 0:
        return "no size"
    return kit.size(round(alpha * more_steps / (beta * fewer_bytes)))


def trees(p):
    """Who is above whom in the two trees, and what everyone sends, as multiples of S."""
    both = [[tree(r, p) for r in range(p)]
            for tree in (double_tree.first_tree, double_tree.second_tree)]
    rows = [[f"{name} half goes up to", *("-" if up is None else str(up) for up, _ in tree)]
            for name, tree in zip(("first", "second"), both)]
    inner = [[str(k + 1) for k in (0, 1) if both[k][r][1]] for r in range(p)]
    sent = [sum(len(tree[r][1]) + (tree[r][0] is not None) for tree in both) / 2 for r in range(p)]
    return rows + [["inner in tree", *map("+".join, inner)],
                   ["sends, in S", *map("{:g}".format, sent)]]


def nccl(nodes):
    """Latency of NCCL's ring and tree between nodes of 8 GPUs, in its own model's constants."""
    p = 8 * nodes
    between = 2 * (nodes - 1)
    ring_us = 8.4 + (2 * (p - 1) - between) * 3.4 + between * 14
    tree_us = 8.4 + 2 * (7 * 4.0 + math.log2(nodes) * 14)
    return [p, kit.duration(ring_us / 1e6), kit.duration(tree_us / 1e6)]


def draw(figure, sizes, times, p):
    left, right = figure.subplots(1, 2)
    for name, column in zip(ALGORITHMS, zip(*times)):
        left.loglog(sizes, np.array(column) * 1e3, "o-", label=name)
    left.set(xlabel="bytes", ylabel="ms", title=f"all_reduce on {p} ranks, measured here")
    left.legend()
    trees_drawn = (double_tree.first_tree, 0, "C0"), (double_tree.second_tree, 5, "C1")
    for tree, place, color in trees_drawn:
        for r in range(8):
            above = tree(r, 8)[0]
            if above is not None:
                ends = place + depth(tree, r), place + depth(tree, above)
                right.plot([r, above], ends, color)
            right.text(r, place + depth(tree, r), str(r), ha="center", va="center",
                       bbox=dict(boxstyle="circle", fc="white", ec=color))
    right.set(title="two trees over the same 8 ranks")
    right.invert_yaxis()
    right.set_axis_off()


def depth(tree, rank):
    above = tree(rank, 8)[0]
    return 0 if above is None else 1 + depth(tree, above)


if __name__ == "__main__":
    kit.run(main)
