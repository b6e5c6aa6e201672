"""Kinds of faults that outsiders found in the engine (N1 to N8): each was silent, or a riddle."""
import numpy as np
import pytest

from minidist.engine import functional as F
from minidist.engine.functional import IGNORE
from minidist.engine.tensor import Tensor, no_grad, relu
from minidist.ranks.comm import run_threads
from minidist.tp import vocab_parallel_cross_entropy

INDICES = [((1, 1, 2), 0), (slice(None), (0, 0)), ([1, 1],), (np.array([2, 2]), slice(1)),
           (np.array([True, False, True]),), (None, 1), (..., -1), (np.int64(1),), ((1, 1),),
           ([],), (True,), (Tensor(np.array([0, 0])),)]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_N1_every_index_counts_each_position_as_numpy_does(index):
    """Repeated positions, in a tuple, list, array or Tensor, add up."""
    index = index if len(index) > 1 else index[0]
    w = Tensor(np.arange(12.).reshape(3, 4), requires_grad=True)
    plain = tuple(i.data if isinstance(i, Tensor) else i for i in index) if isinstance(
        index, tuple) else index.data if isinstance(index, Tensor) else index
    y = w[index]
    np.testing.assert_array_equal(y.data, w.data[plain])
    y.sum().backward()
    expected = np.zeros((3, 4))
    np.add.at(expected, plain, 1.0)
    np.testing.assert_array_equal(w.grad, expected)


def test_N2_a_constant_is_never_cut_to_an_integer():
    seven = Tensor(np.array([7, 6]))
    np.testing.assert_array_equal((seven * 0.5).data, [3.5, 3.0])
    np.testing.assert_array_equal((0.5 - seven).data, [-6.5, -5.5])
    np.testing.assert_array_equal((seven / 2).data, [3.5, 3.0])
    np.testing.assert_array_equal((Tensor(np.array([0], np.uint8)) - 1).data, [-1])
    np.testing.assert_array_equal((Tensor(np.array([200], np.uint8)) + 100).data, [300])
    np.testing.assert_array_equal((Tensor(np.array([True])) + Tensor(np.array([True]))).data, [2])
    single = Tensor(np.ones(2, np.float32), requires_grad=True)
    for y in (single * 0.5, single + 1, np.float64(3) * single):
        assert y.dtype == np.float32
    with pytest.raises(TypeError, match="convert one"):
        single * seven
    with pytest.raises(TypeError, match="no real number"):
        single * 1j


def test_N3_python_and_numpy_find_the_numbers_of_a_tensor():
    x, zero = Tensor(np.array([1., 3., 2.])), Tensor(np.array(0.))
    assert [float(v) for v in x] == [1, 3, 2] and sum(x).item() == 6 and len(x) == 3
    assert not zero and Tensor(np.array(2.)) and 3. in x and 4. not in x
    assert np.argmax(x) == 1 and np.asarray(x).dtype == float and int(x[1]) == 3
    for wrong in (lambda: list(zero), lambda: len(zero)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError):                         # as NumPy: which of the three?
        bool(x)
    with pytest.raises(TypeError, match="lose the gradient"):
        np.asarray(Tensor(np.ones(2), requires_grad=True))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.filterwarnings("error")
def test_N4_what_is_masked_is_zero_whatever_it_holds(bad):
    """An ignored target's logits, a foreign word's row, the dead half of a relu."""
    rng = np.random.default_rng(0)
    numbers, targets = rng.normal(size=(3, 4)), np.array([1, IGNORE, 2])
    clean = Tensor(numbers.copy(), requires_grad=True)
    F.cross_entropy(clean, targets)[0].backward()
    numbers[1, 2] = bad

    def parts(comm):
        z = Tensor(numbers[:, 2 * comm.rank:2 * comm.rank + 2].copy(), requires_grad=True)
        loss = vocab_parallel_cross_entropy(z, targets, comm)
        loss.backward()
        return loss.item(), z.grad

    dirty = Tensor(numbers.copy(), requires_grad=True)
    loss = F.cross_entropy(dirty, targets)[0]
    loss.backward()
    assert np.isfinite(loss.data) and not dirty.grad[1].any()
    np.testing.assert_array_equal(dirty.grad, clean.grad)
    (one, left), (two, right) = run_threads(2, parts)
    np.testing.assert_allclose([one, two], loss.item(), rtol=1e-13)
    np.testing.assert_allclose(np.hstack([left, right]), clean.grad, rtol=0, atol=1e-15)

    w = Tensor(np.array([[bad, bad], [1., 2.]]), requires_grad=True)
    y = F.embedding(w, np.array([0, 1]), np.array([False, True]))
    np.testing.assert_array_equal(y.data, [[0, 0], [1, 2]])
    y.backward(np.array([[bad, bad], [1., 1.]]))
    np.testing.assert_array_equal(w.grad, [[0, 0], [1, 1]])
    for op, at in ((relu, [-1., 2.]), (lambda x: x.max(0), [1., 2.])):
        x = Tensor(np.array(at), requires_grad=True)
        (op(x) * 1.0).backward(np.array([bad, 1.]) if op is relu else np.array(1.))
        np.testing.assert_array_equal(x.grad, [0, 1])


def test_N5_positions_that_are_refilled_after_forward_change_nothing():
    """Ids, masks, index arrays and targets are copied: they are small, and often one buffer."""
    def gradient(spoil):
        w, ids = Tensor(np.ones((4, 2)), requires_grad=True), np.array([0, 2])
        mask, index = np.array([True, True]), np.array([0, 1])
        targets = np.array([1, 0])
        y = F.embedding(w, ids, mask)[index]
        loss = F.cross_entropy(y * Tensor(np.array([[1., 2.], [3., 4.]])), targets)[0]
        if spoil:
            ids[:], mask[:], index[:], targets[:] = 1, False, 0, 1
        loss.backward()
        return w.grad

    np.testing.assert_array_equal(gradient(True), gradient(False))


def test_N5_numbers_that_are_changed_through_a_tensor_are_an_error():
    w, x = Tensor(np.ones(2), requires_grad=True), Tensor(np.ones(2))
    y = (w * x).sum()
    x[0] = 5
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()
    with no_grad():
        w[0] = 2


def test_N6_gathered_logits_where_a_piece_is_meant_are_refused():
    def whole(comm):
        with pytest.raises(ValueError, match=r"4 words on rank \d, which holds 2 of the 4"):
            vocab_parallel_cross_entropy(Tensor(np.zeros((1, 4))), np.array([1]), comm, [2, 2])

    run_threads(2, whole)


def test_N7_float16_is_summed_in_float32():
    x = Tensor(np.full(4, 20000, np.float16), requires_grad=True)
    assert x.mean().item() == 20000
    assert Tensor(np.array([4096, 1, 1, 1], np.float16)).sum().item() == np.float16(4099)
