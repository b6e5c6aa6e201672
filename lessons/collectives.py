"""COLLECTIVES      What are the six moves from which every kind of parallelism is made?

  lifts   nothing     by themselves; but every technique is a cut, and some of these to mend it
  costs   bandwidth   the same bytes on every path; what differs is how much one port must carry
  code    minidist/collectives/: calls.py, tree.py, alltoall.py, hierarchical.py
  run     mpirun -n 4 python -m lessons.collectives      or: python -m lessons.collectives -n 4
"""
import numpy as np

from lessons import kit, questions_arrays, setting
from minidist import cost
from minidist.collectives import (all_gather, all_reduce, all_to_all, alltoall, broadcast, calls,
                                  hierarchical, reduce, reduce_scatter, ring, tree)
from minidist.ranks.comm import run_threads

EXERCISE = [tree.broadcast, tree.reduce, alltoall.pairwise]


def six_moves(lesson):
    """Six moves

    Rank r holds 1 2 3 ... times 10^r: in a sum, every rank has a digit of its own."""
    comm, p, r = lesson.comm, lesson.comm.size, lesson.comm.rank
    x = np.arange(1, p + 1) * 10 ** r
    lesson.rows(["holds", "broadcast", "all_gather piece r", "all_to_all"], map(brief, [
        x, broadcast(x, comm), all_gather(x[r:r + 1], comm),
        np.concatenate(all_to_all(np.split(x, p), comm))]))
    lesson.rows(["reduce", "reduce_scatter", "all_reduce"], map(brief, [
        reduce(x, comm), reduce_scatter(x, comm), all_reduce(x, comm)]))


def brief(x):
    """A small array as text; of a long one the beginning; nothing as a dot."""
    if x is None:
        return "."
    return f"[{' '.join(map(str, x))}]" if len(x) < 5 else f"[{x[0]} ..]"


