"""The graph: what backward needs of what was computed, and what keeps it true until then.

    Tensor   data, grad, node        the user's handle: its data dies when Python drops it
      |
     Node    parents, vjp            what backward needs, and nothing else
     /  \\
   Node  leaf Tensor                 an edge ends in an older Node, or in a leaf itself

A vjp keeps arrays alive through what it captured.  Two questions are answered by looking there:
how many bytes does a graph hold, and has one of them been written in place since its forward?

Lesson: mpirun -n 4 python -m lessons.memory
"""
import functools
import itertools
import threading
import types
import weakref

import numpy as np
from numpy.lib.array_utils import byte_bounds

_clock = itertools.count(1)              # orders nodes, and changes in place between them


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
        if all(map(basic, index)):
            whole[self.index] += self.array
        else:
            np.add.at(whole, self.index, self.array)        # += would lose repeated positions


def basic(i):
    """Is this part of an index a plain one, which meets each position at most once?"""
    return (isinstance(i, (int, np.integer, slice, type(None), type(Ellipsis)))
            and not isinstance(i, bool))


def fixed(i):
    """Copy what may change of a part of an index: arrays, lists, Tensors of positions or flags."""
    if basic(i) or isinstance(i, bool):
        return i
    array = np.array(getattr(i, "data", i) if hasattr(i, "requires_grad") else i)
    return array if array.size or isinstance(i, np.ndarray) else array.astype(int)


def operation(vjp):
    """Name the function in which a vjp was written."""
    return getattr(vjp, "__qualname__", repr(vjp)).split(".<locals>")[0]


# ------------------------------------------------------------------------ what it holds

def captured(*things):
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


def buffer(array):
    """Find the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def graph_bytes(*roots, exclude=()):
    """Count the bytes that the graph of these Tensors keeps for backward, each buffer once.

    exclude: Tensors or arrays that live anyway: the parameters, the batch.
    """
    nodes = {root.node for root in roots} - {None}
    todo, buffers = list(nodes), {}
    while todo:
        node = todo.pop()
        buffers.update((id(b), b.nbytes) for b in map(buffer, captured(node.vjp)))
        fresh = {p for p in node.parents if isinstance(p, Node)} - nodes
        nodes |= fresh
        todo += fresh
    for array in captured(*exclude):
        buffers.pop(id(buffer(array)), None)
    return sum(buffers.values())


# ------------------------------------------------------------------------ what was changed in place

class _Changes(threading.local):
    """Where this thread has written in place, and when, as long as that memory lives."""

    def __init__(self):
        self.last = 0
        self.when = {}                                      # (low, high) address -> time
        self.owners = {}                                    # id(buffer) -> weak ref, its addresses
        self.dead = []                                      # ids of buffers that have died since

    def forget(self):
        """Drop the entries of buffers that have died: their addresses will be given out again."""
        while self.dead:
            for span in self.owners.pop(self.dead.pop())[1]:
                self.when.pop(span, None)


_changes = _Changes()


def mark_changed(array):
    """Note that an array was written in place, now."""
    _changes.forget()
    owner, span = buffer(array), byte_bounds(array)
    if id(owner) not in _changes.owners:
        # A buffer may die in the middle of anything, also in another thread: only note it there.
        died = functools.partial(_note, _changes.dead, id(owner))
        _changes.owners[id(owner)] = weakref.ref(owner, died), set()
    _changes.owners[id(owner)][1].add(span)
    _changes.last = _changes.when[span] = next(_clock)


def _note(dead, key, _):
    dead.append(key)


def check_unchanged(vjp, born):
    """Raise if memory that a vjp still needs was written after its forward."""
    if _changes.last < born:
        return
    _changes.forget()
    recent = [span for span, when in _changes.when.items() if when > born]
    for low, high in map(byte_bounds, captured(vjp)):
        if any(low < b and a < high for a, b in recent):
            raise RuntimeError(f"an array that the backward of {operation(vjp)} needs was changed "
                               "in place after its forward, as by an optimizer step in between")
