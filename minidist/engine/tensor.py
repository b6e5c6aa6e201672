"""Tensor: a NumPy array that remembers how it was made, and the operations on it.

An operation is one function.  It computes its result in NumPy and says in a closure, the vjp
(vector-Jacobian product), how a gradient of the result becomes gradients of its parents:

    def exp(x):
        y = np.exp(x.data)
        return Tensor(y, (x,), lambda g: (g * y,))

That is all an operation needs: strategies add theirs the same way.  graph.py says what the
closures keep, tape.py when they run.  Results have the dtype of their Tensors: constants adapt.

Lesson: python -m lessons.step
"""
import types

import numpy as np

from .dtypes import common, product, summed
from .graph import Node, Part, fixed, graph_bytes, mark_changed
from .tape import (Sum, after_backward, deliver, is_grad_enabled, loss_scale, no_grad, propagate,
                   replay, replaying, run_deferred)

__all__ = ["Node", "Part", "Tensor", "after_backward", "cast", "concatenate", "exp", "graph_bytes",
           "is_grad_enabled", "log", "matmul", "max", "mean", "no_grad", "relu", "replay",
           "replaying", "reshape", "run_deferred", "split", "sqrt", "sum", "tanh", "transpose"]


class Tensor:
    """An array, its gradient, and the node that made it.

    Tensor(data, requires_grad=True) is a leaf: backward() adds to its .grad.
    Tensor(data, parents, vjp) is a result: vjp(g) gives one gradient per parent (see tape.py),
    never writes into g, and reads parameters as `w.data` when it runs.
    """

    __array_ufunc__ = None                                  # so that array + tensor is ours

    def __init__(self, data, parents=(), vjp=None, requires_grad=False):
        kept = data is None or isinstance(data, np.ndarray)
        self.data = data if kept else np.asarray(data)
        self.grad = self.node = None
        self.leaf, self.hooks = False, []
        if requires_grad:
            self.requires_grad = True
        if vjp is not None and is_grad_enabled():
            edges = [p.node or (p if p.leaf else None) for p in parents]
            if edges.count(None) < len(edges):
                self.node = Node(edges, vjp)

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    size = property(lambda self: self.data.size)

    @property
    def requires_grad(self):
        return self.leaf or self.node is not None

    @requires_grad.setter
    def requires_grad(self, value):
        if self.node is not None:
            raise RuntimeError("requires_grad can be set on leaves only: .detach() a result first")
        if value and self.data is not None and self.data.dtype.kind != "f":
            raise TypeError(f"only floats can require a gradient, not {self.data.dtype}")
        self.leaf = bool(value)

    def __repr__(self):
        return f"Tensor({self.data}{', requires_grad=True' if self.requires_grad else ''})"

    def item(self):
        return self.data.item()

    def detach(self):
        """Share the data, forget how it was made."""
        return Tensor(self.data)

    def __array__(self, dtype=None, copy=None):
        if self.requires_grad:
            raise TypeError("NumPy would lose the gradient of this Tensor: use its .data")
        return np.array(self.data, dtype, copy=copy)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __setitem__(self, index, value):
        """Write in place, unseen by the tape: on constants, or inside no_grad()."""
        if self.requires_grad and is_grad_enabled():
            raise RuntimeError("writing into a Tensor that requires a gradient: use no_grad()")
        self.data[index] = value.data if isinstance(value, Tensor) else value
        self.changed()

    def changed(self):
        """Say that .data was written in place: a backward that needs the old values will raise."""
        mark_changed(self.data)

    def backward(self, grad=None, defer=None):
        """Add d(self)/d(leaf) to every leaf's .grad.  grad: of self, needed if it is no scalar

        defer: a list to collect the weight gradients not computed yet, for run_deferred().
        """
        if grad is None and self.size != 1:
            raise RuntimeError(f"backward() from shape {self.shape} needs a gradient of that shape")
        seed = np.full(self.shape, loss_scale()) if grad is None else np.asarray(grad)
        seed = seed.astype(self.dtype, copy=False)
        if seed.shape != self.shape:
            raise ValueError(f"gradient of shape {seed.shape} for a Tensor of shape {self.shape}")
        if self.node is not None:
            propagate(self.node, seed, defer)
        elif self.leaf:
            deliver(self, Sum(seed))
        else:
            raise RuntimeError("backward() from a Tensor that depends on no leaf")

    def register_post_accumulate_grad_hook(self, fn):
        """Call fn(self) once per backward, when .grad of this leaf is complete.  -> .remove()"""
        if not self.leaf:
            raise RuntimeError("a post-accumulate hook needs a leaf that requires a gradient")
        self.hooks.append(fn)
        return types.SimpleNamespace(remove=lambda: self.hooks.remove(fn))


