"""Which dtype a result has, and where 16 bits are too few.

    float32 Tensor, any real constant      float32: a constant adapts, nothing widens by accident
    two Tensors of other float dtypes      an error: convert one explicitly
    integers among themselves              int64; integers have no gradient and may widen
    integer Tensor, float constant         a float, as in NumPy: nothing is cut off

Lesson: python -m lessons.step
"""
import numpy as np


def common(a, b, a_fixed, b_fixed):
    """Bring two arrays to one dtype; fixed: a Tensor's, which decides if it is a float."""
    for x in (a, b):
        if x.dtype.kind not in "biuf":
            raise TypeError(f"{a.dtype} meets {b.dtype}, and {x.dtype} is no real number")
    if a_fixed and b_fixed and "f" in (a.dtype.kind, b.dtype.kind):
        raise TypeError(f"{a.dtype} meets {b.dtype}: convert one of the Tensors explicitly")
    floats = [x.dtype for x, fixed in ((a, a_fixed), (b, b_fixed)) if fixed and x.dtype.kind == "f"]
    dtype = floats[0] if floats else np.result_type(a, b, np.int64)
    return a.astype(dtype, copy=False), b.astype(dtype, copy=False)


def widened(a):
    """float16 as float32, in which it is summed: 16 bits end at 65504, and hold 2049 as 2048."""
    return a.astype(np.float32) if a.dtype == np.float16 else a


def product(a, b, out=None):
    """a @ b; of float16 in float32, rounded once.  [..., n, k], [..., k, m] -> [..., n, m]

    NumPy has no 16-bit BLAS; its own loop is 35 times slower."""
    if a.dtype != np.float16 and b.dtype != np.float16:
        return np.matmul(a, b, out=out)
    y = widened(a) @ widened(b)
    if out is None:
        return y.astype(np.result_type(a, b), copy=False)
    out[...] = y
    return out


def summed(a, dim=None, keepdims=False):
    """Sum over axes, in float32 at the least, and give the result a's dtype."""
    y = widened(a).sum(dim, keepdims=keepdims)
    return y.astype(a.dtype) if a.dtype == np.float16 else y
