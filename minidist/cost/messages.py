"""What each rank pays for a collective, in closed form.

    cost.all_reduce("ring", p=4, n=1000, itemsize=4, rank=0)  ->  Price(6, 6, 6000)

    steps       sends, receives and exchanges of this rank, those at the same time included
    messages    those that it sends, empty ones included
    bytes       payload bytes that it *sends*, exact for uneven sizes and for any p

Shares no code with the algorithms, so that predicting and counting check each other.

Lesson: mpirun -n 4 python -m lessons.collectives
"""
from functools import cache
from itertools import accumulate
from typing import NamedTuple

TREE_CHUNK = 1 << 18            # bytes: the double tree's pipeline moves its halves in such chunks


class Price(NamedTuple):
    """What one rank pays for one collective."""
    steps: int
    messages: int
    bytes: int

    def __add__(self, other):
        return Price(*map(sum, zip(self, other)))

    def __rmul__(self, times):
        return Price(*(times * x for x in self))


NOTHING = Price(0, 0, 0)


def always_ring(collective, nbytes, p):
    """Name the ring, whatever the size."""
    return "ring"


class Group(NamedTuple):
    """p ranks, one of them, and the rule by which they choose an algorithm."""
    p: int
    rank: int = 0
    chosen: object = always_ring        # (collective, bytes of the full array, p) -> algorithm

    def all_reduce(self, n, w):
        """Price of summing n numbers of w bytes over the group."""
        return all_reduce(self.chosen("all_reduce", n * w, self.p), self.p, n, w, self.rank)

    def reduce_scatter(self, sizes, w):
        """Price of summing over the group and keeping sizes[rank] numbers of the sum."""
        name = self.chosen("reduce_scatter", sum(sizes) * w, self.p)
        return reduce_scatter(name, sizes, w, self.rank)

    def all_gather(self, sizes, w):
        """Price of collecting sizes[r] numbers from each rank of the group."""
        return all_gather(self.chosen("all_gather", sum(sizes) * w, self.p), sizes, w, self.rank)

    def broadcast(self, n, w, root=0):
        """Price of giving n numbers of the root to the group."""
        name = self.chosen("broadcast", n * w, self.p)
        return broadcast(name, self.p, n, w, self.rank, root)


