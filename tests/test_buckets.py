"""Buckets: which gradient travels with which, and what comes out."""
from types import SimpleNamespace

import numpy as np
import pytest

from minidist import buckets, placement
from minidist.engine.nn import Parameter


@pytest.mark.parametrize("sizes, expected", [
    ([], []),
    ([40], [[0]]),
    ([4, 4, 4, 4], [[0, 1], [2, 3]]),                   # the first closes at 8, the next at 20
    ([8, 20, 1], [[0], [1], [2]]),                      # exactly at the limit: closed
    ([4, 30, 4, 30], [[0, 1], [2, 3]]),                 # exceeds its cap by almost one tensor
    ([100, 1, 1], [[0], [1, 2]]),                       # larger than any cap: alone if it is first
    ([4, 4, 12, 7, 1, 3], [[0, 1], [2, 3, 4], [5]])])
def test_by_hand(sizes, expected):
    assert buckets.assign(sizes, cap=20, first=8) == expected


def test_dtypes_do_not_mix_and_have_limits_of_their_own():
    sizes, kinds = [4, 4, 4, 4, 4, 20, 20], "fhfhfhf"
    assert buckets.assign(sizes, kinds, cap=20, first=8) == [[0, 2], [1, 3], [4, 6], [5]]


def test_the_first_bucket_is_never_larger_than_the_others():
    assert buckets.assign([1, 1, 1], cap=1) == [[0], [1], [2]]
    assert buckets.assign([1, 1, 1], cap=1 << 40, first=1 << 40) == [[0, 1, 2]]


def test_pytorchs_sizes():
    assert (buckets.FIRST, buckets.CAP) == (1024 * 1024, 25 * 1024 * 1024)


def pair():
    a, b = Parameter(np.ones((2, 3)), "a"), Parameter(np.ones(2), "b")
    return a, b, buckets.build([a, b])[0]


def test_gradients_live_in_the_bucket():
    a, b, bucket = pair()
    bucket.open()
    a.grad, b.grad = np.full((2, 3), 5.0), np.array([7.0, 8.0])
    bucket.deliver(a)
    assert bucket.waiting == {"b": 1} and np.shares_memory(a.grad, bucket.flat)
    bucket.deliver(b)
    assert bucket.flat.tolist() == [5.0] * 6 + [7.0, 8.0, 1.0, 1.0]
    bucket.flat *= 2                                    # as a sum over two ranks would
    bucket.hand_out()
    assert a.grad.tolist() == [[10.0] * 3] * 2 and b.grad.tolist() == [14.0, 16.0]


def test_what_never_comes_is_zero_and_stays_none_if_nobody_has_it():
    a, b, bucket = pair()
    for _ in range(2):                                  # nothing is left over from a first round
        bucket.open()
        a.grad, b.grad = np.ones((2, 3)), None
        bucket.close()
        assert bucket.flat.tolist() == [1.0] * 6 + [0.0, 0.0, 1.0, 0.0] and not bucket.waiting
        bucket.hand_out()
        assert b.grad is None and a.grad is not None
        bucket.flat[6:] = [3.0, 4.0, 2.0, 1.0]          # another rank had one
        bucket.hand_out()
        assert b.grad.tolist() == [3.0, 4.0]


def test_complete_at_the_last_delivery():
    """Three passes, which the tape adds up; b comes twice only, and is taken as it is."""
    a, b, bucket = pair()
    bucket.open(3)
    for count in (1, 2, 3):
        a.grad = np.full((2, 3), float(count))
        bucket.deliver(a)
        if count < 3:
            b.grad = np.full(2, 10.0 * count)
            bucket.deliver(b)
    assert bucket.waiting == {"b": 1}
    bucket.close()
    assert bucket.flat.tolist() == [3.0] * 6 + [20.0, 20.0, 1.0, 1.0]


def test_a_gradient_too_many_is_an_error():
    a, b, bucket = pair()
    bucket.open({"a": 2, "b": 1})
    a.grad, b.grad = np.ones((2, 3)), np.ones(2)
    for p in (a, a, b):
        bucket.deliver(p)
    for p in (a, b):
        with pytest.raises(RuntimeError, match=f"{p.name} got a gradient after the last one"):
            bucket.deliver(p)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_row_holds_the_pieces_that_flat_cuts(ranks):
    """As if two ranks had been summed: row r is for rank r, padded with zeros; b is nobody's."""
    shapes = {"a": (2, 3), "b": (2,), "c": (), "d": (0, 4), "e": (1,)}
    params = [Parameter(np.ones(shape), name) for name, shape in shapes.items()]
    [bucket] = buckets.build(params, ranks=ranks)
    for grow in (1.0, 3.0):                             # the second step overwrites the first
        grads = {p.name: np.asarray(grow + np.arange(p.size)).reshape(p.shape) for p in params}
        bucket.open()
        for p in params:
            p.grad = None if p.name == "b" else grads[p.name].copy()
            if p.name != "b":
                bucket.deliver(p)
        bucket.close()
        bucket.rows *= 2
        for rank, row in enumerate(bucket.rows):
            bucket.hand_out(row)
            assert params[1].grad is None
            for p in params[:1] + params[2:]:
                flat = placement.Flat(p.shape, SimpleNamespace(size=ranks, rank=rank))
                assert np.array_equal(p.grad, 2 * flat.cut(grads[p.name]))
        bucket.rows[...] = np.nan
