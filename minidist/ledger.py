"""Ledger: bytes of parameters, gradients, optimizer state and activations, from real arrays.

    P   parameters        what the model is                 |  the same, whatever the batch
    G   gradients         grows while backward runs         |
    O   optimizer state   two moments for AdamW             |
    A   activations       grows while forward runs, shrinks while backward does; with the batch

Every number is a sum over arrays that are alive now, each buffer counted once; cost predicts them.

Lesson: mpirun -n 4 python -m lessons.memory   (and lessons.step)
"""
from types import SimpleNamespace
from typing import NamedTuple

from minidist.engine.tensor import Node, graph_bytes


class Bytes(NamedTuple):
    """Bytes that one rank holds."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int


def held(model, optimizer=None, *roots, batch=None):
    """Count what is held now.  roots: the Tensors (or nodes) whose graph waits for backward"""
    params = model.parameters()
    state = optimizer.state.values() if optimizer else ()
    return Bytes(sum(p.data.nbytes for p in params),
                 gradient_bytes(model),
                 sum(array.nbytes for arrays in state for array in arrays),
                 graph_bytes(*map(rooted, roots), exclude=known(model, batch)))


def gradient_bytes(model):
    """Count gradients, and what a bucket keeps of those of other ranks (ZeRO, stage 1)."""
    beside = sum((bucket.shape[0] - 1) * p.grad.nbytes for bucket in getattr(model, "buckets", ())
                 for p in bucket.params if bucket.nbytes and p.grad is not None)
    return beside + sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def known(model, batch=None):
    """List what lives whether or not a backward is to come: parameters, and the batch."""
    arrays = () if batch is None else (batch.tokens, batch.targets, batch.rows, batch.positions,
                                       batch.stream)
    return [*model.parameters(), *arrays]


def rooted(x):
    """A node stands for the Tensor it made."""
    return SimpleNamespace(node=x) if isinstance(x, Node) else x


def nodes(x):
    """List the operations under a Tensor, oldest first."""
    found, todo = {x.node}, [x.node]
    while todo:
        fresh = {p for p in todo.pop().parents if isinstance(p, Node)} - found
        found |= fresh
        todo += fresh
    return sorted(found, key=lambda node: node.born)


def operation(node):
    """Name the function that recorded a node."""
    return node.vjp.__qualname__.split(".")[0]


def by_operation(x, exclude=()):
    """List (operation, bytes that it is the first to keep) of everything under x, oldest first."""
    rows, seen, before = [], [], 0
    for node in nodes(x):
        seen.append(rooted(node))
        kept = graph_bytes(*seen, exclude=exclude)
        rows.append((operation(node), kept - before))
        before = kept
    return rows


def over_step(model, batch, optimizer):
    """Take one training step and count after each event.  -> [(phase, Bytes)]

    Events: a part of the model has run; a gradient is complete; the optimizer is done."""
    events, x = [], None
    model.zero_grad()
    for part in model.parts.values():
        x = part(x, batch)
        events.append(("forward", held(model, optimizer, x, batch=batch)))
    graph = nodes(x)

    def note(phase):
        events.append((phase, held(model, optimizer, *graph, batch=batch)))

    hooks = [p.register_post_accumulate_grad_hook(lambda p: note("backward"))
             for p in model.parameters()]
    x.backward()
    for hook in hooks:
        hook.remove()
    optimizer.step(1 / batch.count)
    note("optimizer")
    return events