# ------------------------------------------------------------------------ arithmetic

def _operands(a, b):
    """Make Tensors of one dtype (see dtypes.py)."""
    tensors = isinstance(a, Tensor), isinstance(b, Tensor)
    if all(tensors) and a.dtype == b.dtype and a.dtype.kind == "f":
        return a, b
    arrays = [x.data if known else np.asarray(x) for x, known in zip((a, b), tensors)]
    return [x if known and array is x.data else Tensor(array)
            for x, known, array in zip((a, b), tensors, common(*arrays, *tensors))]


def _fit(g, shape):
    """Sum a gradient over the axes along which an operand of this shape was broadcast."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1]
    return summed(g, (*range(extra), *stretched)).reshape(shape)


def _kept(x, wanted=True):
    """What a vjp keeps of x: a leaf itself, since its data may be freed and refilled meanwhile."""
    return None if not wanted else x if x.leaf else x.detach()


def add(a, b):
    a, b = _operands(a, b)
    sa, sb = a.shape, b.shape
    return Tensor(a.data + b.data, (a, b), lambda g: (_fit(g, sa), _fit(g, sb)))


def sub(a, b):
    a, b = _operands(a, b)
    sa, sb = a.shape, b.shape
    return Tensor(a.data - b.data, (a, b), lambda g: (_fit(g, sa), _fit(-g, sb)))


def mul(a, b):
    a, b = _operands(a, b)
    for_a, for_b = _kept(b, a.requires_grad), _kept(a, b.requires_grad)
    sa, sb = a.shape, b.shape

    def vjp(g):
        return (None if for_a is None else _fit(g * for_a.data, sa),
                None if for_b is None else _fit(g * for_b.data, sb))
    return Tensor(a.data * b.data, (a, b), vjp)


def div(a, b):
    a, b = _operands(a, b)
    y = a.data / b.data
    below, for_b, sa, sb = _kept(b), y if b.requires_grad else None, a.shape, b.shape

    def vjp(g):
        g = g / below.data
        return _fit(g, sa), None if for_b is None else _fit(-g * for_b, sb)
    return Tensor(y, (a, b), vjp)


def power(x, k):
    """x**k for a number k."""
    if isinstance(k, Tensor):
        raise TypeError("x**k needs a number k")
    kept, k = _kept(x), float(k)
    return Tensor(x.data ** k, (x,), lambda g: (g * (k * kept.data ** (k - 1 if k else 0)),))


def neg(x):
    return Tensor(-x.data, (x,), lambda g: (-g,))


def matmul(a, b):
    """[..., n, k] @ [..., k, m] -> [..., n, m].  Leading axes broadcast"""
    a, b = _operands(a, b)
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul of shapes {a.shape} and {b.shape}: reshape vectors to matrices")
    for_a, for_b = _kept(b, a.requires_grad), _kept(a, b.requires_grad)
    sa, sb = a.shape, b.shape

    def vjp(g):
        return (None if for_a is None else _fit(product(g, for_a.data.swapaxes(-1, -2)), sa),
                None if for_b is None else _fit(product(for_b.data.swapaxes(-1, -2), g), sb))
    return Tensor(product(a.data, b.data), (a, b), vjp)


def exp(x):
    y = np.exp(x.data)
    return Tensor(y, (x,), lambda g: (g * y,))


def log(x):
    kept = _kept(x)
    return Tensor(np.log(x.data), (x,), lambda g: (g / kept.data,))


def sqrt(x):
    y = np.sqrt(x.data)
    return Tensor(y, (x,), lambda g: (g / (2 * y),))


def tanh(x):
    y = np.tanh(x.data)
    return Tensor(y, (x,), lambda g: (g * (1 - y * y),))


def relu(x):
    y = np.maximum(x.data, 0)
    return Tensor(y, (x,), lambda g: (np.where(y > 0, g, g.dtype.type(0)),))


# ------------------------------------------------------------------------ reductions

def _spread(g, shape, dim, keepdim):
    """Repeat what was reduced, as a read-only view of the shape it came from."""
    if dim is not None and not keepdim:
        g = np.expand_dims(g, dim)
    return np.broadcast_to(g, shape)


def sum(x, dim=None, keepdim=False):
    """Sum over all axes, one, or several.  dim: None, an integer, or a tuple"""
    shape = x.shape
    return Tensor(summed(x.data, dim, keepdim), (x,),
                  lambda g: (_spread(g, shape, dim, keepdim),))


def mean(x, dim=None, keepdim=False):
    """The sum over the count, divided before it is rounded to x's dtype."""
    y, shape = x.data.mean(dim, keepdims=keepdim), x.shape
    count = float(x.size / np.maximum(1, y.size))
    return Tensor(y, (x,), lambda g: (_spread(g / count, shape, dim, keepdim),))


