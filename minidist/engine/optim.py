"""Optimizers: SGD and AdamW, in place, in pieces that fit the cache; schedule and clipping.

    one step    t += 1 -> rate = lr(t) -> every parameter that has a gradient

The step count, the schedule and Adam's bias correction are one number, `t`: it moves once per real
update, never per micro-batch, and not at all when an update is skipped. Parameters are written in
place, since they may be views of a larger buffer. Each element is read and written once per step
from memory: AdamW costs 28 bytes of traffic per float32 parameter.

Lesson: python -m lessons.step
Paper:  Loshchilov and Hutter 2019, "Decoupled weight decay regularization"
"""
import math

import numpy as np

from .dtypes import widened

CHUNK = 1 << 14                 # elements: parameter, gradient, two moments and a scratch fit in L2


def slabs(*arrays):
    """Cut arrays of one shape along their first axis; yields views and a scratch of their shape.

    Slicing the first axis gives views whatever the strides, where flattening might copy.
    """
    if len({a.shape for a in arrays}) > 1:
        raise ValueError(f"arrays of shapes {', '.join(str(list(a.shape)) for a in arrays)} meet "
                         "in one update: parameter, gradient and state must be alike")
    arrays = [a if a.ndim else a.reshape(1) for a in arrays]
    lead = arrays[0]
    rows = max(1, CHUNK // max(1, lead.size // max(1, len(lead))))
    scratch = np.empty((min(rows, len(lead)), *lead.shape[1:]), lead.dtype)
    for i in range(0, len(lead), rows):
        views = [a[i:i + rows] for a in arrays]
        yield *views, scratch[:len(views[0])]


class Optimizer:
    """Hold what all optimizers share: parameters, the step count, the rate, state by name.

    lr is a number, or a function of the step count (1 at the first update).

    Seams let a strategy change what is written, without wrapping the optimizer:
    target        target(p) -> (array to write, gradient or None); a function to put in its place
    targets       yields the pieces that are updated one by one: all of each target, or less
    moments       moments(p, piece) -> the state of this piece, an array for each moment_name
    after_step    functions of nothing, called in order when all targets are written
    masters       arrays that are written in the place of parameters of fewer bits, by name
    loss_scale    what losses are multiplied by before backward, for 16-bit gradients (None: 1)

    What the next update depends on, besides the parameters: `moments`, arrays per parameter that
    moment_names names in order, and `counters`, the names of fields that are numbers, or tuples.
    """

    moment_names = ()
    counters = ("t",)

    def __init__(self, params, lr, weight_decay):
        self.params = list(params)
        if not self.params:
            raise ValueError("an optimizer without parameters would train nothing: does the model "
                             "keep its modules where Module.parameters() looks?")
        if len({p.name for p in self.params}) < len(self.params):
            raise ValueError("two parameters share a name; list tied parameters once")
        self.lr, self.weight_decay = lr, weight_decay
        self.t = 0
        self.rate = None                        # the learning rate of the last update
        self.state = {}                         # parameter name -> arrays shaped as its target
        self.after_step, self.masters, self.loss_scale = [], {}, None

    def target(self, p):
        """Say what is written, and with which gradient: the whole of what this rank holds."""
        return p.data, p.grad

    def targets(self):
        """Yield (parameter, array, gradient or None) of what is updated: each target as it is."""
        for p in self.params:
            yield p, *self.target(p)

    def step(self, scale=1.0):
        """Update every target that has a gradient, as if gradients were multiplied by scale."""
        self.t += 1
        self.rate = self.lr(self.t) if callable(self.lr) else self.lr
        for p, w, g in self.targets():
            if g is not None:
                self.update(p, w, g, scale)
                p.changed()
        for hook in self.after_step:
            hook()

    def moments(self, p, w):
        """Return the parameter's state: arrays shaped as its target, zero at first."""
        if p.name not in self.state:
            self.state[p.name] = tuple(np.zeros_like(w) for _ in self.moment_names)
        return self.state[p.name]

    def kept(self, p):
        """List what is kept for a parameter from step to step: its moments, then its master."""
        masters = [self.masters[p.name]] if p.name in self.masters else []
        return [*self.state.get(p.name, ()), *masters]

    def keep(self, p, arrays):
        """Put what `kept` has listed in the place of what is kept now."""
        arrays = list(arrays)
        if p.name in self.masters:
            self.masters[p.name] = arrays.pop()
        self.state.pop(p.name, None)
        if arrays:
            self.state[p.name] = tuple(arrays)

    def decay(self, p):
        """Say how strongly this parameter is pulled to zero: matrices only, not biases or norms."""
        return self.weight_decay if p.decay else 0.0

    def zero_grad(self):
        """Forget all gradients."""
        for p in self.params:
            p.grad = None


class SGD(Optimizer):
    """Step against the gradient, or against its running sum (momentum)."""

    def __init__(self, params, lr, momentum=0.0, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.momentum = momentum
        self.moment_names = ("momentum",) if momentum else ()

    def update(self, p, target, grad, scale):
        decay = self.decay(p)
        for w, g, *sums, step in slabs(target, grad, *self.moments(p, target)):
            np.multiply(g, scale, out=step, dtype=step.dtype)
            if decay:
                step += decay * w
            for total in sums:
                total *= self.momentum
                total += step
                step[...] = total
            step *= self.rate
            w -= step


class AdamW(Optimizer):
    """Step by the running mean of the gradient over the root of the running mean of its square."""

    moment_names = ("m", "v")

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        super().__init__(params, lr, weight_decay)
        self.betas, self.eps = betas, eps

    def update(self, p, target, grad, scale):
        b1, b2 = self.betas
        root = math.sqrt(1 - b2 ** self.t)                     # both means start at zero: undo that
        size = self.rate * root / (1 - b1 ** self.t)
        keep = 1 - self.rate * self.decay(p)
        for w, g, m, v, s in slabs(target, grad, *self.moments(p, target)):
            np.multiply(g, scale * (1 - b1), out=s, dtype=s.dtype)
            m *= b1
            m += s                                             # m = b1 m + (1 - b1) g
            s *= s
            s *= (1 - b2) / (1 - b1) ** 2
            v *= b2
            v += s                                             # v = b2 v + (1 - b2) g^2
            np.sqrt(v, out=s)
            s += self.eps * root
            np.divide(m, s, out=s)
            s *= size
            w *= keep
            w -= s                                             # w -= rate m^ / (sqrt(v^) + eps)


def warmup_cosine(peak, warmup, total, floor=0.0):
    """Make a schedule: up to peak in `warmup` updates, down a cosine to floor at `total`."""
    def rate(t):
        if t <= warmup:
            return peak * t / warmup
        done = min(1.0, (t - warmup) / max(1, total - warmup))
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * done))
    return rate


def clip_scale(norm, max_norm):
    """Return what gradients of this norm are to be multiplied by; None: never clip."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def square_sum(params):
    """Add up the squares of all gradients' elements."""
    grads = (p.grad for p in params if p.grad is not None)
    return sum(float(np.vdot(g, g)) for grad in grads for g in (widened(g) for g, _ in slabs(grad)))


def clip_grad_norm(params, max_norm):
    """Scale all gradients so that their joint norm is at most max_norm; return the norm before."""
    norm = math.sqrt(square_sum(params))
    scale = clip_scale(norm, max_norm)
    for p in params:
        if p.grad is not None and scale < 1:
            p.grad *= scale
    return norm
