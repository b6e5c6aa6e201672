"""The tape: how gradients travel back through the graph of what was computed.

A backward walks the nodes newest first (so every rank meets its collectives in the same order),
frees each as it passes, and gives every leaf its gradient once, after its last use.

What a vjp(g) may return for a parent:
    None       no gradient
    an array   which is only read from here on: it may be g itself
    a Part     a gradient for a slice of the parent
    a thunk    a function of nothing; it returns an array that nothing else refers to.  It is called
               only if its gradient is wanted, and, for leaves (weight gradients), only when
               run_deferred() asks if backward was told to defer them

Price: 5 us per operation, under 1 % of a training step.
Lesson: python -m lessons.step
"""
import threading
from collections import defaultdict
from contextlib import contextmanager

import numpy as np

from .graph import Node, Part, check_unchanged, operation


class _State(threading.local):
    """What this rank is doing: ranks may be threads of one process."""

    def __init__(self):
        self.recording, self.replaying, self.forgetting = True, False, False
        self.deferred = None                                # the list that backward() was given
        self.depth, self.callbacks = 0, []                  # backwards running; what runs after
        self.loss_scale = 1.0


_state = _State()


@contextmanager
def _flag(name, value):
    was = getattr(_state, name)
    setattr(_state, name, value)
    try:
        yield
    finally:
        setattr(_state, name, was)


def no_grad():
    """Record nothing inside `with no_grad():`; what is computed there requires no gradient."""
    return _flag("recording", False)


def is_grad_enabled():
    return _state.recording


def replay():
    """Mark a forward as the repetition of an earlier one, whose backward follows at once."""
    return _flag("replaying", True)


def replaying():
    return _state.replaying


def forget():
    """Mark a forward whose graph is dropped at once: what only its backward needs is not made."""
    return _flag("forgetting", True)


def forgetting():
    return _state.forgetting


def scale_losses(scale):
    """Seed every loss with this inside `with scale_losses(scale):`, instead of with 1.

    Those are the scalar that backward() starts from and the auxiliary losses on the way, also in a
    backward that starts from the gradient of an activation, as on the stages of a pipeline.
    """
    return _flag("loss_scale", float(scale))


def loss_scale():
    """Return what the losses of this backward are seeded with."""
    return _state.loss_scale


# ------------------------------------------------------------------------ propagation

class Sum:
    """A gradient on its way to one target.  owned: nothing else refers to its array."""

    __slots__ = ("array", "owned")

    def __init__(self, array=None, owned=False):
        self.array, self.owned = array, owned

    def add(self, c, owned=False):
        """Add an array or a Part; writes into the sum's own array only."""
        if isinstance(c, Part):
            self._add_part(c)
        elif self.array is None:
            self.array, self.owned = c, owned
        elif self.array.shape != c.shape:
            raise RuntimeError(f"gradients of shapes {self.array.shape} and {c.shape} meet in one "
                               "Tensor")
        elif self.owned:
            self.array += c
        else:
            self.array, self.owned = self.array + c, True

    def _add_part(self, part):
        if self.array is None:
            self.array = np.zeros(part.shape, part.array.dtype)
        elif not self.owned:
            self.array = self.array.copy()
        part.add_into(self.array)
        self.owned = True


def propagate(root, seed, defer=None, finish=None):
    """Run backward from a node: seed is the gradient of its result.

    finish(leaf, sum, thunks, defer): what to do with a leaf's gradient (None: deliver it)."""
    finish = finish or _finish
    with _flag("deferred", defer), _backward_scope(), scale_losses(_scale(seed)):
        order, uses = _order(root)
        sums, thunks = defaultdict(Sum), defaultdict(list)
        sums[root].add(seed)
        for node in order:
            contributions = _run(node, sums.pop(node, None))
            late = None if defer is None else thunks
            for leaf in _hand_on(contributions, sums, uses, late):
                finish(leaf, sums.pop(leaf, None), thunks.pop(leaf, None), defer)


def again(fn, *args):
    """Record fn(*args) as the repetition of an earlier forward; also inside no_grad()."""
    with replay(), _flag("recording", True):
        return fn(*args)


