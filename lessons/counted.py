"""Count the floating-point operations that an array goes through, by watching it.

    products, others, nbytes = counted.count(function, arrays)

A multiply-add of a matrix product is two; anything else is one per element, an exp too.
"""
from contextlib import contextmanager

import numpy as np


class Counted(np.ndarray):
    """An array that counts what NumPy does with it; so do its results."""
    products = others = 0
    __array_priority__ = 1.0                          # joined with plain ones, it counts on

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        plain = [np.asarray(x) if isinstance(x, Counted) else x for x in inputs]
        if out:
            options["out"] = tuple(map(np.asarray, out))
        y = np.asarray(getattr(ufunc, method)(*plain, **options))
        if ufunc is np.matmul:
            Counted.products += 2 * y.size * plain[0].shape[-1]
        elif y.dtype.kind == "f":
            Counted.others += y.size if method == "__call__" else np.size(plain[0])
        return out[0] if out else y.view(Counted)

    def __array_function__(self, function, types, args, options):
        if function is np.einsum:                     # one multiply-add per element
            Counted.others += 2 * args[1].size
        return super().__array_function__(function, types, args, options)


@contextmanager
def counting():
    """Let arrays that are made meanwhile count, too."""
    Counted.products, Counted.others = 0, 0
    plain = {name: getattr(np, name) for name in ("empty", "ascontiguousarray")}
    for name, make in plain.items():
        setattr(np, name, lambda *args, make=make, **more: make(*args, **more).view(Counted))
    try:
        yield Counted
    finally:
        for name, make in plain.items():
            setattr(np, name, make)


def count(function, arrays):
    """Call function(*arrays) -> list of arrays that it has written.

    -> flops of products, other flops, bytes of all that was read and written, each array once"""
    with counting() as c:
        results = function(*(x.view(Counted) for x in arrays))
    return c.products, c.others, sum(x.nbytes for x in (*arrays, *results))
