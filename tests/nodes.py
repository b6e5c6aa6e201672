"""Let the hierarchical algorithm see several nodes where there is one machine."""
from minidist.collectives import hierarchical
from minidist.collectives.choice import GROUPS


def two_nodes(comm):
    """Put the lower half of the ranks on one node and the rest on another.  Returns their sizes"""
    half = comm.size // 2
    if half:
        node = comm.split(int(comm.rank >= half), name="node")
        GROUPS[comm] = hierarchical.groups(comm, node)
    return [half, comm.size - half] if half else [1]
