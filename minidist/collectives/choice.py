"""Which algorithms there are for each collective, and which one the automatic choice takes.

The choice compares predicted times: steps x ALPHA + bytes x BETA + bytes added x GAMMA.  The three
constants are fixed, so that every rank, every run and every machine chooses the same.
`python -m minidist.bench collectives` fits them to its own run, and shows where those would choose
otherwise, and which algorithm the clock prefers.
"""
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

from minidist.collectives import alltoall, double_tree, halving, hierarchical, ring, tree
from minidist.collectives.ring import cut
from minidist.cost import seconds

# These are not the fit of one run.  Of a grid of constants they are those whose choice loses least
# against the fastest algorithm in 95 rows of that benchmark: 1 % on average, 19 % at worst (four
# collectives, 2, 3, 4 and 8 ranks, 1 KB to 4 MB, on 2 cores of an AMD EPYC with MPICH 5.0.2).
ALPHA = 80e-6                   # seconds per step: mostly the wait for one's turn on a core
BETA = 0.3e-9                   # seconds per byte sent
GAMMA = 0.2e-9                  # seconds per byte added

# --- The algorithms, all called alike: (x, comm, op), (x, sizes, mine, comm, op), ... ---

def on_pieces(algorithm, x, sizes, *others):
    """Call an algorithm that takes the pieces of a vector one by one."""
    return algorithm(cut(x, sizes), *others)


def ring_reduce_scatter(x, sizes, mine, comm, op):
    """The ring's, which works in place, on a copy of x (which may be that copy already)."""
    work = comm.scratch(x.size, x.dtype, slot=1)
    work[...] = x
    pieces = cut(work, sizes)
    ring.reduce_scatter(pieces, comm, op)
    mine[...] = pieces[comm.rank]


def in_and_across_nodes(x, comm, op):
    """The hierarchical all_reduce, on the groups of the machine's nodes."""
    hierarchical.all_reduce(x, node_groups(comm), op)


GROUPS = WeakKeyDictionary()


def node_groups(comm):
    """My node's group and my rail, formed at the first call."""
    if comm not in GROUPS:
        GROUPS[comm] = hierarchical.groups(comm)
    return GROUPS[comm]


ALGORITHMS = {
    "all_reduce": {
        "naive": tree.naive_all_reduce,
        "tree": tree.all_reduce,
        "recursive_doubling": tree.recursive_doubling,
        "halving_doubling": halving.all_reduce,
        "ring": ring.all_reduce,
        "double_tree": double_tree.all_reduce,
        "hierarchical": in_and_across_nodes,
    },
    "reduce_scatter": {
        "pairwise": partial(on_pieces, alltoall.reduce_scatter),
        "halving": halving.reduce_scatter,
        "ring": ring_reduce_scatter,
    },
    "all_gather": {
        "doubling": halving.all_gather,
        "pairwise": partial(on_pieces, alltoall.all_gather),
        "ring": partial(on_pieces, ring.all_gather),
    },
    "broadcast": {"naive": tree.naive_broadcast, "tree": tree.broadcast},
    "reduce": {"naive": tree.naive_reduce, "tree": tree.reduce},
    "all_to_all": {"pairwise": alltoall.pairwise, "bruck": alltoall.bruck},
}

# Where it has a choice, best first when times are equal; the others are taken only by name.
AUTOMATIC = {
    "all_reduce": ("recursive_doubling", "halving_doubling", "ring"),
    "reduce_scatter": ("pairwise", "halving"),
    "all_gather": ("doubling", "pairwise"),
    "broadcast": ("tree",),
    "reduce": ("tree",),
    "all_to_all": ("pairwise",),        # Bruck's many small copies cost more than they save here
}


@lru_cache(maxsize=4096)
def chosen(collective, nbytes, p, constants=(ALPHA, BETA, GAMMA)):
    """Name the algorithm of the automatic choice, for nbytes (of the full array) on p ranks."""
    candidates = AUTOMATIC[collective]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: seconds(collective, name, p, nbytes, *constants))


def find(collective, algorithm, nbytes, p):
    """(name, function) of the algorithm asked for, or of the chosen one."""
    name = algorithm or chosen(collective, nbytes, p)
    if name not in ALGORITHMS[collective]:
        raise ValueError(f"{collective} has no algorithm {name!r}; it has "
                         + ", ".join(ALGORITHMS[collective]))
    return name, ALGORITHMS[collective][name]
