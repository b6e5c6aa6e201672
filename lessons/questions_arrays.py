"""What each function of an exercise is asked on ranks, arrays in and arrays out: collectives, ring.

Every rank knows what all ranks hold, so the right answers need no message. Integers and float32
beside float64, a maximum beside sums, pieces of different sizes. Messages received are counted as
well as those sent; which rank does most in a tree is a matter of taste, so all are compared sorted.
"""
import numpy as np

from minidist.collectives import alltoall, ring, tree

KINDS = ((7, np.int32, np.add), (5, np.float32, np.maximum), (1, np.float64, np.add))

WORD = {np.add: "sum", np.maximum: "maximum"}


def numbers(p, shape, kind, seed=0):
    """One array of whole numbers from -9 to 9 for each rank: their sum is exact in any order."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 10, shape).astype(kind) for _ in range(p)]


def over_ranks(op, arrays):
    """The sum, or the maximum, of all ranks' arrays."""
    total = arrays[0].copy()
    for x in arrays[1:]:
        op(total, x, out=total)
    return total


def moved(events):
    """Messages and bytes that this rank has sent, and received."""
    ends = [[e.nbytes for e in events if e.kind == kind] for kind in ("send", "recv")]
    return [(len(sizes), sum(sizes)) for sizes in ends]


# ---- lessons.collectives

def collectives(lesson):
    with lesson.asking() as ask:
        for n, kind, op in KINDS:
            xs = numbers(lesson.comm.size, n, kind)
            for root in range(lesson.comm.size):
                down(lesson, ask, xs, root)
                up(lesson, ask, xs, root, op)
        for kind in np.int32, np.float64:
            across(lesson, ask, kind)


def down(lesson, ask, xs, root):
    x = xs[lesson.comm.rank].copy()
    ask("broadcast", f"{x.size} {x.dtype} numbers from root {root}")
    with lesson.comm.recording() as events:
        tree.broadcast(x, lesson.comm, root)
    ask.right("x", x, xs[root])
    in_a_tree(lesson, ask, x.nbytes, *moved(events), "sent", "received")


def up(lesson, ask, xs, root, op):
    x, options = xs[lesson.comm.rank].copy(), {} if op is np.add else dict(op=op)
    ask("reduce", f"the {WORD[op]} of {x.size} {x.dtype} numbers on root {root}")
    with lesson.comm.recording() as events:
        tree.reduce(x, lesson.comm, root, **options)
    if lesson.comm.rank == root:
        ask.right("x", x, over_ranks(op, xs))
    in_a_tree(lesson, ask, x.nbytes, *moved(events)[::-1], "received", "sent")


def in_a_tree(lesson, ask, nbytes, many, one, *ways):
    """In one direction every rank but one has one message; in the other one for each child."""
    p, everyone = lesson.comm.size, list(zip(*lesson.collect([many, one])))
    children = [sum(place + (1 << i) < p for i in range(9) if place % (2 << i) == 0)
                for place in range(p)]
    for found, right, way in zip(everyone, (children, [0] + [1] * (p - 1)), ways):
        ask.right(f"messages and bytes {way}, of all ranks, sorted", sorted(map(tuple, found)),
                  sorted((messages, messages * nbytes) for messages in right))


def across(lesson, ask, kind):
    p, r = lesson.comm.size, lesson.comm.rank
    full = {(a, b): np.arange(1 + (3 * a + 2 * b) % 4).astype(kind) + 10 * a + b    # from a to b
            for a in range(p) for b in range(p)}
    given, right = [full[r, s] for s in range(p)], [full[s, r] for s in range(p)]
    pieces, received = [x.copy() for x in given], [np.full_like(x, -1) for x in right]
    ask("pairwise", f"pieces of {[x.size for x in given]} {given[0].dtype} numbers on rank {r}")
    with lesson.comm.recording() as events:
        alltoall.pairwise(pieces, received, lesson.comm)
    ask.right("received", received, right)
    ask.right("pieces, which stay as they were", pieces, given)
    for way, found, arrays in zip(("sent", "received"), moved(events), (given, right)):
        others = sum(x.nbytes for s, x in enumerate(arrays) if s != r)
        ask.right(f"messages and bytes {way}", found, (p - 1, others))


# ---- lessons.ring

def of_a_ring(lesson):
    with lesson.asking() as ask:
        for n, kind, op in KINDS:
            halves(lesson, ask, [len(x) for x in np.array_split(np.arange(n), lesson.comm.size)],
                   kind, op)
            halves(lesson, ask, [(n * s) % 4 for s in range(lesson.comm.size)], kind, op)
            both(lesson, ask, n, kind, op)


def halves(lesson, ask, sizes, kind, op):
    """One half of the ring after the other, each from where the other would have to leave it."""
    p, r, ends = lesson.comm.size, lesson.comm.rank, np.cumsum(sizes)[:-1]
    xs, what = numbers(p, sum(sizes), kind), f"chunks of {sizes} {np.dtype(kind)} numbers"
    total, x = over_ranks(op, xs), xs[r].copy()
    mine, options = np.split(total, ends)[r], {} if op is np.add else dict(op=op)
    ask("reduce_scatter", f"the {WORD[op]} of {what}")
    with lesson.comm.recording() as events:
        ring.reduce_scatter(np.split(x, ends), lesson.comm, **options)
    ask.right(f"chunk {r}", np.split(x, ends)[r], mine)
    ask.right("messages sent, received", [n for n, _ in moved(events)], [p - 1] * 2)
    x = np.full_like(total, -99)
    np.split(x, ends)[r][...] = mine
    ask("all_gather", what)
    with lesson.comm.recording() as events:
        ring.all_gather(np.split(x, ends), lesson.comm)
    ask.right("all chunks", x, total)
    ask.right("messages sent, received", [n for n, _ in moved(events)], [p - 1] * 2)


def both(lesson, ask, n, kind, op):
    p, options = lesson.comm.size, {} if op is np.add else dict(op=op)
    xs = numbers(p, n, kind)
    x = xs[lesson.comm.rank].copy()
    ask("all_reduce", f"the {WORD[op]} of {n} {x.dtype} numbers")
    with lesson.comm.recording() as events:
        ring.all_reduce(x, lesson.comm, **options)
    ask.right("x", x, over_ranks(op, xs))
    ask.right("messages sent, received", [n for n, _ in moved(events)], [2 * (p - 1)] * 2)
    x = np.sqrt(np.arange(11.0) + lesson.comm.rank)
    ask("all_reduce", "11 numbers whose sum depends on the order")
    ring.all_reduce(x, lesson.comm)
    ask.right("x, bit by bit as on rank 0", x, np.array(lesson.collect(x.tolist())[0]))
