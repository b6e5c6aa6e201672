"""Which algorithms there are for each collective, and which one the automatic choice takes.

The choice compares predicted times: steps x ALPHA + bytes x BETA + bytes added x GAMMA.  The three
constants are fixed, so that every rank, every run and every machine chooses the same.
`python -m minidist.bench collectives` fits them to its own run, and shows where those would choose
otherwise, and which algorithm the clock prefers.
"""
from functools import cache
from weakref import WeakKeyDictionary

from minidist.collectives import alltoall, double_tree, halving, hierarchical, ring, tree
from minidist.collectives.ring import cut
from minidist.cost import seconds

# Not the fit of one run: of a grid of constants, those whose choice loses least against the fastest
# algorithm in 95 rows of that benchmark (four collectives, 2, 3, 4 and 8 ranks, 1 KB to 4 MB, on 2
# cores of an AMD EPYC with MPICH 5.0.2): 1 % on average, 19 % at worst.
ALPHA = 80e-6                   # seconds per step: mostly the wait for one's turn on a core
BETA = 0.3e-9                   # seconds per byte sent
GAMMA = 0.2e-9                  # seconds per byte added

# Each looks its function up when called, so that a reader's own can stand in for the module's.
ALGORITHMS = {
    "all_reduce": {
        "naive": lambda *args: tree.naive_all_reduce(*args),
        "tree": lambda *args: tree.all_reduce(*args),
        "recursive_doubling": lambda *args: tree.recursive_doubling(*args),
        "halving_doubling": lambda *args: halving.all_reduce(*args),
        "ring": lambda *args: ring.all_reduce(*args),
        "double_tree": lambda *args: double_tree.all_reduce(*args),
        "hierarchical": lambda x, comm, op: hierarchical.all_reduce(x, node_groups(comm), op),
    },
    "reduce_scatter": {
        "pairwise": lambda x, sizes, *args: alltoall.reduce_scatter(cut(x, sizes), *args),
        "halving": lambda *args: halving.reduce_scatter(*args),
        "ring": lambda *args: ring_reduce_scatter(*args),
    },
    "all_gather": {
        "doubling": lambda *args: halving.all_gather(*args),
        "pairwise": lambda x, sizes, comm: alltoall.all_gather(cut(x, sizes), comm),
        "ring": lambda x, sizes, comm: ring.all_gather(cut(x, sizes), comm),
    },
    "broadcast": {
        "naive": lambda *args: tree.naive_broadcast(*args),
        "tree": lambda *args: tree.broadcast(*args),
    },
    "reduce": {
        "naive": lambda *args: tree.naive_reduce(*args),
        "tree": lambda *args: tree.reduce(*args),
    },
    "all_to_all": {
        "pairwise": lambda *args: alltoall.pairwise(*args),
        "bruck": lambda *args: alltoall.bruck(*args),
    },
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


@cache
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


def ring_reduce_scatter(x, sizes, mine, comm, op):
    """The ring's, which works in place, on a copy of x."""
    work = comm.scratch(x.size, x.dtype, slot=1)
    work[...] = x
    pieces = cut(work, sizes)
    ring.reduce_scatter(pieces, comm, op)
    mine[...] = pieces[comm.rank]


GROUPS = WeakKeyDictionary()


def node_groups(comm):
    """My node's group and my rail, formed at the first call."""
    if comm not in GROUPS:
        GROUPS[comm] = hierarchical.groups(comm)
    return GROUPS[comm]
