"""The operations that take the time, each fused and with its own gradient.

    linear  grouped_linear  embedding  layer_norm  gelu  softmax  cross_entropy  dropout
    add_auxiliary_loss
    scaled_dot_product_attention                                (in attention.py)

Written for speed where it pays: whole matrix products, column sums as `ones @ g`, elementwise
chains in place on pieces that stay in the cache.  Results and all that is kept for backward have
the input's dtype; only float16 is summed in float32.  Weight gradients come as thunks (see
tape.py), and weights are read as `w.data` in backward again: a strategy may free and refill a
weight between forward and backward.

Lesson: python -m lessons.step
"""
import functools
import math
import threading
from contextlib import contextmanager

import numpy as np

from .attention import scaled_dot_product_attention
from .dtypes import product, widened
from .tape import forgetting, loss_scale, replaying
from .tensor import Tensor

__all__ = ["IGNORE", "add_auxiliary_loss", "auxiliary_losses", "cross_entropy", "dropout",
           "dropout_mask", "embedding", "gelu", "grouped_linear", "layer_norm", "linear",
           "scaled_dot_product_attention", "softmax"]

IGNORE = -100                            # a target that does not count
PIECE = 1 << 16                          # elements of an elementwise chain at a time: fits the L2


@functools.lru_cache(maxsize=64)
def _ones(n, dtype):
    return np.ones(n, dtype)


def _column_sum(g):
    """Sum over rows, as a matrix product: several times faster than g.sum(0).  [n, d] -> [d]"""
    return product(_ones(len(g), g.dtype), g)


def _rows(x):
    """See an array as a matrix whose rows are its last axis.  [..., d] -> [n, d]"""
    return x.reshape(-1, x.shape[-1])


# ------------------------------------------------------------------------ matrices

def linear(x, w, b=None):
    """x @ w.T + b.  [..., i], [o, i], [o] -> [..., o]"""
    parents = (x, w) if b is None else (x, w, b)
    count, shape, rows, wanted = len(parents), x.shape, _rows(x.data), x.requires_grad
    y = product(rows, w.data.T)
    if b is not None:
        y += b.data

    def vjp(g):
        g = _rows(g)
        gx = product(g, w.data).reshape(shape) if wanted else None
        return (gx, lambda: product(g.T, rows), lambda: _column_sum(g))[:count]
    return Tensor(y.reshape(*shape[:-1], y.shape[1]), parents, vjp)


def grouped_linear(x, w, b, counts, columns=slice(None)):
    """Multiply run e of the rows by w[e].T, and add b[e].  [n, i], [E, o, i], [E, o] -> [n, o]

    counts [E]: the length of each run; columns: those of the result that b has, if not all.
    """
    runs = [slice(end - int(n), end) for n, end in zip(counts, np.cumsum(counts).tolist())]
    rows, wanted = x.data, x.requires_grad
    y = _products(np.empty((len(rows), w.shape[1]), x.dtype), runs,
                  _cut(rows, runs), w.data.swapaxes(1, 2))
    for e, run in enumerate(runs):
        y[run, columns] += b.data[e]

    def vjp(g):
        gs = _cut(g, runs)
        return (_products(np.empty(rows.shape, g.dtype), runs, gs, w.data) if wanted else None,
                lambda: _products(np.empty(w.shape, g.dtype), range(len(runs)),
                                  [run.T for run in gs], _cut(rows, runs)),
                lambda: np.array([_column_sum(run[:, columns]) for run in gs]).reshape(b.shape))
    return Tensor(y, (x, w, b), vjp)


def _cut(rows, runs):
    return [rows[run] for run in runs]


def _products(out, places, lefts, rights):
    """Fill each place of out with a product; one of no rows is zeros.  -> out"""
    for place, left, right in zip(places, lefts, rights):
        np.matmul(left, right, out=out[place])
    return out


