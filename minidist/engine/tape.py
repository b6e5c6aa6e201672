"""The tape: how gradients travel back through what was computed.

    Tensor   data, grad, node        the user's handle: its data dies when Python drops it
      |
     Node    parents, vjp            what backward needs, and nothing else
     /  \\
   Node  leaf Tensor                 an edge ends in an older Node, or in a leaf itself

A backward walks the nodes newest first (so every rank meets its collectives in the same order),
frees each as it passes, and gives every leaf its gradient once, after its last use.

What a vjp(g) may return for a parent:
    None       no gradient
    an array   which is only read from here on: it may be g itself
    a Part     a gradient for a slice of the parent
    a thunk    a function of nothing that returns a new array and gives it away; called only if it
               is wanted, and, for leaves (weight gradients), later if backward is told to defer it

Price: 5 us per operation, under 1 % of a training step.
Lesson: python -m lessons.step
"""
import functools
import itertools
import threading
import types
from contextlib import contextmanager

import numpy as np
from numpy.lib.array_utils import byte_bounds

_clock = itertools.count(1)              # orders nodes, and changes in place between them


class _State(threading.local):
    """What this rank is doing: ranks may be threads of one process."""

    def __init__(self):
        self.recording, self.replaying = True, False
        self.depth, self.callbacks = 0, []                  # backwards running; what runs after
        self.changes, self.last_change = {}, 0              # (low, high) address -> when written


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


class Node:
    """One recorded operation: where its inputs came from, and how gradients get there."""

    __slots__ = ("born", "parents", "vjp")

    def __init__(self, parents, vjp):
        self.born, self.parents, self.vjp = next(_clock), parents, vjp


class Part:
    """The gradient of parent[index], for a parent of the given shape."""

    __slots__ = ("shape", "index", "array")

    def __init__(self, shape, index, array):
        self.shape, self.index, self.array = shape, index, array

    def add_into(self, whole):
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        if any(isinstance(i, (list, np.ndarray)) for i in index):
            np.add.at(whole, self.index, self.array)        # += would lose repeated positions
        else:
            whole[self.index] += self.array


class _Sums:
    """Gradients on their way: a running sum per target.  Only arrays that are ours are written."""

    def __init__(self):
        self.arrays, self.ours = {}, set()

    def add(self, target, c, ours=False):
        have, writable = self.arrays.get(target), target in self.ours
        if isinstance(c, Part):
            if have is None:
                have = np.zeros(c.shape, c.array.dtype)
            elif not writable:
                have = have.copy()
            c.add_into(have)
        elif have is None:
            have, writable = c, ours
        elif have.shape != c.shape:
            raise RuntimeError(f"gradients of shapes {have.shape} and {c.shape} meet in one Tensor")
        elif writable:
            have += c
        else:
            have = have + c
        self.arrays[target] = have
        if have is not c or writable:
            self.ours.add(target)

    def take(self, target):
        """Remove a finished sum.  -> array or None, is it ours"""
        ours = target in self.ours
        self.ours.discard(target)
        return self.arrays.pop(target, None), ours


def propagate(root, seed, defer=None):
    """Run backward from a node: seed is the gradient of its result."""
    with _backward_scope():
        order, uses = _order(root)
        sums, thunks = _Sums(), {}
        sums.add(root, seed)
        for node in order:
            for leaf in _pass(node, sums, uses, None if defer is None else thunks):
                g, ours = sums.take(leaf)
                if leaf in thunks:
                    defer.append((leaf, g, ours, thunks.pop(leaf)))
                elif g is not None:
                    deliver(leaf, g, ours)


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


def _pass(node, sums, uses, thunks):
    """Hand a node's gradient on to its parents and free the node.  Yields leaves that are done."""
    g, _ = sums.take(node)
    vjp, parents = node.vjp, node.parents
    node.vjp, node.parents = None, ()
    contributions = (None,) * len(parents)
    if g is not None:
        _check_unchanged(vjp, node.born)
        contributions = vjp(g)
    if len(contributions) != len(parents):
        raise RuntimeError(f"the backward of {_operation(vjp)} returned {len(contributions)} "
                           f"gradients for {len(parents)} parents")
    for target, c in zip(parents, contributions):
        if target is None:
            continue
        leaf = not isinstance(target, Node)
        if callable(c) and leaf and thunks is not None:
            thunks.setdefault(target, []).append(c)
        elif c is not None:
            sums.add(target, c() if callable(c) else c, ours=callable(c))
        uses[target] -= 1
        if leaf and uses[target] == 0:
            yield target


