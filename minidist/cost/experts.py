"""What a mixture of experts sends, in closed form, where the router's choice is given.

    cost.ep(there, back, held, sizes, group)   ->  (forward, backward), two Prices of one layer

With capacity for everything, or a router that deals evenly, each of p ranks sends (p-1)/p of its
k N rows in each of four all_to_alls per layer and step; what a real router does is counted.

Lesson: mpirun -n 4 python -m lessons.ep
"""
from minidist.cost.messages import all_to_all

COUNT = 8                       # bytes of the number of rows for one expert


def ep(there, back, held, sizes, group):
    """Price of one layer's dispatch and combine.  -> (forward, backward)

    there[s]: rows that I send to rank s; back[s]: rows that it sends to me; held[s]: its experts.
    Forward, the counts go first; backward, gradients of rows go the same two ways."""
    def rows(numbers):
        return all_to_all("pairwise", [n * sizes.D for n in numbers], sizes.w, group.rank)
    both = rows(there) + rows(back)
    return all_to_all("pairwise", held, COUNT, group.rank) + both, both