def embedding(w, ids, inside=None):
    """Rows of w.  [V, D], integers [...] -> [..., D]

    inside: a mask like ids; where it is False the result is zero and no gradient flows, whatever
    the id.  Other ids outside of 0..V-1 raise IndexError.
    """
    shape = w.shape
    ids = np.array(ids) if inside is None else np.where(inside, ids, 0)   # a copy: backward's own
    if ids.size and not (0 <= ids.min() and ids.max() < shape[0]):
        raise IndexError(f"ids {ids.min()}..{ids.max()} into an embedding of {shape[0]} rows")
    y, outside = w.data[ids], None if inside is None else ~np.asarray(inside, bool)
    if outside is not None:
        y[outside] = 0

    def vjp(g):
        if outside is not None:                             # inside itself need not be kept
            g = np.where(outside[..., None], g.dtype.type(0), g)
        return (lambda: _sum_by_id(g.reshape(-1, shape[1]), ids.reshape(-1), shape),)
    return Tensor(y, (w,), vjp)


def _sum_by_id(g, ids, shape):
    """Add row i of g to row ids[i] of zeros: sort the rows, then sum each run.  [n, D] -> [V, D]"""
    out = np.zeros(shape, g.dtype)
    if ids.size:
        order = np.argsort(ids, kind="stable")
        found, starts = np.unique(ids[order], return_index=True)
        out[found] = np.add.reduceat(g[order], starts)     # float16 in float32
    return out


# ------------------------------------------------------------------------ elementwise

def layer_norm(x, w, b, eps=1e-5):
    """Shift and scale each row to mean 0 and variance 1, then by w and b.  [..., D] -> [..., D]

    Keeps the rows of mean 0 and variance 1, and 1 / deviation of each; x may go."""
    rows, dtype = widened(_rows(x.data)), x.dtype
    d, one, real = x.shape[-1], _ones(x.shape[-1], rows.dtype), rows.dtype.type
    unit = rows - (rows @ one / real(d))[:, None]
    scale = 1 / np.sqrt(np.einsum("nd,nd->n", unit, unit) / real(d) + real(eps))
    unit *= scale[:, None]
    unit, scale = unit.astype(dtype, copy=False), scale.astype(dtype, copy=False)
    y = unit * w.data
    y += b.data

    def vjp(g):
        shape, g = g.shape, widened(_rows(g))
        work = g * unit
        gw, gb = _column_sum(work), _column_sum(g)
        # scale * (g w - mean(g w) - unit * mean(g w unit)), where means are along a row
        along, mean = work @ w.data / real(d), g @ w.data / real(d)
        gx = g * w.data
        gx -= mean[:, None]
        gx -= np.multiply(unit, along[:, None], out=work)
        gx *= scale[:, None]
        return [a.astype(dtype, copy=False) for a in (gx.reshape(shape), gw, gb)]
    return Tensor(y.reshape(x.shape), (x, w, b), vjp)


def gelu(x):
    """x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3), as in GPT-2.

    Keeps only its derivative, and backward makes its result in that array.
    """
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    flat = np.ascontiguousarray(x.data).reshape(-1), y.reshape(-1), slope.reshape(-1)
    with np.errstate(over="ignore"):                        # exp(-2u) = inf: sigmoid is 0
        for i in range(0, x.size, PIECE):
            _gelu_piece(*(a[i:i + PIECE] for a in flat))
    return Tensor(y, (x,), lambda g: (np.multiply(g, slope, out=slope),))


def _gelu_piece(x, y, slope):
    """Fill y = x s and slope = s (1 + x (1 - s) d(2u)/dx), where s = sigmoid(2u).

    The slope is for backward: where that will not come, only y."""
    if x.dtype == np.float16:                               # in which x^2 ends at x = 255
        wide = widened(x), widened(y), widened(slope)
        _gelu_piece(*wide)
        y[...], slope[...] = wide[1:]
        return
    c, a = math.sqrt(8 / math.pi), 0.044715
    square = np.multiply(x, x, out=y if forgetting() else slope)
    s = square * (-c * a)
    s -= c
    s *= x                                                  # -2u
    np.exp(s, out=s)
    s += 1
    np.divide(1, s, out=s)
    if not forgetting():
        slope *= 3 * c * a
        slope += c
        slope *= x
        np.subtract(1, s, out=y)
        slope *= y
        slope += 1
        slope *= s
    np.multiply(x, s, out=y)


