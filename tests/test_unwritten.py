"""The suite's own guard: what nobody has written is no number, here and on MPI ranks."""
import numpy as np
import pytest

from minidist.engine import attention
from minidist.engine.tensor import Tensor
from tests import unwritten
from tests.mpi import mpi

pytestmark = pytest.mark.skipif(unwritten.PLAIN, reason="MINIDIST_TEST_EMPTY=plain")


def test_empty_is_no_number():
    for dtype in "f2", "f4", "f8", "c8":
        assert np.isnan(np.empty((2, 3), dtype)).all() and np.isnan(
            np.empty_like(np.zeros(3, dtype))).all()
    for dtype in "i1", "u1", "i4", "i8", "u8":
        assert (np.empty_like(np.zeros(3, dtype)) == np.iinfo(dtype).max).all()
    assert np.isnan(np.empty(64, "u1").view("f4")).all()
    assert np.empty(2, object)[0] is None and np.empty(2, bool).dtype == bool
    assert np.empty(shape=3, dtype="f4").shape == (3,) and np.zeros(3)[0] == 0


@mpi(2)
def test_on_mpi_ranks_too(comm):
    assert np.isnan(np.empty(3)).all()


class WithoutZeros:
    """NumPy, whose zeros nobody has written."""
    zeros = staticmethod(np.empty)

    def __getattr__(self, name):
        return getattr(np, name)


def test_a_read_before_the_write_is_found(monkeypatch):
    """A query that sees no key gives zero: attention must write it, for no tile comes by."""
    T = 2 * attention.TILE
    q, k, v = (Tensor(np.ones((1, 1, T, 2))) for _ in range(3))
    late = dict(positions=np.arange(T), key_positions=np.arange(T) + T // 2)

    def first():
        return attention.scaled_dot_product_attention(q, k, v, **late).data[0, 0, 0]
    np.testing.assert_array_equal(first(), 0)
    monkeypatch.setattr(attention, "np", WithoutZeros())
    assert np.isnan(first()).all()
