"""Collectives: arrays over ranks, every algorithm written by hand.

    calls         all_reduce reduce_scatter all_gather broadcast reduce scatter gather all_to_all
    choice        which algorithms there are, and which one a call takes by itself
    layouts       how arrays are cut: what depends on shapes alone, worked out once
    ring tree halving double_tree hierarchical alltoall       the algorithms

Nothing is allocated per call but the result.  A communicator keeps two arrays (Comm.scratch): into
slot 0 an algorithm receives; slot 1 is the copy of x that is worked on where x must stay as it is.
A call that needs x in one row copies it into slot 1 before the algorithm starts, so an algorithm
that asks for slot 1 may be given x itself: it may write element i there once it has read it.

Lesson: mpirun -n 4 python -m lessons.collectives
"""
from minidist.collectives.calls import (                                         # noqa: F401
    all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter)
from minidist.collectives.choice import ALGORITHMS, chosen                       # noqa: F401
from minidist.collectives.layouts import split                                   # noqa: F401