def deliver(leaf, g, ours=False):
    """Add a finished gradient to leaf.grad and run the leaf's hooks."""
    if leaf.data is not None and (g.shape, g.dtype) != (leaf.shape, leaf.dtype):
        raise RuntimeError(f"gradient {g.dtype}{g.shape} for a leaf {leaf.dtype}{leaf.shape}")
    if leaf.grad is None:
        # Never an alias: g may also be another leaf's gradient, or a view of a live array.
        leaf.grad = np.array(g, order="C", copy=None if ours else True)
    else:
        leaf.grad += g
    for hook in tuple(leaf.hooks):
        hook(leaf)


def run_deferred(deferred):
    """Compute and deliver what backward(defer=deferred) put off; empties the list."""
    with _backward_scope():
        while deferred:
            leaf, g, ours, thunks = deferred.pop(0)
            sums = _Sums()
            if g is not None:
                sums.add(leaf, g, ours)
            for thunk in thunks:
                sums.add(leaf, thunk(), ours=True)
            deliver(leaf, *sums.take(leaf))


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


def after_backward(fn):
    """Call fn() once, when the backward that this thread is running has finished."""
    if _state.depth == 0:
        raise RuntimeError("after_backward() outside of a backward: call it from a hook or a vjp")
    _state.callbacks.append(fn)


# ------------------------------------------------------------------------ what a graph holds

def _captured(*things):
    """List the arrays that functions keep alive through what they, and theirs, captured."""
    arrays, todo, seen = [], list(things), set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            arrays.append(thing)
        elif isinstance(thing, (tuple, list)):
            todo.extend(thing)
        elif isinstance(thing, dict):
            todo.extend(thing.values())
        elif isinstance(thing, functools.partial):
            todo += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.FunctionType):
            todo += map(_contents, thing.__closure__ or ())
            todo += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        elif isinstance(thing, Part):
            arrays.append(thing.array)
        elif hasattr(thing, "requires_grad"):               # a Tensor, read when the vjp runs
            todo.append(thing.data)
    return arrays


def _contents(cell):
    try:
        return cell.cell_contents
    except ValueError:                                      # a variable that has no value yet
        return None


def graph_bytes(*roots, exclude=()):
    """Count the bytes that the graph of these Tensors keeps for backward, each buffer once.

    exclude: Tensors or arrays that live anyway: the parameters, the batch.
    """
    nodes = {root.node for root in roots} - {None}
    todo, buffers = list(nodes), {}
    while todo:
        node = todo.pop()
        buffers.update((id(b), b.nbytes) for b in map(_buffer, _captured(node.vjp)))
        fresh = {p for p in node.parents if isinstance(p, Node)} - nodes
        nodes |= fresh
        todo += fresh
    for array in _captured(*exclude):
        buffers.pop(id(_buffer(array)), None)
    return sum(buffers.values())


def _buffer(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def mark_changed(array):
    """Note that an array was written in place, now."""
    _state.last_change = _state.changes[byte_bounds(array)] = next(_clock)


def _check_unchanged(vjp, born):
    """Raise if memory that a vjp still needs was written after its forward."""
    if _state.last_change < born:
        return
    recent = [span for span, when in _state.changes.items() if when > born]
    for low, high in map(byte_bounds, _captured(vjp)):
        if any(low < b and a < high for a, b in recent):
            raise RuntimeError(f"an array that the backward of {_operation(vjp)} needs was changed "
                               "in place after its forward, as by an optimizer step in between")


def _operation(vjp):
    """Name the function in which a vjp was written."""
    return getattr(vjp, "__qualname__", repr(vjp)).split(".<locals>")[0]
