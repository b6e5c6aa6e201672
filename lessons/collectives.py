"""COLLECTIVES      What are the six moves from which every kind of parallelism is made?

  lifts   nothing     by themselves; but every technique is a cut, and some of these to mend it
  costs   bandwidth   (p-1)/p S per rank for the one-way moves, twice that for an all_reduce
  code    minidist/collectives/: calls.py, tree.py, alltoall.py, hierarchical.py
  before  lessons.memory                                       next  lessons.ring
  run     mpirun -n 4 python -m lessons.collectives      or: python -m lessons.collectives -n 4
"""
import numpy as np

from lessons import kit
from minidist import cost
from minidist.collectives import alltoall, calls, hierarchical, ring, tree
from minidist.collectives import (all_gather, all_reduce, all_to_all, broadcast, reduce,
                                  reduce_scatter)
from minidist.ranks.comm import run_threads

EXERCISE = [tree.broadcast, tree.reduce, alltoall.pairwise]


def main(lesson):
    comm = lesson.comm
    p, r = comm.size, comm.rank
    n = 1000 * p
    S = 8 * n

    lesson.part("Six moves")
    x = np.arange(1, p + 1) * 10 ** r
    lesson.say("Rank r holds 1 2 3 ... times 10^r: in a sum, every rank has a digit of its own.")
    pair(lesson, ("broadcast: the root's for all", x if r == 0 else None, broadcast(x, comm)),
         ("reduce: the sum, at the root", x, reduce(x, comm)))
    pair(lesson, ("all_gather: the pieces for all", x[r:r + 1], all_gather(x[r:r + 1], comm)),
         ("reduce_scatter: a piece of the sum", x, reduce_scatter(x, comm)))
    pair(lesson, ("all_to_all: piece s to rank s", x,
                  np.concatenate(all_to_all(np.split(x, p), comm))),
         ("all_reduce: the sum for all", x, all_reduce(x, comm)))

    lesson.part("Who needs them, and what do they cost?")
    lesson.say("""
        broadcast    the first weights (dp)              reduce           a loss to print
        all_gather   weights (ZeRO-3), tokens (sp)       reduce_scatter   gradients (ZeRO-2), sp
        all_to_all   tokens to their experts (ep)        all_reduce       gradients (dp), tp
        Left and right of the first two lines are each other's gradient; all_to_all is its own.
        Bytes sent per rank (shown: rank 0, the root):
        """)
    lesson.ledger(*priced(comm, n))

    lesson.part("all_reduce = reduce_scatter + all_gather")
    y = np.random.default_rng(r).standard_normal(n)
    with comm.counting() as two:
        steps = all_gather(reduce_scatter(y, comm, algorithm="ring"), comm, algorithm="ring")
    with comm.counting() as one:
        whole = all_reduce(y, comm, algorithm="ring")
    lesson.check("bit by bit the same", kit.difference(steps, whole))
    lesson.ledger(("bytes of one, and of the two", "2(p-1)/p S", one.bytes, two.bytes))
    lesson.say("""
        So ZeRO stops half way, where each rank has its piece of the summed gradient; updates that
        piece; and gathers the new weights in place of the gradient, for the price of plain dp.""")

    lesson.part("The busiest port")
    lesson.predict("A ring in place of a root: how many per cent fewer bytes, all ranks together?",
                   0, "%", why="2(p-1) S either way",
                   mistakes={50: "that is what the busiest port saves, on 4 ranks"})
    ports = traffic(comm, n)
    lesson.rows(["root: sends", "receives", "ring: sends", "receives"],
                [kit.size(port) for port in ports])
    everyone = np.array(lesson.collect(ports))
    out, _, around, _ = everyone.sum(0)
    busiest = everyone.max(0)
    lesson.ledger(("all ranks together, by the root", "2(p-1) S", 2 * (p - 1) * S, out),
                  ("all ranks together, in the ring", "2(p-1) S", 2 * (p - 1) * S, around),
                  ("busiest port, by the root", "(p-1) S in, and out", (p - 1) * S, busiest[0]),
                  ("busiest port, in the ring", "2(p-1)/p S", 2 * (p - 1) * S // p, busiest[2]))
    lesson.say("""
        Not fewer bytes: but time is what the busiest port takes, and here it is p/2 times less.""")

    lesson.part("Two nodes of four ranks: what a hierarchical all_reduce saves")
    lesson.ledger(*lesson.share(lambda: two_nodes(n=8000)))
    lesson.say("""
        In total nothing. Between the nodes 1.75 S become S, and they take four ports at once
        instead of one, in fewer steps. That is what counts where the wires are slow.""")
    lesson.figure(draw)

    lesson.part("Is it right?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(lost_remainder)
    lesson.takeaway("Ask of a collective: who ends up with what, and which port carries most?",
                    field="the same names in torch.distributed and NCCL; MPI_Allreduce and so on",
                    tries=["make a broadcast of a large array from two other moves: at what price?",
                           "write tree.broadcast, tree.reduce, alltoall.pairwise: --stub mine.py"])


def prove(lesson):
    """Check all six against sums and slices, for every root and lengths that do not divide."""
    comm = lesson.comm
    p, r = comm.size, comm.rank
    n = 3 * p + 1
    xs = [np.arange(n) * (k + 2.0) + k for k in range(p)]
    x, total = xs[r].copy(), sum(xs)
    pieces = [np.array_split(y, p) for y in xs]              # [rank][piece]
    sizes = [len(piece) for piece in pieces[0]]

    roots = [kit.difference(broadcast(x, comm, root), xs[root]) for root in range(p)]
    roots += [kit.difference(y, total) for root in range(p)
              if (y := reduce(x, comm, root)) is not None]
    lesson.check("broadcast from and reduce to every root", max(roots))
    lesson.check("all_gather, uneven", kit.difference(
        all_gather(pieces[r][r], comm, sizes=sizes),
        np.concatenate([pieces[k][k] for k in range(p)])))
    lesson.check("all_to_all, uneven", max(map(
        kit.difference, all_to_all(pieces[r], comm, shapes=[(sizes[r],)] * p),
        [pieces[k][r] for k in range(p)])))
    lesson.check("reduce_scatter, uneven", kit.difference(
        reduce_scatter(x, comm, algorithm="ring"), np.array_split(total, p)[r]))
    lesson.check("all_reduce, uneven ring", kit.difference(
        all_reduce(x, comm, algorithm="ring"), total))
    lesson.check("inputs stay as they were", kit.difference(x, xs[r]))
    lesson.ledger(*counted(comm, x, pieces[r], sizes))


# ---- breaks

@kit.breaks(cost, "chunks")
def lost_remainder(n, p):
    """Chunks of n // p elements: the last n mod p belong to nobody.

    Found in more than one ring; whoever tests with powers of two never sees it. Here every length
    is cut by one function, as np.array_split does."""
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


# ---- what the screens above count

def pair(lesson, left, right):
    """Show two moves side by side, before and after, one row per rank."""
    (name, before, after), (other, was, now) = left, right
    lesson.say(f"\n{name:48}{other}")
    lesson.rows(["before", "after", "|", "before", "after"],
                [*map(brief, (before, after)), "|", *map(brief, (was, now))])


def brief(x):
    """A small array as text; of a long one the beginning; nothing as a dot."""
    if x is None:
        return "."
    text = " ".join(map(str, x))
    return f"[{text}]" if len(x) < 5 else f"[{x[0]} ..]"


def priced(comm, n):
    """Ledger rows: each of the six with the algorithm named, predicted and counted."""
    p, r = comm.size, comm.rank
    x, pieces = np.ones(n), np.ones(n // p)
    rows = [("broadcast", "tree", "log2(p) S at the root", broadcast, x, n),
            ("reduce", "tree", "S, but 0 at the root", reduce, x, n),
            ("all_gather", "ring", "(p-1)/p S", all_gather, pieces, [n // p] * p),
            ("reduce_scatter", "ring", "(p-1)/p S", reduce_scatter, x, [n // p] * p),
            ("all_to_all", "pairwise", "(p-1)/p S", all_to_all, [pieces] * p, [n // p] * p),
            ("all_reduce", "ring", "2(p-1)/p S", all_reduce, x, n)]
    for name, algorithm, formula, move, given, sizes in rows:
        with comm.counting() as counted:
            move(given, comm, algorithm=algorithm)
        price = getattr(cost, name)
        args = (p, sizes, 8, r) if isinstance(sizes, int) else (sizes, 8, r)
        yield f"{name} ({algorithm})", formula, price(algorithm, *args).bytes, counted.bytes


def traffic(comm, n):
    """Bytes out of and into my port, summing at a root and in a ring.  -> 4 numbers"""
    ports = []
    for algorithm in (tree.naive_all_reduce, ring.all_reduce):
        with comm.recording() as events:
            algorithm(np.ones(n), comm)
        ports += [sum(e.nbytes for e in events if e.kind == kind) for kind in ("send", "recv")]
    return ports


def two_nodes(n, k=2, g=4):
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
    p, S = k * g, 8 * n
    per_rank = np.array(run_threads(p, rank))
    flat, tiered, flat_out, tiered_out = per_rank[:, :4].sum(0).tolist()
    most = per_rank.max(0).tolist()
    return [("all ranks, flat ring", "2(p-1) S", 2 * (p - 1) * S, flat),
            ("all ranks, hierarchical", "2(p-1) S", 2 * (p - 1) * S, tiered),
            ("out of one node, flat ring", "2(p-1)/p S", 2 * (p - 1) * S // p, flat_out // k),
            ("out of one node, hierarchical", "2(k-1)/k S", 2 * (k - 1) * S // k, tiered_out // k),
            ("busiest network port, flat ring", "2(p-1)/p S", 2 * (p - 1) * S // p, most[2]),
            ("busiest network port, hierarchical", "2(k-1)/k S/g", 2 * (k - 1) * S // p, most[3]),
            ("steps, flat ring", "2(p-1)", 2 * (p - 1), most[4]),
            ("steps, hierarchical", "2(g-1) + 2(k-1)", 2 * (g - 1) + 2 * (k - 1), most[5])]


def counted(comm, x, pieces, sizes):
    """Ledger rows of the functions that the exercise asks for."""
    p, r, n = comm.size, comm.rank, x.size
    received = [np.empty(sizes[r]) for _ in range(p)]
    moves = [("tree.broadcast", lambda: tree.broadcast(x.copy(), comm),
              cost.broadcast("tree", p, n, 8, r)),
             ("tree.reduce", lambda: tree.reduce(x.copy(), comm), cost.reduce("tree", p, n, 8, r)),
             ("alltoall.pairwise", lambda: alltoall.pairwise(pieces, received, comm),
              cost.all_to_all("pairwise", sizes, 8, r))]
    predicted, messages = 0, 0
    for name, move, price in moves:
        with comm.counting() as sent:
            move()
        yield f"{name}: bytes", "see cost", price.bytes, sent.bytes
        predicted, messages = predicted + price.messages, messages + sent.messages
    yield "messages of the three", "see cost", predicted, messages


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


if __name__ == "__main__":
    kit.run(main)
