"""What a mixture of experts sends, in closed form, where the router's choice is given.

    cost.ep(there, back, held, sizes, group)   ->  (forward, backward), two Prices of one layer

With capacity for everything, or a router that deals evenly, each of p ranks sends (p-1)/p of its
k N rows in each of four all_to_alls per layer and step; what a real router does is counted.

Lesson: mpirun -n 4 python -m lessons.ep
"""
from minidist.cost.messages import all_to_all, chunks

COUNT = 8                       # bytes of the number of rows for one expert


def ep(there, back, held, sizes, group):
    """Price of one layer's dispatch and combine.  -> (forward, backward)

    there[s]: rows that I send to rank s; back[s]: rows that it sends to me; held[s]: its experts.
    Forward, the counts go first; backward, gradients of rows go the same two ways."""
    def rows(numbers):
        return all_to_all("pairwise", [n * sizes.D for n in numbers], sizes.w, group.rank)
    both = rows(there) + rows(back)
    return all_to_all("pairwise", held, COUNT, group.rank) + both, both


def shapes(sizes, group, mine):
    """List the numbers in each parameter of one layer's experts, of which this rank holds `mine`.

    group: over which tensor parallelism cuts hidden units, and the last bias by columns."""
    hidden, columns = (chunks(n, group.p)[group.rank] for n in (sizes.F, sizes.D))
    return [mine * hidden * sizes.D, mine * hidden, mine * sizes.D * hidden, mine * columns]


def evenly(rows, ranks, rank):
    """Deal each rank's k rows per token evenly.  rows[s]: of rank s  -> (there, back) of one"""
    return chunks(rows[rank], ranks), [chunks(n, ranks)[rank] for n in rows]


def kept(sizes, hidden, came, shared_out):
    """Bytes that one layer keeps for backward in the place of an MLP.

    hidden: units of an expert on this rank.  came: rows that its experts work on; shared_out: do
    they come from several ranks, and in another order?"""
    N, D, k, w, wide = sizes.N, sizes.D, sizes.k, sizes.w, max(sizes.w, 4)
    router = N * D * w + N * sizes.E * wide + 8 * N * k + (N * k + N * (k > 1)) * wide
    balance = (sizes.E + 1) * wide * sizes.aux
    rows = 9 * N * k + k * N * D * w + 16 * came * shared_out
    return router + balance + rows + came * (D + 2 * hidden) * w + 2 * N * hidden * w * sizes.shared
