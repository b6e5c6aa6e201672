"""What each function of an exercise is asked, where one rank is enough: walls, step, memory, mesh.

The right answers come from counting, from textbook NumPy and from finite differences: nothing here
calls what it asks about. Sizes differ, and so do P, G and O, so that no two letters can be swapped.
"""
from itertools import product
from types import SimpleNamespace

import numpy as np

from minidist import cost, ledger, mesh
from minidist.engine import functional, nn, optim
from minidist.engine.tensor import Tensor, exp


# ---- lessons.walls

def walls(lesson):
    with lesson.asking() as ask:
        for N, D, F, kind in (3, 5, 7, np.float16), (2, 3, 4, np.float32), (1, 6, 2, np.float64):
            x, weight, bias, y = (np.empty(n, kind) for n in (N * D, F * D, F, N * F))
            options = {} if kind is np.float32 else dict(w=x.itemsize)
            ask("linear_work", f"N={N}, D={D}, F={F}, {options or 'w not given'}")
            work = cost.linear_work(N, D, F, **options)
            ask.right("flops", work.flops, 2 * N * D * F + N * F)
            ask.right("bytes", work.bytes, x.nbytes + weight.nbytes + bias.nbytes + y.nbytes)
        for B, T, D, options in (
                (2, 10, 3, dict(tile=4)), (3, 130, 2, {}), (1, 7, 5, dict(tile=9)),
                (2, 6, 1, dict(w=2, tile=1)), (1, 8, 5, dict(w=8, tile=4))):
            ask("attention_work", f"B={B}, T={T}, D={D}, {options or 'no w, no tile'}")
            work = cost.attention_work(B, T, D, **options)
            ask.right("flops", work.flops, 2 * 2 * B * D * pairs(T, options.get("tile", 64)))
            ask.right("bytes", work.bytes, options.get("w", 4) * 4 * B * T * D)
        for flops, nbytes, peak, bandwidth, seconds in (
                (7, 3, 2, 4, 3.5), (3, 7, 4, 2, 3.5), (12, 3, 4.0, 1.0, 3.0), (0, 5, 1, 2, 2.5)):
            ask("at_least", f"{flops} flops at {peak} per s, {nbytes} bytes at {bandwidth} per s")
            work = SimpleNamespace(flops=flops, bytes=nbytes)
            ask.right("seconds", cost.at_least(work, peak, bandwidth), seconds)


