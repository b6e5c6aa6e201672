"""Buckets: which gradient travels with which, and what comes out."""
import numpy as np
import pytest

from minidist import buckets
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
    bucket.put(a)
    assert bucket.waiting == {"b"} and np.shares_memory(a.grad, bucket.flat)
    bucket.put(b)
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


def test_a_second_gradient_is_an_error():
    a, _, bucket = pair()
    bucket.open()
    a.grad = np.ones((2, 3))
    bucket.put(a)
    with pytest.raises(RuntimeError, match="a got a second gradient in one backward"):
        bucket.put(a)
