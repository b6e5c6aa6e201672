"""Kinds of faults that outsiders found in messages and collectives (C1 to C5), all silent."""
import numpy as np
import pytest

from minidist.collectives import (all_gather, all_reduce, all_to_all, broadcast, gather, reduce,
                                  reduce_scatter, scatter)
from minidist.engine.tensor import Tensor
from minidist.ranks.comm import run_threads

RANKS = pytest.mark.parametrize("p", [1, 2, 3, 4])


@RANKS
def test_C1_out_may_be_the_input_or_overlap_it(p):
    def every_call(comm):
        r, n = comm.rank, 6 * p
        x = np.arange(float(n)) + 100 * r
        total = sum(np.arange(float(n)) + 100 * q for q in range(p))
        for algorithm in ("pairwise", "bruck"):
            y = x.copy().reshape(p, 6)
            np.testing.assert_array_equal(all_to_all(y, comm, out=y, algorithm=algorithm),
                                          [np.arange(6.) + 6 * r + 100 * q for q in range(p)])
        y = x.copy()
        cut = [y[6 * q:6 * q + 6] for q in range(p)]
        turned = [y[6 * (q + 1) % n:][:6] for q in range(p)]     # out of one is piece of another
        for q, came in enumerate(all_to_all(cut, comm, out=turned)):
            np.testing.assert_array_equal(came, np.arange(6.) + 6 * r + 100 * q)
        for algorithm in ("pairwise", "halving", "ring"):
            for at in (0, 6 * r, n - 6):
                y = x.copy()
                np.testing.assert_array_equal(
                    reduce_scatter(y, comm, out=y[at:at + 6], algorithm=algorithm),
                    total[6 * r:6 * r + 6])
        for algorithm in ("pairwise", "doubling", "ring"):
            for at in (0, 6 * r, max(0, 6 * r - 2)):
                y = np.zeros(n)
                y[at:at + 6] = r + 1
                np.testing.assert_array_equal(
                    all_gather(y[at:at + 6], comm, out=y, algorithm=algorithm),
                    np.repeat(np.arange(1., p + 1), 6))
        y = np.zeros(n + 1)
        y[1:] = x
        np.testing.assert_array_equal(all_reduce(y[1:], comm, out=y[:-1]), total)

    run_threads(p, every_call)


def test_C2_receiving_into_what_is_sent_is_refused():
    def swap(comm):
        x, peer = np.arange(8.), 1 - comm.rank
        for out, into in ((x, x), (x[:6], x[2:])):
            with pytest.raises(ValueError, match="shares memory"):
                comm.sendrecv(out, peer, into, peer)
        y, z = np.zeros(4), np.zeros(4)
        with pytest.raises(ValueError, match="shares memory"):
            comm.exchange([(x[:4], peer, y, peer), (x[4:], peer, y, peer)])
        with pytest.raises(ValueError, match="shares memory"):
            comm.exchange([(y, peer, z, peer), (x[4:], peer, y, peer)])
        return comm.sendrecv(x[:4], peer, x[4:], peer)[0]

    assert run_threads(2, swap) == [0, 0]


@pytest.mark.parametrize("root", [2, -1, 1.0, None])
def test_C3_a_root_outside_of_the_group_is_refused(root):
    def calls(comm):
        for call in (broadcast, reduce, scatter, gather):
            with pytest.raises(ValueError, match=f"root {root} is not in group world, which has "
                                                 "ranks 0 to 1"):
                call(np.ones(2), comm, root=root)

    run_threads(2, calls)


OTHERWISE = {
    "op": lambda c: all_reduce(np.ones(4), c, op=("sum", "max")[c.rank]),
    "shape": lambda c: all_reduce(np.ones((2, 3) if c.rank else (3, 2)), c),
    "dim": lambda c: reduce_scatter(np.ones((2, 2)), c, dim=c.rank),
    "dim of pieces": lambda c: all_gather(np.ones((2, 2)), c, dim=c.rank),
    "root": lambda c: (broadcast(np.ones(4), c, root=c.rank),      # both send: nobody notices,
                       broadcast(np.ones(4), c)),                  # until somebody receives
    "algorithm": lambda c: all_reduce(np.ones(4), c, algorithm=("ring", "tree")[c.rank]),
    "collective": lambda c: (all_reduce, broadcast)[c.rank](np.ones(4), c),
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("what", OTHERWISE)
def test_C4_calls_that_do_not_match_are_errors(what, check):
    """Where bytes agree too.  Without MINIDIST_CHECK by seven bits in the tag of each message."""
    def body(comm):
        comm.check = check
        OTHERWISE[what](comm)

    with pytest.raises(Exception, match="the same call" if check else "same|waits") as error:
        run_threads(2, body)
    assert "rank" in str(error.value)


def test_C4_pieces_of_other_shapes_are_found_by_check():
    def body(comm):
        comm.check = True
        shape = (2, 3) if comm.rank else (3, 2)
        all_to_all([np.ones(shape), np.ones(shape)], comm)

    with pytest.raises(ValueError, match=r"rank 0 sends \(3, 2\) to rank 1, which expects \(2"):
        run_threads(2, body)


def test_C5_what_callers_bring_is_taken_or_named():
    leaf = Tensor(np.ones(2), requires_grad=True)

    def calls(comm):
        assert all_reduce(2.5, comm) == 5 and broadcast(3, comm) == 3
        np.testing.assert_array_equal(all_reduce([1, 2], comm), [2, 4])
        np.testing.assert_array_equal(all_reduce(Tensor(np.ones(2)), comm), [2, 2])
        for call in (reduce_scatter, all_gather, scatter, gather, all_to_all):
            with pytest.raises(ValueError, match=r"no dim 0 to cut in an array of shape \[\]"):
                call(np.float64(1), comm)
        for call in (all_reduce, broadcast, reduce, reduce_scatter, all_gather, scatter, gather):
            for wrong, said in ((None, "every rank brings one"), (leaf, "minidist.mappings"),
                                (np.ma.masked_array([1., 2.], [True, False]), "lose its mask")):
                with pytest.raises(TypeError, match=said):
                    call(wrong, comm)

    run_threads(2, calls)


@pytest.mark.parametrize("sizes", [[7, 0, -1], [2.0, 2.0, 2.0], ["a", 2, 4]])
def test_L17_sizes_that_are_no_lengths_are_refused_and_leave_nothing(sizes):
    """They ended in a deadlock, or in an error that came back for good sizes too."""
    def calls(comm):
        for call, x in ((reduce_scatter, np.ones(6)), (all_gather, np.ones(2)),
                        (scatter, np.ones(6)), (gather, np.ones(2))):
            with pytest.raises((ValueError, TypeError), match="sizes|as an integer"):
                call(x, comm, sizes=sizes)
            call(x, comm, sizes=np.array([2, 2, 2]))

    run_threads(3, calls)
