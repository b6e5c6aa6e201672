"""What compressed gradients bring, and what every rank still owes: for the proof of a lesson."""
import numpy as np

from lessons import kit
from minidist import compress, cost
from minidist.buckets import Bucket
from minidist.collectives import all_reduce
from minidist.engine.nn import Parameter

SHAPES = [(24, 40), (24,), (40, 16)]
NUMBERS = sum(int(np.prod(shape)) for shape in SHAPES)


def sums(comm, form):
    """Send two buckets.  -> all that arrived, all that is owed, the true sum, counts"""
    sender, arrived = compress.make(form), 0
    with comm.counting() as counted:
        for step in range(2):
            bucket = gradients(comm.rank, step)
            sender(bucket, comm)
            arrived = arrived + bucket.flat[:-len(SHAPES)]
    true = sum(gradients(rank, step).flat[:-len(SHAPES)]
               for rank in range(comm.size) for step in range(2))
    late = next(iter(sender.left.values()))
    if form == "1bit":
        sizes = cost.chunks(late.size, comm.size)
        at = sum(sizes[:comm.rank])
        late[at:at + sizes[comm.rank]] += next(iter(sender.owed.values()))
    return arrived, all_reduce(late, comm), true, counted


def gradients(rank, step):
    """A bucket of this rank's gradients."""
    params = [Parameter(np.zeros(shape), f"p{i}") for i, shape in enumerate(SHAPES)]
    bucket, rng = Bucket(params), np.random.default_rng([rank, step])
    bucket.open()
    for p in params:
        p.grad = rng.standard_normal(p.shape)
        bucket.deliver(p)
    return bucket


def by_hand():
    """Feed back through a sender that sends the larger half; what it got must not change."""
    x, left = np.array([1.0, -4, 2, 0.5]), np.array([0.25, 0, 0, -3])
    before, got = x.copy(), []

    def larger(y):
        got.append(y.copy())
        mine = np.where(np.abs(y) > 2, y, 0)
        return mine, 3 * mine
    total = compress.feedback(x, left, larger)
    found = [*got[0], *total, *left, *x]
    wanted = [1.25, -4, 2, -2.5, 0, -12, 0, -7.5, 1.25, 0, 2, 0, *before]
    return kit.difference(np.array(found), np.array(wanted))
