"""Count the floating-point operations that an array goes through, by watching it.

    products, others, nbytes = counted.count(function, arrays)

A multiply-add of a matrix product is two; anything else is one per element, an exp too.
"""
from contextlib import contextmanager

import numpy as np

from minidist.engine import functional, optim
from minidist.engine.tensor import Tensor


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


def operations(rows, T, D, H):
    """The hot operations of a step.  -> {name: (function of arrays -> what it writes, arrays)}"""
    rng, heads = np.random.default_rng(0), (rows, H, T, D // H)

    def some(*shape):
        return rng.standard_normal(shape, np.float32)

    def run(op):
        return lambda *arrays: [op(*map(Tensor, arrays)).data]

    return {"layer_norm": (run(functional.layer_norm), [some(rows * T, D), some(D), some(D)]),
            "linear fc1": (run(functional.linear),
                           [some(rows * T, D), some(4 * D, D), some(4 * D)]),
            "gelu": (run(functional.gelu), [some(rows * T, 4 * D)]),
            "attention": (run(functional.scaled_dot_product_attention),
                          [some(*heads) for _ in "qkv"]),
            "AdamW, 4M parameters": (update, [some(2048, 2048) ** 2 for _ in "wgmv"])}


def update(w, g, *moments):
    """AdamW's second update of parameters w."""
    p = Tensor(w, requires_grad=True)
    p.name, p.decay, p.grad = "w", True, g
    optimizer = optim.AdamW([p], 1e-3)
    optimizer.state["w"], optimizer.t = moments, 1
    optimizer.step()
    return [w, *moments]


def step(model, batch):
    """Count one step.  -> (products, other flops) of forward, and of backward"""
    for p in model.parameters():
        p.data = p.data.view(Counted)
    with counting() as c:
        loss = model(batch)
        forward = c.products, c.others
        loss.backward()
    return forward, (c.products - forward[0], c.others - forward[1])