def who_needs_them(lesson):
    """Who needs them, and what do they cost?

    broadcast    the first weights (dp)              reduce           a loss to print
    all_gather   weights (ZeRO-3), tokens (sp)       reduce_scatter   gradients (ZeRO-2), sp
    all_to_all   tokens to their experts (ep)        all_reduce       gradients (dp), tp
    Left and right of the first two lines are each other's gradient; all_to_all is its own."""
    lesson.predict("8 ranks sum vectors of 100 MB in a ring: MB sent by all together?", 1400,
                   "MB", why="2(p-1) S",
                   mistakes={175: "that is one rank", 700: "the sum must also come back"})
    comm, p, n = lesson.comm, lesson.comm.size, 1000 * lesson.comm.size
    x, pieces, rows, busiest = np.ones(n), np.ones(n // p), [], []
    for name, algorithm, formula, move, given in (
            ("broadcast", "tree", "(p-1) S", broadcast, x),
            ("reduce", "tree", "(p-1) S", reduce, x),
            ("all_gather", "ring", "(p-1) S", all_gather, pieces),
            ("reduce_scatter", "ring", "(p-1) S", reduce_scatter, x),
            ("all_to_all", "pairwise", "(p-1) S", all_to_all, [pieces] * p),
            ("all_reduce", "ring", "2(p-1) S", all_reduce, x)):
        with comm.counting() as counted:
            move(given, comm, algorithm=algorithm)
        sent = lesson.collect(counted.bytes)
        rows.append((f"{name} ({algorithm}), all ranks together", formula, None, sum(sent)))
        busiest.append(f"{max(sent) / 8 / n:g}")
    lesson.ledger(*rows, p=p, S=8 * n)
    lesson.say(f"The busiest rank sends, in S, in this order: {', '.join(busiest)}.")


def two_halves(lesson):
    """all_reduce = reduce_scatter + all_gather, and no port carries more than its part"""
    comm, p, n = lesson.comm, lesson.comm.size, 1000 * lesson.comm.size
    y = np.random.default_rng(comm.rank).standard_normal(n)
    with comm.counting() as two:
        steps = all_gather(reduce_scatter(y, comm, algorithm="ring"), comm, algorithm="ring")
    with comm.counting() as one:
        whole = all_reduce(y, comm, algorithm="ring")
    lesson.check("bit by bit the same", kit.difference(steps, whole))
    with comm.counting() as root:
        tree.naive_all_reduce(np.ones(n), comm)
    through_root = lesson.collect(root.bytes)
    lesson.ledger(("a rank, in one", "2(p-1)/p S", None, one.bytes),
                  ("a rank, in two", "2(p-1)/p S", None, two.bytes),
                  ("all ranks together, by a root", "2(p-1) S", None, sum(through_root)),
                  ("the root: out, and in", "(p-1) S", None, max(through_root)), p=p, S=8 * n)
    lesson.say("""
        Time is what the busiest port takes: in a ring p/2 times less. ZeRO stops half way, with a
        piece of the summed gradient; updates that piece; and gathers weights in place of gradients.
        """)


def two_nodes(lesson):
    """k = 2 nodes of g = 4 ranks: what a hierarchical all_reduce saves"""
    lesson.predict("Vectors of 100 MB, four network ports per node: MB out of each?",
                   25, "MB", why="2(k-1)/k S / g",
                   mistakes={100: "the four ports share it", 175: "that is a flat ring's one port"})
    lesson.ledger(*lesson.share(counted_on_nodes), p=8, k=2, g=4, S=64000)
    lesson.say("""
        In total nothing; but between the nodes, where wires are slow, less, over four ports.""")
    lesson.figure(draw)


def counted_on_nodes(n=8000, k=2, g=4):
    """Ledger rows: a flat ring and a hierarchical all_reduce on k nodes of g thread ranks."""
    def rank(comm):
        node = comm.rank // g
        groups = hierarchical.groups(comm, comm.split(node, name="node"))
        with comm.recording() as flat:
            ring.all_reduce(np.ones(n), comm)
        with comm.counting() as counted:
            hierarchical.all_reduce(np.ones(n), groups)
        sent = [e for e in flat if e.kind == "send"]
        return (sum(e.nbytes for e in sent), counted.bytes,
                sum(e.nbytes for e in sent if e.peer // g != node), counted.by_group["rail"].bytes,
                len(sent), counted.messages)
    per_rank = np.array(run_threads(k * g, rank))
    flat, tiered, _, tiered_out = per_rank[:, :4].sum(0).tolist()
    most = per_rank.max(0).tolist()
    return [("all ranks, flat ring", "2(p-1) S", None, flat),
            ("all ranks, hierarchical", "2(p-1) S", None, tiered),
            ("out of one node, hierarchical", "2(k-1)/k S", None, tiered_out // k),
            ("out of one node, flat: one port", "2(p-1)/p S", None, most[2]),
            ("busiest of its g ports, hierarchical", "2(k-1)/k S/g", None, most[3]),
            ("steps, flat ring", "2(p-1)", None, most[4]),
            ("steps, hierarchical", "2(g-1) + 2(k-1)", None, most[5])]


def prove(lesson):
    """Is it right, for every root and lengths that do not divide?"""
    questions_arrays.collectives(lesson)
    comm, p, r = lesson.comm, lesson.comm.size, lesson.comm.rank
    n = 3 * p + 1
    xs = [setting.numbers(n, k) for k in range(p)]
    x, total = xs[r].copy(), sum(xs)
    pieces = [np.array_split(y, p) for y in xs]              # [rank][piece]
    sizes = [len(piece) for piece in pieces[0]]
    roots = [kit.difference(broadcast(x, comm, root), xs[root]) for root in range(p)]
    roots += [kit.difference(y, total) for root in range(p)
              if (y := reduce(x, comm, root)) is not None]
    lesson.check("broadcast from and reduce to every root", max(roots))
    lesson.check("all_gather and all_to_all, uneven", max(map(
        kit.difference, all_to_all(pieces[r], comm, shapes=[(sizes[r],)] * p),
        [pieces[k][r] for k in range(p)])) + kit.difference(
            all_gather(pieces[r][r], comm, sizes=sizes),
            np.concatenate([pieces[k][k] for k in range(p)])))
    lesson.check("reduce_scatter and all_reduce, uneven ring", kit.difference(
        reduce_scatter(x, comm, algorithm="ring"), np.array_split(total, p)[r]) + kit.difference(
            all_reduce(x, comm, algorithm="ring"), total))
    lesson.check("inputs stay as they were", kit.difference(x, xs[r]))
    counts(lesson, x, pieces[r], sizes)


def counts(lesson, x, pieces, sizes):
    """Count what the functions of the exercise send: each rank, and all together."""
    comm, p, r, n = lesson.comm, lesson.comm.size, lesson.comm.rank, x.size
    received = [np.empty(sizes[r]) for _ in range(p)]
    moves = [("tree.broadcast", "(p-1)", lambda: tree.broadcast(x.copy(), comm)),
             ("tree.reduce", "(p-1)", lambda: tree.reduce(x.copy(), comm)),
             ("alltoall.pairwise", "p (p-1)", lambda: alltoall.pairwise(pieces, received, comm))]
    rows = []
    for name, messages, move in moves:
        with comm.counting() as sent:
            move()
        everyone = np.array(lesson.collect([sent.messages, sent.bytes])).sum(0)
        rows += [(f"{name}: messages", messages, None, everyone[0]),
                 (f"{name}: bytes", "(p-1) 8 n", None, everyone[1])]
    lesson.ledger(*rows, p=p, n=n)


@kit.breaks(cost, "chunks")
def lost_remainder(n, p):
    """Chunks of n // p elements: the last n mod p belong to nobody.

    Found in more than one ring; whoever tests with powers of two never sees it."""
    return [n // p] * p


@kit.breaks(tree, "place_in_tree")
def root_is_zero(comm, root):
    """The tree is always built around rank 0, whatever root was asked for.

    Right for root 0, and so in all tests that never ask for another."""
    return root_is_zero.original(comm, 0)


@kit.breaks(calls, "start")
def overwrites_input(x, out):
    """An all_reduce sums in the caller's own array, to save a copy.

    The result is right. The second all_reduce of the same gradient, or the logging after it, is
    not: it meets a sum where it expects this rank's part."""
    return x if out is None and x.flags.c_contiguous else overwrites_input.original(x, out)


def draw(figure, p=8):
    left, right = figure.subplots(1, 2)
    ranks = np.arange(p)
    left.bar(ranks - 0.2, [p - 1] + [1] * (p - 1), 0.4, label="by the root, rank 0")
    left.bar(ranks + 0.2, [2 * (p - 1) / p] * p, 0.4, label="in the ring")
    left.set(xlabel="rank", ylabel="sent through its port, as a multiple of S",
             title="the same total, 14 S")
    left.legend()
    many = 2 ** np.arange(1, 11)
    right.loglog(many, many - 1, "o-", label="by the root: (p-1) S")
    right.loglog(many, 2 * (many - 1) / many, "o-", label="in the ring: 2(p-1)/p S")
    right.set(xlabel="ranks", title="the busiest port, as a multiple of S")
    right.legend()


TAKEAWAY = "Ask of a collective: who ends up with what, and which port carries most?"
FIELD = "the same names in torch.distributed and NCCL; MPI_Allreduce and so on"
TRY = ["make a broadcast of a large array from two other moves: at what price?"]
SCREENS = [six_moves, who_needs_them, two_halves, two_nodes, prove, lost_remainder]

if __name__ == "__main__":
    kit.run(SCREENS)
