"""check_op: an operation's gradients against central differences.

One line per case.  fn takes Tensors and returns one.  Against PyTorch: tests/pytorch.py.
"""
import numpy as np

from minidist.engine.tensor import Tensor


def inputs(shapes, positive=False, seed=0):
    """Draw float64 arrays, away from zero where a function needs that."""
    rng = np.random.default_rng(seed)
    draws = [rng.standard_normal(shape) for shape in shapes]
    return [np.asarray(abs(x) + 0.5 if positive else x) for x in draws]


def value_and_gradients(fn, arrays, g=None):
    """Run fn forward and, from the output gradient g (None: drawn), backward.  -> y, g, [grads]"""
    tensors = [Tensor(a.copy(), requires_grad=True) for a in arrays]
    y = fn(*tensors)
    if g is None:
        g = np.random.default_rng(1).standard_normal(y.shape)
    y.backward(g)
    for a, t in zip(arrays, tensors):
        assert t.grad.shape == a.shape and t.grad.dtype == a.dtype
        assert np.array_equal(a, t.data), "an operation changed its input"
    return y.data, g, [t.grad for t in tensors]


def check_op(fn, *shapes, positive=False, h=1e-5):
    """Compare every element of every gradient with a central difference, to 1e-6."""
    arrays = inputs(shapes, positive)
    _, g, grads = value_and_gradients(fn, arrays)
    for a, grad in zip(arrays, grads):
        slopes = np.empty_like(a)
        for i in np.ndindex(a.shape):
            kept, ends = a[i], []
            for a[i] in (kept + h, kept - h):
                ends.append(float((fn(*map(Tensor, arrays)).data * g).sum()))
            a[i] = kept
            slopes[i] = (ends[0] - ends[1]) / (2 * h)
        close(grad, slopes, 1e-6)


def close(a, ref, bound):
    """Assert that a = ref up to bound, relative to the largest element of ref."""
    assert a.shape == ref.shape, f"shape {a.shape}, not {ref.shape}"
    error = np.abs(a - ref).max(initial=0) / max(np.abs(ref).max(initial=0), 1e-3)
    assert error <= bound, f"relative difference {error:.1e}, bound {bound:.0e}"


def relative(a, ref):
    """Largest difference relative to the largest element of ref."""
    return np.abs(a - ref).max(initial=0) / max(np.abs(ref).max(initial=0), 1e-30)