def softmax(x, dim=-1):
    """exp(x) over its sum along dim."""
    wide = widened(x.data)
    p = np.exp(wide - wide.max(dim, keepdims=True))
    p /= p.sum(dim, keepdims=True)
    p = p.astype(x.dtype, copy=False)

    def vjp(g):
        gp = widened(g) * p
        return ((gp - p * gp.sum(dim, keepdims=True)).astype(p.dtype, copy=False),)
    return Tensor(p, (x,), vjp)


def cross_entropy(logits, targets, ignore_index=IGNORE):
    """Sum -log softmax(logits)[target] over the targets that count.  [..., V], [...] -> [], int

    A sum and its count, never a mean: only who knows all ranks and micro-batches can divide.
    """
    shape, t = logits.shape, np.asarray(targets).reshape(-1)
    counts = t != ignore_index
    if np.any((t < 0) & counts) or np.any(t >= shape[-1]):
        raise IndexError(f"targets {t[counts].min()}..{t.max()} for {shape[-1]} classes")
    p = widened(_rows(logits.data))
    p = p - np.where(counts[:, None], p.max(-1, keepdims=True), 0)
    p[~counts] = 0                                          # whatever their logits are: inf, NaN
    at = np.flatnonzero(counts), t[counts]
    hit = p[at]
    np.exp(p, out=p)
    total = p @ _ones(shape[-1], p.dtype)
    loss = (np.log(total[counts]) - hit).sum().astype(logits.dtype)
    p *= (counts / total).astype(p.dtype)[:, None]          # rows that do not count: no gradient
    p = p.astype(logits.dtype, copy=False)

    def vjp(g):
        d = p * g
        d[at] -= g
        return (d.reshape(shape),)
    return Tensor(loss, (logits,), vjp), int(counts.sum())


# ------------------------------------------------------------------------ auxiliary losses

class _Auxiliary(threading.local):
    sums = None                          # name -> sum, while this rank collects them


_auxiliary = _Auxiliary()


def add_auxiliary_loss(x, loss, name="auxiliary"):
    """Return x as it is, and let backward act as if loss had been added to the model's loss.

    This is how a layer in the middle of a model gives a loss of its own, as the router of experts
    does: the loss need not be carried to the end, which may be on another rank.  loss: a scalar
    Tensor, a sum over tokens like every loss here; its gradient is seeded with loss_scale().
    """
    if loss.shape != ():
        raise ValueError(f"an auxiliary loss is one number, not an array of shape {loss.shape}")
    if _auxiliary.sums is not None and not replaying():
        _auxiliary.sums[name] = _auxiliary.sums.get(name, 0.0) + loss.item()
    dtype = loss.dtype
    return Tensor(x.data, (x, loss), lambda g: (g, np.asarray(loss_scale(), dtype)))


@contextmanager
def auxiliary_losses():
    """Collect the values of the auxiliary losses of all forwards inside.  -> {name: sum so far}"""
    outer, _auxiliary.sums = _auxiliary.sums, {}
    try:
        yield _auxiliary.sums
    finally:
        _auxiliary.sums = outer


# ------------------------------------------------------------------------ dropout

def dropout(x, mask):
    """x times a mask that already contains 1/(1 - rate)."""
    return Tensor(x.data * mask, (x,), lambda g: (g * mask,))


def dropout_mask(rate, key, dtype, *axes):
    """0 with probability rate, else 1/(1-rate), from the key and global positions alone.

    axes: vectors of global indices, one per axis of the mask: any rank can make its own piece of
    one mask, so that dropout does not change with the layout.
    """
    keep = _hash(key, *axes) >= np.uint32(int(rate * 2**32))
    return np.multiply(keep, 1 / (1 - rate), dtype=dtype)


def _hash(key, *axes):
    """Hash (key, i, j, ...) for all i, j, ... of an outer product: 32 bits each, axis by axis."""
    h = np.array(key & 0xffffffff, np.uint32)
    for axis in axes:
        h = _mix(h[..., None] * np.uint32(0x01000193) + np.asarray(axis, np.uint32))
    return h


def _mix(h):
    """Let every bit change every other (the finalizer of C. Wellons' lowbias32)."""
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7feb352d)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846ca68b)
    h ^= h >> np.uint32(16)
    return h
