"""MINIDIST_CHECK=1: before every collective, all ranks compare which call they are about to make.

A mismatch is then an error on *all* ranks, with the difference, before any array moves. It costs
p - 1 small messages per call: it is for finding bugs.
"""
import numpy as np

from minidist.ranks.counting import code_of

LENGTH = 200


def same_call(comm, wire):
    """Raise on every rank of comm, with the difference, unless all describe the same call."""
    mine = np.zeros(LENGTH, "u1")
    text = description(comm).encode()[:LENGTH]
    mine[:len(text)] = np.frombuffer(text, "u1")
    theirs = np.zeros((comm.size, LENGTH), "u1")
    tag = code_of("check") << 5
    sent = [wire.isend(mine, r, tag) for r in range(comm.size)]
    for r in range(comm.size):
        comm._status.now = comm, "check", None, r, LENGTH
        wire.recv(theirs[r], r)
    for request in sent:
        request.wait()
    comm._status.now = None
    if (theirs != mine).any():
        raise ValueError(difference(comm, [bytes(t).rstrip(b"\0").decode() for t in theirs]))


def same_shapes(comm, sent, expected):
    """Raise on every rank, unless each expects from each other the shape that this one sends."""
    everyone = comm.plain.bare.gather((list(map(tuple, sent)), list(map(tuple, expected))))
    for sender, (shapes, _) in enumerate(everyone):
        for receiver, (_, wanted) in enumerate(everyone):
            if shapes[receiver] != wanted[sender]:
                raise ValueError(f"in group {comm.name}, rank {sender} sends {shapes[receiver]} to "
                                 f"rank {receiver}, which expects {wanted[sender]}")


def description(comm):
    name, number, detail = comm.current()
    return f"{name} #{number}" + ("" if detail is None else f" {detail}")


def difference(comm, calls):
    """Say which ranks make which call."""
    ranks = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    return (f"the ranks of group {comm.name} do not make the same call: " + "; ".join(
        f"rank {', '.join(map(str, who))}: {call}" for call, who in ranks.items()))