def gradients(root, seed):
    """Run backward from a node and deliver nothing.  -> {leaf: Sum}, for a vjp to hand on"""
    found = {}

    def keep(leaf, total, thunks, defer):
        found[leaf] = total
    propagate(root, seed, finish=keep)
    return {leaf: total for leaf, total in found.items() if total is not None}


def _scale(seed):
    """A scalar that a backward starts from is a loss: all losses of its graph are scaled alike."""
    return seed.item() if seed.ndim == 0 and _state.depth == 1 else _state.loss_scale


def _order(root):
    """Sort the nodes below root newest first, and count the edges to each node and leaf."""
    found, todo, uses = [root], [root], {None: 0}
    while todo:
        node = todo.pop()
        if node.vjp is None:
            raise RuntimeError("an earlier backward() has freed this graph: run forward again")
        for target in node.parents:
            if target not in uses:
                uses[target] = 0
                if isinstance(target, Node):
                    found.append(target)
                    todo.append(target)
            uses[target] += 1
    return sorted(found, key=lambda node: -node.born), uses


def _run(node, total):
    """Run a node's vjp and free the node.  -> (parent, contribution) for all that want one"""
    vjp, parents = node.vjp, node.parents
    node.vjp, node.parents = None, ()
    contributions = (None,) * len(parents)
    if total is not None:
        check_unchanged(vjp, node.born)
        contributions = vjp(total.array)
    if len(contributions) != len(parents):
        raise RuntimeError(f"the backward of {operation(vjp)} returned {len(contributions)} "
                           f"gradients for {len(parents)} parents")
    return [(target, c) for target, c in zip(parents, contributions) if target is not None]


def _hand_on(contributions, sums, uses, thunks):
    """Add what a node gives to each target's sum.  Yields leaves that have all of theirs.

    thunks, where given: put those for leaves off.  The contributions end with this call: none of
    them, nor what their thunks captured, is alive when the next vjp runs.
    """
    while contributions:
        target, c = contributions.pop(0)
        leaf, late = not isinstance(target, Node), callable(c)
        if late and leaf and thunks is not None:
            thunks[target].append(c)
        elif c is not None:
            sums[target].add(c() if late else c, owned=late)
        uses[target] -= 1
        if leaf and uses[target] == 0:
            yield target


def _finish(leaf, total, thunks, defer):
    """Deliver a leaf's gradient, or put it off with the thunks that it still lacks."""
    if thunks:
        defer.append((leaf, total or Sum(), thunks))
    elif total is not None:
        deliver(leaf, total)


def deliver(leaf, total):
    """Add a finished Sum to leaf.grad and run the leaf's hooks."""
    g = total.array
    if leaf.data is not None and (g.shape, g.dtype) != (leaf.shape, leaf.dtype):
        raise RuntimeError(f"gradient {g.dtype}{g.shape} for a leaf {leaf.dtype}{leaf.shape}")
    if leaf.grad is None:
        # Never an alias: g may also be another leaf's gradient, or a view of a live array.
        leaf.grad = np.array(g, order="C", copy=None if total.owned else True)
    else:
        leaf.grad += g
    for hook in tuple(leaf.hooks):
        hook(leaf)


def run_deferred(deferred):
    """Compute and deliver what backward(defer=deferred) put off; empties the list."""
    with _backward_scope():
        while deferred:
            leaf, total, thunks = deferred.pop(0)
            for thunk in thunks:
                total.add(thunk(), owned=True)
            deliver(leaf, total)


@contextmanager
def _backward_scope():
    _state.depth += 1
    try:
        yield
        while _state.depth == 1 and _state.callbacks:
            _state.callbacks.pop(0)()
    finally:
        _state.depth -= 1
        if _state.depth == 0:
            _state.callbacks.clear()


def deferred():
    """Has the backward that is running put off weight gradients, for run_deferred()?"""
    return bool(_state.deferred)


def after_backward(fn):
    """Call fn() once, when the backward that this thread is running has finished."""
    if _state.depth == 0:
        raise RuntimeError("after_backward() outside of a backward: call it from a hook or a vjp")
    _state.callbacks.append(fn)
