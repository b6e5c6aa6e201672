"""Trees: their shapes, for every number of ranks, and what is special about two of them."""
import numpy as np
import pytest

from minidist.collectives import double_tree, tree
from minidist.ranks.comm import run_threads

UP_TO_64 = range(1, 65)


class Group:
    """Stands in for a communicator where only the numbers matter."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def log2_up(p):
    return (p - 1).bit_length()


# --- The double binary tree. ---

def depth(tree_of, p):
    """Check that parents and children agree; return the number of levels below the root."""
    places = [tree_of(r, p) for r in range(p)]
    roots = [r for r, (parent, _) in enumerate(places) if parent is None]
    assert len(roots) == 1
    levels, reached = {roots[0]: 0}, [roots[0]]
    for r in reached:
        for child in places[r][1]:
            assert places[child][0] == r and child not in levels
            levels[child] = levels[r] + 1
            reached.append(child)
    assert len(reached) == p
    return max(levels.values())


@pytest.mark.parametrize("tree_of", [double_tree.first_tree, double_tree.second_tree])
def test_every_rank_is_in_the_tree_once_and_near_the_root(tree_of):
    for p in UP_TO_64:
        assert depth(tree_of, p) == log2_up(p)
        assert all(len(tree_of(r, p)[1]) <= 2 for r in range(p))


def test_nobody_is_inner_in_both_trees():
    """One rank is, where p is odd."""
    for p in UP_TO_64[1:]:
        inner = [r for r in range(p) if double_tree.first_tree(r, p)[1]
                 and double_tree.second_tree(r, p)[1]]
        assert len(inner) == p % 2 or p == 2, (p, inner)


def test_roots():
    for p in UP_TO_64[1:]:
        assert double_tree.first_tree(0, p)[0] is None
        assert double_tree.second_tree(p - 1 if p % 2 == 0 else 1, p)[0] is None


def test_the_picture_of_8_ranks():
    first = [double_tree.first_tree(r, 8) for r in range(8)]
    assert [children for _, children in first] == [[4], [], [1, 3], [], [2, 6], [], [5, 7], []]
    assert double_tree.second_tree(3, 8) == (7, [5, 1])


def test_double_tree_sends_as_much_as_the_ring_in_all_and_at_most_twice_the_vector():
    n = 64
    for p in UP_TO_64[1:]:
        places = [(double_tree.first_tree(r, p), double_tree.second_tree(r, p)) for r in range(p)]
        sent = [sum(n // 2 * ((parent is not None) + len(children)) for parent, children in both)
                for both in places]
        assert sum(sent) == 2 * (p - 1) * n
        assert min(sent) >= (n if p > 2 else 0)
        assert max(sent) == (2 * n if p >= 4 else max(sent)) <= 2 * n


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunk_bytes", [1, 8, 64, 1 << 20])
def test_double_tree_in_chunks_of_any_size(p, chunk_bytes):
    def body(comm):
        for n in 0, 1, 2, 9, 40:
            x = np.arange(n) + comm.rank
            double_tree.all_reduce(x, comm, chunk_bytes=chunk_bytes)
            assert x.tolist() == [p * i + sum(range(p)) for i in range(n)]
    run_threads(p, body, sync=True)


# --- Binomial trees and teams. ---

def test_binomial_tree_reaches_every_rank_in_log_steps():
    """The k-th send of a parent ends in step (its own arrival) + k: nobody is later than log2 p."""
    for p in UP_TO_64:
        for root in {0, p // 3}:
            arrival = {root: 0}
            for place in range(p):                              # a parent's place is always lower
                rank = (place + root) % p
                _, bit = tree.place_in_tree(Group(rank, p), root)
                steps = [1 << j for j in reversed(range(bit.bit_length() - 1))]
                for k, step in enumerate(steps, 1):
                    if place + step < p:
                        arrival[(place + step + root) % p] = arrival[rank] + k
            assert len(arrival) == p and max(arrival.values()) <= log2_up(p)


def test_team_is_a_power_of_two_and_every_other_rank_is_folded_into_a_member():
    for p in UP_TO_64:
        members = tree.team(p)
        assert len(members) == 1 << p.bit_length() - 1
        outside = [r for r in range(p) if r not in members]
        guests = [tree.place(r, p).guest for r in members]
        assert [r for r in guests if r is not None] == outside
        assert all(tree.place(tree.place(r, p).into, p).guest == r for r in outside)
    assert tree.team(6) == (1, 3, 4, 5)


def test_partners_are_mutual():
    for p in UP_TO_64:
        for r in range(p):
            partners = tree.place(r, p).partners
            assert len(partners) == (len(tree.bits(p)) if r in tree.team(p) else 0)
            assert all(other != r and tree.place(other, p).partners[k] == r
                       for k, other in enumerate(partners))


def test_reduce_on_every_root():
    def body(comm):
        for root in range(comm.size):
            for reduce in tree.reduce, tree.naive_reduce:
                x = np.arange(5) + comm.rank
                reduce(x, comm, root)
                if comm.rank == root:
                    assert x.tolist() == [comm.size * i + sum(range(comm.size)) for i in range(5)]
    for p in 1, 2, 3, 5, 8:
        run_threads(p, body)