def max(x, dim=None, keepdim=False):
    """The largest values; equal ones share the gradient evenly, as torch.amax."""
    y = x.data.max(dim, keepdims=True)
    hit = x.data == y
    count = hit.sum(dim, keepdims=True, dtype=x.dtype)
    return Tensor(y if keepdim else y.squeeze(dim), (x,),
                  lambda g: (np.where(hit, _spread(g, hit.shape, dim, keepdim) / count, 0),))


# ------------------------------------------------------------------------ dtypes and shapes

def cast(x, dtype):
    """The same numbers in another float dtype; the gradient comes back in x's own."""
    was = x.dtype
    if np.dtype(dtype).kind != "f":
        raise TypeError(f"a cast to {np.dtype(dtype)} has no gradient: take .data")
    return Tensor(x.data.astype(dtype, copy=False), (x,), lambda g: (g.astype(was, copy=False),))


def reshape(x, *shape):
    """The same numbers in another shape; takes reshape(x, 2, 3) and reshape(x, (2, 3))."""
    old = x.shape
    return Tensor(x.data.reshape(*shape), (x,), lambda g: (g.reshape(old),))


def transpose(x, *axes):
    """Axis i of the result is axis axes[i] of x (NumPy's meaning); no axes: reverse them."""
    axes = [axis % x.ndim for axis in axes] or range(x.ndim)[::-1]
    back = [axes.index(i) for i in range(x.ndim)]
    return Tensor(x.data.transpose(axes), (x,), lambda g: (g.transpose(back),))


def getitem(x, index):
    """x[index], with NumPy's slices, integer arrays and masks."""
    shape = x.shape
    index = tuple(map(fixed, index)) if isinstance(index, tuple) else fixed(index)
    return Tensor(x.data[index], (x,), lambda g: (Part(shape, index, g),))


def concatenate(tensors, dim=0):
    cuts = np.cumsum([t.shape[dim] for t in tensors])[:-1]
    data = np.concatenate([t.data for t in tensors], dim)
    return Tensor(data, tensors, lambda g: np.split(g, cuts, dim))


def split(x, sizes, dim=0):
    """Cut x along dim into pieces of these sizes.  -> list"""
    if np.sum(sizes) != x.shape[dim]:
        raise ValueError(f"pieces of {sizes} do not make up {x.shape[dim]} along dim {dim}")
    ends = np.cumsum(sizes)
    before = (slice(None),) * (dim % x.ndim)
    return [getitem(x, (*before, slice(end - n, end))) for n, end in zip(sizes, ends)]


Tensor.__add__ = Tensor.__radd__ = add
Tensor.__mul__ = Tensor.__rmul__ = mul
Tensor.__sub__,     Tensor.__rsub__     = sub,    lambda b, a: sub(a, b)
Tensor.__truediv__, Tensor.__rtruediv__ = div,    lambda b, a: div(a, b)
Tensor.__matmul__,  Tensor.__rmatmul__  = matmul, lambda b, a: matmul(a, b)
Tensor.__pow__, Tensor.__neg__, Tensor.__getitem__ = power, neg, getitem
for name in ("__len__", "__bool__", "__float__", "__int__", "__contains__"):   # as the array's own
    setattr(Tensor, name, lambda self, *args, name=name: getattr(self.data, name)(*args))
for operation in (exp, log, sqrt, tanh, relu, sum, mean, max, cast, reshape, transpose):
    setattr(Tensor, operation.__name__, operation)
