"""Modules: named parameters, and the layers that a GPT is made of.

    Parameter   a Tensor with a name and a place     "blocks.0.attn.qkv.weight", [3D, D]
    Module      holds parameters and other modules; calling it runs `forward`, inside its wrappers

Two rules make every layout of the same model the same training. An initial value is a function of
(seed, parameter name), so that whoever needs a piece of a parameter can make the whole and cut it.
A dropout mask is a function of (seed, name, step, global position), so that neither the cut of the
work nor its repetition changes what is dropped.

Lesson: python -m lessons.step
"""
import functools
import hashlib
import math
import zlib

import numpy as np

from minidist.engine import functional as F
from minidist.engine.tensor import Tensor


class Parameter(Tensor):
    """Hold a trainable array under its one global name, and say how it lies on the ranks.

    `data = None` frees the array; shape and dtype stay those of the last one.
    """

    def __init__(self, data, name):
        super().__init__(data, requires_grad=True)
        self.name = name
        self.full_shape = data.shape
        self.decay = data.ndim > 1          # by the shape of the whole: a flat piece forgets it
        self.placements = {}                # mesh axis -> how it is cut there, in order of cutting
        self.partial = set()                # mesh axes over which its gradient is yet to be summed
        self.sliced = {}                    # mesh axis -> how only its optimizer state is cut there

    @property
    def data(self):
        return self._data

    @data.setter
    def data(self, array):
        self._data = array
        if array is not None:
            self._shape, self._dtype = array.shape, array.dtype

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)
    ndim = property(lambda self: len(self._shape))
    size = property(lambda self: math.prod(self._shape))


def init(name, shape, seed=0, std=0.02, dtype=np.float32):
    """Draw a parameter's initial values from (seed, name) alone.  -> shape

    Always drawn in float64, so that a float32 model is the rounded float64 one.
    """
    bits = np.random.Philox(key=[seed, zlib.crc32(name.encode())])
    return (std * np.random.Generator(bits).standard_normal(shape)).astype(dtype)


def find(container, path=()):
    """Yield (path, thing) for the modules and parameters in nested lists, tuples and dicts.

    It does not look into a module it finds, nor into objects of other kinds.
    """
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, thing in list(items):
        if isinstance(thing, (Module, Parameter)):
            yield (*path, key), thing
        elif isinstance(thing, (dict, list, tuple)):
            yield from find(thing, (*path, key))


class Module:
    """Hold parameters and modules as attributes, or in containers held as one; run `forward`."""

    def __call__(self, *args):
        run = self.forward
        for wrapper in self.__dict__.get("wrappers", ()):
            run = functools.partial(wrapper, run)
        return run(*args)

    def wrap(self, wrapper):
        """Let wrapper(forward, *args) stand in for forward(*args); the last one is outermost."""
        self.__dict__.setdefault("wrappers", []).append(wrapper)

    def modules(self):
        """List this module and all below it, each once."""
        return [module for module, _ in self.walk()]

    def walk(self):
        """List this module and all below it, each once, with what each holds.

        -> [(module, [(path, module or parameter)])]"""
        found, todo = {}, [self]
        while todo:
            module = todo.pop()
            if id(module) not in found:
                held = list(find(module.__dict__))
                found[id(module)] = module, held
                todo += [thing for _, thing in reversed(held) if isinstance(thing, Module)]
        return list(found.values())

    def slots(self):
        """Yield each place of a parameter: (module, "attribute", parameter); tied ones twice.

        In a container the place reads "attribute.key".
        """
        for module, held in self.walk():
            for path, thing in held:
                if isinstance(thing, Parameter):
                    yield module, ".".join(map(str, path)), thing

    def parameters(self):
        """List the parameters, tied ones once, in the order of the forward pass."""
        held = (thing for _, found in self.walk() for _, thing in found)
        return list({id(p): p for p in held if isinstance(p, Parameter)}.values())

    def named_parameters(self):
        """List (name, parameter), tied ones once."""
        return [(p.name, p) for p in self.parameters()]

    def zero_grad(self):
        """Forget all gradients."""
        for p in self.parameters():
            p.grad = None


def digest(model):
    """Hash all parameters, bit by bit."""
    hashed = hashlib.sha256()
    for p in model.parameters():
        hashed.update(p.name.encode())
        hashed.update(np.ascontiguousarray(p.data))
    return hashed.hexdigest()


class Linear(Module):
    """Multiply by a matrix and add a bias.  [..., n_in] -> [..., n_out]"""

    def __init__(self, name, n_out, n_in, seed=0, dtype=np.float32, std=0.02, bias=True):
        weight = name + ".weight"
        self.weight = Parameter(init(weight, (n_out, n_in), seed, std, dtype), weight)
        self.bias = Parameter(np.zeros(n_out, dtype), name + ".bias") if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Look up one row per id.  [...] -> [..., width]"""

    def __init__(self, name, rows, width, seed=0, dtype=np.float32, std=0.02):
        weight = name + ".weight"
        self.weight = Parameter(init(weight, (rows, width), seed, std, dtype), weight)

    def forward(self, ids):
        return F.embedding(self.weight, ids)


class LayerNorm(Module):
    """Bring each row to mean 0 and variance 1, then scale and shift it.  [..., width] -> same"""

    def __init__(self, name, width, dtype=np.float32):
        self.weight = Parameter(np.ones(width, dtype), name + ".weight")
        self.bias = Parameter(np.zeros(width, dtype), name + ".bias")

    def forward(self, x):
        return F.layer_norm(x, self.weight, self.bias)


class Dropout(Module):
    """Zero a share `rate` of x and scale the rest up by 1/(1 - rate), while training.

    A batch without a step (validation, sampling) is left as it is.
    """

    def __init__(self, name, rate, seed=0):
        self.name, self.rate, self.seed = name, rate, seed

    def mask(self, step, dtype, *axes):
        """Make the mask at these global indices, one vector per axis; None: keep everything."""
        if not self.rate or step is None:
            return None
        site = zlib.crc32(f"{self.seed}/{self.name}/{step}".encode())
        return F.dropout_mask(self.rate, site, dtype, *axes)

    def forward(self, x, batch):
        mask = self.mask(batch.step, x.dtype, batch.rows, batch.stream, np.arange(x.shape[-1]))
        return x if mask is None else F.dropout(x, mask)
