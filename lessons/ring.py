"""RING ALLREDUCE      How do p ranks sum a vector so that nobody sends more than twice its size?

  lifts   bandwidth   the root of a plain sum sends (p-1) S and receives as much; here nobody exceeds 2 S
  costs   latency     2(p-1) messages, one after the other
  code    minidist/ring.py, minidist/tree.py
  before  lessons.collectives  (the six primitives)            next  lessons.dp
  run     mpirun -n 4 python -m lessons.ring       or: python -m lessons.ring -n 4
"""
import numpy as np

from lessons import kit
from minidist import ring

EXERCISE = [ring.reduce_scatter, ring.all_gather, ring.all_reduce]


def main(lesson):
    comm = lesson.comm
    p, r = comm.size, comm.rank
    lesson.part("Cut the vector into p chunks and pass them to the right")
    lesson.say("""
        Each rank sends one chunk, receives one, and adds what it receives to its own. The chunk it
        receives is one index below the one it sends, so it has met one more rank each time.""")
    lesson.source(ring.reduce_scatter)
    x = np.arange(p) + 10.0 ** r
    before = x.copy()
    ring.all_reduce(x, comm)
    lesson.rows(["before", "after"], [before, x])
    lesson.part("Is it right, and what does it cost?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(off_by_one)
    lesson.takeaway("The ring makes every link carry the same.", field="NCCL's ring",
                    tries=["write it yourself: --stub mine.py, then --mine mine.py"])


def prove(lesson):
    """Check values and counts."""
    comm = lesson.comm
    p, r = comm.size, comm.rank
    n = 1000 * p
    x = np.arange(n) * (r + 1.0)
    with comm.counting() as sent:
        ring.all_reduce(x, comm)
    lesson.check("the sum", kit.difference(x, np.arange(n) * (p * (p + 1) / 2)))
    lesson.ledger(("bytes sent per rank", "2(p-1)/p S", 2 * (p - 1) * n * 8 // p, sent.bytes),
                  ("messages per rank", "2(p-1)", 2 * (p - 1), sent.messages))


@kit.breaks(ring, "reduce_scatter")
def off_by_one(chunks, comm, op=np.add):
    """The chunk index is off by one: each rank ends with its neighbour's chunk.

    It is how the ring was first published for deep learning, and legal inside an all_reduce
    whose second half starts there too."""
    incoming = comm.scratch(max(chunk.size for chunk in chunks), chunks[0].dtype)
    for step in range(comm.size - 1):
        mine = chunks[comm.rank - step - 1]
        op(mine, comm.shift(chunks[comm.rank - step], into=incoming[:mine.size]), out=mine)


if __name__ == "__main__":
    kit.run(main)