def pairs(T, tile):
    """Count the (query, key) that meet, one by one: each tile sees up to its own end."""
    return sum(key < (query // tile + 1) * tile for query in range(T) for key in range(T))


# ---- lessons.step

def step(lesson):
    """The values of both functions, and their gradients by finite differences."""
    rng = np.random.default_rng(0)
    with lesson.asking() as ask:
        for shape, options, shift in (
                ((3, 4, 5), {}, 2.0), ((2, 6), dict(eps=0.5), 0.0), ((7,), {}, 9.0)):
            x = rng.standard_normal(shape) * 1.5 + shift
            w, b = rng.standard_normal((2, shape[-1])) + 1
            ask("layer_norm", f"{list(shape)}, eps {options.get('eps', 'not given')}")
            compare(ask, lambda *p, options=options: functional.layer_norm(*p, **options),
                    lambda *p, options=options: normed(*p, **options), x, w, b)
        ask("layer_norm", "[2, 3] float32, a row of equal numbers")
        compare(ask, functional.layer_norm, normed, np.float32([[5, 5, 5], [1, 2, 4]]),
                np.float32([1, 2, 3]), np.float32([4, 5, 6]), slopes=False)
        for x in rng.standard_normal((3, 5)) * 2, np.float32([[-40, -5, 0], [0.5, 3, 400]]):
            ask("gelu", f"{list(x.shape)} {x.dtype}")
            compare(ask, functional.gelu, textbook_gelu, x, slopes=x.dtype == np.float64)
        x = np.linspace(-3, 3, 3 * functional.PIECE // 2 + 1)
        ask("gelu", f"{x.size} numbers")
        ask.right("y", functional.gelu(Tensor(x)).data, textbook_gelu(x), 1e-12)


def normed(x, w, b, eps=1e-5):
    """Layer norm as a textbook writes it."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + x.dtype.type(eps)) * w + b


def textbook_gelu(x):
    return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))).astype(x.dtype)


def compare(ask, function, reference, *arrays, slopes=True):
    """Ask a function of Tensors for its value, and for its gradients under some g."""
    leaves = [Tensor(x.copy(), requires_grad=True) for x in arrays]
    y, right = function(*leaves), reference(*arrays)
    ask.right("y", y.data, right, 1e-12 if slopes else 1e-6)
    g = np.random.default_rng(1).standard_normal(right.shape).astype(right.dtype)
    given = g.copy()
    y.backward(given)
    ask.right("g, which is not yours to change", given, g)
    for name, x, leaf in zip("xwb", arrays, leaves):
        ask.right(f"{name}, after backward", leaf.data, x)
        ask.right(f"dtype of the gradient of {name}", str(leaf.grad.dtype), str(x.dtype))
        if slopes:
            ask.right(f"gradient of {name}", leaf.grad, slope(reference, arrays, x, g), 1e-7)


def slope(function, arrays, x, g, e=1e-5):
    """Move each element of x, one of the arrays: how does sum(g y) change?"""
    found = np.empty_like(x)
    for at in np.ndindex(x.shape):
        was, ends = x[at], []
        for x[at] in was + e, was - e:
            ends.append((g * function(*arrays)).sum())
        x[at], found[at] = was, (ends[0] - ends[1]) / (2 * e)
    return found


# ---- lessons.memory

class Odd(nn.Module):
    """Parameters of two dtypes: one tied, one frozen, one that nothing has used."""

    def __init__(self):
        self.a = nn.Parameter(np.ones((3, 5)), "a")
        self.again = self.a
        self.frozen = nn.Parameter(np.ones(7, np.float32), "frozen")
        self.frozen.requires_grad = False
        self.unused = nn.Parameter(np.ones(11), "unused")


def memory(lesson):
    """Bytes of float64 and float32 arrays that one can count with a finger."""
    P, a = 8 * (15 + 11) + 4 * 7, 8 * 15
    with lesson.asking() as ask:
        model = Odd()
        ask("held", "a model alone: 15 + 11 float64 parameters, 7 frozen float32 ones")
        ask.right("P, G, O, A", tuple(ledger.held(model)), (P, 0, 0, 0))
        for name, make, moments in (("SGD", optim.SGD, 0), ("AdamW", optim.AdamW, 2), (
                "SGD with momentum", lambda *p: optim.SGD(*p, momentum=0.9), 1)):
            optimizer = make([model.a], 0.1)
            model.a.grad = np.ones((3, 5))
            optimizer.step()
            ask("held", f"only a, of 15 numbers, has a gradient; {name}")
            ask.right("P, G, O, A", tuple(ledger.held(model, optimizer)), (P, a, moments * a, 0))
        one, two = (exp(Tensor(np.zeros(n, kind), requires_grad=True))
                    for n, kind in ((9, np.float64), (13, np.float32)))
        ask("held", "two roots that keep 72 and 52 bytes, one of them given as its node")
        ask.right("P, G, O, A", tuple(ledger.held(model, None, one, two.node)), (P, a, 0, 124))
        ask("held", "the same root twice")
        ask.right("A", ledger.held(model, None, one, one).activations, 72)
        of_batch(ask, model, a)


def of_batch(ask, model, a):
    """A graph that keeps a parameter, an array of the batch, and one of its own."""
    batch = SimpleNamespace(**dict.fromkeys(("targets", "rows", "positions", "stream")),
                            tokens=np.ones((3, 5)))
    kept = model.a, batch.tokens, np.ones(2)
    root = Tensor(np.zeros(1), (model.a,), lambda g: kept)
    for given, size in (None, 16 + a), (batch, 16):
        ask("held", f"a graph of a parameter, the tokens and 2 numbers; batch {given and 'given'}")
        ask.right("A", ledger.held(model, None, root, batch=given).activations, size)


# ---- lessons.mesh

MESHES = dict(pp=2, dp=3, tp=4), dict(dp=5, tp=1, cp=2), dict(tp=3), dict(b=2, a=2, c=2, d=3)


def grid(lesson):
    """Every rank of meshes with axes of different lengths, by counting them through."""
    with lesson.asking() as ask:
        for sizes in MESHES:
            places = list(product(*map(range, sizes.values())))
            for rank, place in enumerate(places):
                ask("coordinates", f"rank {rank} of {sizes}")
                ask.right("coordinates", mesh.coordinates(rank, sizes), dict(zip(sizes, place)))
            names = list(sizes)
            for axes in [names[:1], names[-1:], names[::-1][:2], names[::2], names, []]:
                ask("groups", f"{sizes}, along {', '.join(axes) or 'no axis'}")
                groups = {}
                for rank, place in enumerate(places):
                    outside = tuple(i for i, axis in zip(place, sizes) if axis not in axes)
                    groups.setdefault(outside, []).append(rank)
                ask.right("groups", mesh.groups(sizes, *axes), list(groups.values()))