def chunks(n, p):
    """The one chunking rule: p lengths that add up to n, the first n mod p are one longer."""
    return [n // p + (r < n % p) for r in range(p)]


def all_reduce(algorithm, p, n, itemsize, rank):
    """Price of summing n elements over p ranks."""
    if algorithm == "naive":
        return reduce("naive", p, n, itemsize, rank) + broadcast("naive", p, n, itemsize, rank)
    if algorithm == "tree":
        return reduce("tree", p, n, itemsize, rank) + broadcast("tree", p, n, itemsize, rank)
    if algorithm == "ring":
        sizes = chunks(n, p)
        return (reduce_scatter("ring", sizes, itemsize, rank)
                + all_gather("ring", sizes, itemsize, rank))
    if algorithm == "double_tree":
        return double_tree(p, n, itemsize, rank)
    place, guests, log = fold(p, rank)
    if place is None:                                       # gives away all, gets back all
        return Price(2, 1, n * itemsize)
    if algorithm == "recursive_doubling":
        return Price(log + 2 * guests, log + guests, (log + guests) * n * itemsize)
    ranges = folded(chunks(n, p))
    sent = n - ranges[place] + doubled(ranges, place) + guests * n
    return Price(2 * log + 2 * guests, 2 * log + guests, sent * itemsize)


def reduce_scatter(algorithm, sizes, itemsize, rank):
    """Price of summing over ranks and keeping sizes[rank] elements of the sum."""
    p, n = len(sizes), sum(sizes)
    if algorithm in ("ring", "pairwise"):
        return Price(p - 1, p - 1, (n - sizes[rank]) * itemsize)
    place, guests, log = fold(p, rank)
    if place is None:
        return Price(2, 1, n * itemsize)
    sent = n - folded(sizes)[place] + guests * sizes[rank - 1]
    return Price(log + 2 * guests, log + guests, sent * itemsize)


def all_gather(algorithm, sizes, itemsize, rank):
    """Price of collecting every rank's sizes[rank] elements on all ranks."""
    p, n = len(sizes), sum(sizes)
    if algorithm == "pairwise":
        return Price(p - 1, p - 1, (p - 1) * sizes[rank] * itemsize)
    if algorithm == "ring":
        return Price(p - 1, p - 1, (n - sizes[(rank + 1) % p]) * itemsize)
    place, guests, log = fold(p, rank)
    if place is None:
        return Price(2, 1, sizes[rank] * itemsize)
    sent = doubled(folded(sizes), place) + guests * n
    return Price(log + 2 * guests, log + guests, sent * itemsize)


def broadcast(algorithm, p, n, itemsize, rank, root=0):
    """Price of giving n elements of the root to all."""
    place = (rank - root) % p
    sends = binomial_children(p, place) if algorithm == "tree" else (p - 1) * (place == 0)
    return Price(sends + (place > 0), sends, sends * n * itemsize)


def reduce(algorithm, p, n, itemsize, rank, root=0):
    """Price of summing n elements on the root: a broadcast backwards."""
    place = (rank - root) % p
    steps = broadcast(algorithm, p, n, itemsize, rank, root).steps
    return Price(steps, int(place > 0), (place > 0) * n * itemsize)


def scatter(sizes, itemsize, rank, root=0):
    """Price of handing out the root's array, sizes[r] elements to rank r."""
    others = len(sizes) - 1
    if rank != root:
        return Price(1, 0, 0)
    return Price(others, others, (sum(sizes) - sizes[root]) * itemsize)


def gather(sizes, itemsize, rank, root=0):
    """Price of collecting sizes[r] elements of every rank r on the root."""
    if rank == root:
        return Price(len(sizes) - 1, 0, 0)
    return Price(1, 1, sizes[rank] * itemsize)


def all_to_all(algorithm, sizes, itemsize, rank):
    """Price of sending sizes[s] elements to each rank s (all the same for Bruck's)."""
    p = len(sizes)
    if algorithm == "pairwise":
        return Price(p - 1, p - 1, (sum(sizes) - sizes[rank]) * itemsize)
    log = (p - 1).bit_length()
    hops = sum(bin(i).count("1") for i in range(p))         # a piece hops once per bit of its way
    return Price(log, log, hops * sizes[0] * itemsize)


def double_tree(p, n, itemsize, rank, chunk_bytes=TREE_CHUNK):
    """Price of NCCL's all_reduce: each half up and down a tree of its own, in chunks."""
    halves = chunks(n, 2)
    places = rank, (p - 1 - rank if p % 2 == 0 else (rank - 1) % p)
    pieces = max(1, -(-halves[0] // max(1, chunk_bytes // itemsize)))
    price = Price(0, 0, 0)
    for half, place in zip(halves, places):
        up, down = int(place > 0), inner_children(p, place)
        sends = up + down                                   # and as many receives
        price += Price(2 * sends * pieces, sends * pieces, sends * half * itemsize)
    return price


def hierarchical(nodes, n, itemsize, rank):
    """Price of an all_reduce in and across nodes: nodes[k] consecutive ranks on node k."""
    ends = list(accumulate(nodes))
    node = next(k for k, end in enumerate(ends) if rank < end)
    place, rails = rank - (ends[node] - nodes[node]), min(nodes)
    sizes = chunks(n, rails) + [0] * (nodes[node] - rails)
    price = (reduce_scatter("ring", sizes, itemsize, place)
             + all_gather("ring", sizes, itemsize, place))
    if place < rails:
        price += all_reduce("ring", len(nodes), sizes[place], itemsize, node)
    return price


def fold(p, rank):
    """(place in the largest power of two, number of ranks folded into it, log2 of that power)

    A rank that is folded into its right neighbour has no place."""
    log = p.bit_length() - 1
    extra = p - (1 << log)
    if rank >= 2 * extra:
        return rank - extra, 0, log
    return (rank // 2, 1, log) if rank % 2 else (None, 0, log)


def folded(sizes):
    """Fold the pieces of extra ranks into those of their right neighbours: a power of two remain"""
    extra = len(sizes) - (1 << len(sizes).bit_length() - 1)
    return [sizes[2 * i] + sizes[2 * i + 1] for i in range(extra)] + list(sizes[2 * extra:])


def doubled(ranges, place):
    """Elements that a member sends while blocks of 1, 2, 4, ... ranges double."""
    bits = [1 << k for k in range((len(ranges) - 1).bit_length())]
    return sum(sum(ranges[place & -bit:(place & -bit) + bit]) for bit in bits)


def binomial_children(p, place):
    """How many ranks the one at this place serves in a binomial tree: one per free lower bit."""
    below = place & -place if place else 1 << (p - 1).bit_length()
    return sum(place + (1 << k) < p for k in range(below.bit_length() - 1))


def inner_children(p, place):
    """How many children a place has in a binary tree whose leaves are odd, and whose root is 0."""
    if place == 0:
        return int(p > 1)
    return 0 if place % 2 else 1 + (place + 1 < p)


# --- Time: what the automatic choice compares, and a benchmark fits. ---
#
# For even sizes, of the rank that has most to do: (steps, bytes sent, bytes added), the last two as
# multiples of the full array's bytes.  Two constants are fitted, to the benchmark that choice.py's
# ALPHA comes from: p - 1 messages that share one wait take as long as 0.6 p steps, more than one
# and fewer than p - 1; and halving, which keeps its partial sums in a second array, takes as long
# as if it sent half an array more.

AT_ONCE, SECOND_ARRAY = 0.6, 0.5
TERMS = {
    ("all_reduce", "naive"): lambda p: (2 * (p.ranks - 1), 2 * (p.ranks - 1), p.ranks - 1),
    ("all_reduce", "tree"): lambda p: (2 * p.levels, 2 * p.levels, p.levels),
    ("all_reduce", "recursive_doubling"):
        lambda p: (p.bits + 2 * p.folds, p.bits + 2 * p.folds, p.bits + p.folds),
    ("all_reduce", "halving_doubling"):
        lambda p: (2 * p.bits + 2 * p.folds, 2 * p.halved + 2 * p.folds, p.halved + p.folds),
    ("all_reduce", "ring"): lambda p: (2 * (p.ranks - 1), 2 * p.cut, p.cut),
    ("reduce_scatter", "pairwise"): lambda p: (p.at_once, p.cut, p.cut),
    ("reduce_scatter", "ring"): lambda p: (p.ranks - 1, p.cut, p.cut),
    ("reduce_scatter", "halving"): lambda p: (
        p.bits + 2 * p.folds, p.halved + 2 * p.folds + SECOND_ARRAY, p.halved + p.folds),
    ("all_gather", "pairwise"): lambda p: (p.at_once, p.cut, 0),
    ("all_gather", "ring"): lambda p: (p.ranks - 1, p.cut, 0),
    ("all_gather", "doubling"): lambda p: (p.bits + 2 * p.folds, p.halved + 2 * p.folds, 0),
}


class Ranks(NamedTuple):
    """What the terms need to know of a number of ranks."""
    ranks: int
    bits: int                       # log2 of the ranks that are left after folding
    levels: int                     # of a binomial tree
    folds: int                      # 1 if some rank is folded: its whole array goes once more
    cut: float                      # an array less one rank's piece
    halved: float                   # the same, among the ranks that are left
    at_once: float                  # steps that p - 1 messages under one wait are worth


@cache
def ranks(p):
    """Work out Ranks."""
    bits = p.bit_length() - 1
    return Ranks(p, bits, (p - 1).bit_length(), int(p != 1 << bits), (p - 1) / p,
                 1 - 1 / (1 << bits), AT_ONCE * p if p > 1 else 0)


def seconds(collective, algorithm, p, nbytes, alpha, beta, gamma):
    """Predict the time of a collective over p ranks, for nbytes of the full array.

    alpha: seconds per step; beta: per byte sent; gamma: per byte added."""
    steps, sent, added = terms(collective, algorithm, p, nbytes)
    return steps * alpha + sent * beta + added * gamma


def terms(collective, algorithm, p, nbytes):
    """Look up (steps, bytes sent, bytes added) of the rank that has most to do."""
    steps, sent, added = TERMS[collective, algorithm](ranks(p))
    return steps, sent * nbytes, added * nbytes
