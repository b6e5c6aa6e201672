"""Replicas: do ranks that should hold the same hold the same, to the last bit?

    parameter, its gradient -> hash -> is the largest hash of a group its smallest?

Over each axis of the mesh along which a parameter is not cut, its value and its gradient are one on
all ranks. Hashes tell in one all_reduce of as many integers as there are parameters; only for what
differs are numbers sent, to say by how much.

Lesson: mpirun -n 4 python -m lessons.dp
"""
import hashlib

import numpy as np

from minidist.collectives import all_reduce
from minidist.mesh import notes
from minidist.placement import Held


def unequal_replicas(params, mesh):
    """Find parameters that are not the same, bit by bit, where they should be.

    Value and gradient, over each axis along which a parameter is not cut.  Collective.
    -> {name: largest difference between two ranks, relative to the largest magnitude}"""
    mine, worst = {}, {}
    for comm, members in replicas(params, mesh):
        same = alike(np.array([fingerprint(p) for p in members]), comm)
        for p in (p for p, equal in zip(members, same) if not equal):
            mine[p.name] = max(mine.get(p.name, 0.0), disagreement(p.data, comm))
    for found in notes(mine, mesh.world):
        worst |= {name: max(gap, worst.get(name, 0.0)) for name, gap in found.items()}
    return worst


def replicas(params, mesh):
    """List the groups that hold the same parameters.  [(Comm, [parameter])], alike on all ranks"""
    found = {}
    lying = [(p, {axis: one for key, one in p.placements.items() for axis in mesh.factors([key])})
             for p in params]
    for axis in mesh.grid:
        for p, placed in lying:
            one = placed.get(axis)
            if one is None or isinstance(one, Held):
                comm = mesh[axis] if one is None else one.comm
                found.setdefault(comm, []).append(p)
    return [(comm, members) for comm, members in found.items() if comm.size > 1]


def alike(numbers, comm):
    """Say which of these integers are the same on all ranks: their maximum is their minimum."""
    return all_reduce(numbers, comm, op="max") == -all_reduce(-numbers, comm, op="max")


def disagreement(x, comm):
    """How far the ranks' versions of x are apart, relative to its size.  Collective"""
    highest, lowest = all_reduce(x, comm, op="max"), -all_reduce(-x, comm, op="max")
    return difference(highest, lowest, max(size(highest), size(lowest)))


def fingerprint(p):
    """Hash a parameter and its gradient, bit by bit.  -> int64"""
    hashed = hashlib.blake2b(np.ascontiguousarray(p.data), digest_size=7)
    if p.grad is not None and not p.sliced:
        hashed.update(np.ascontiguousarray(p.grad))
    return int.from_bytes(hashed.digest(), "little")


# ------------------------------------------------------------------------------ how far apart

def size(x):
    """The largest magnitude in x; 0 for nothing."""
    return 0.0 if x is None or x.size == 0 else float(np.abs(x).max())


def difference(ours, reference, scale):
    """Relative difference; infinite if only one exists, or if the numbers are not finite."""
    if ours is None or reference is None:
        return 0.0 if ours is reference else np.inf
    gap = float(np.max(np.abs(ours - reference), initial=0.0))
    gap = gap / scale if scale else gap
    return gap if np.isfinite(gap) else np.inf
