"""Ledger: bytes of parameters, gradients, optimizer state and activations, from real arrays.

    P   parameters        what the model is                 |  the same, whatever the batch
    G   gradients         grows while backward runs         |
    O   optimizer state   two moments for AdamW; masters    |
    A   activations       grows while forward runs, shrinks while backward does; with the batch

Every number is a sum over arrays that are alive now, each buffer counted once; cost predicts them.
What an Offload has moved elsewhere is not held; its two buffers are.

Lesson: mpirun -n 4 python -m lessons.memory   (and lessons.step)
"""
import mmap
import os
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from minidist import BadInput, cost
from minidist.engine.graph import buffer
from minidist.engine.tensor import Node, graph_bytes
from minidist.step import train_step


class Bytes(NamedTuple):
    """Bytes that one rank holds."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int


def held(model, optimizer=None, *roots, batch=None):
    """Count what is held now.  roots: the Tensors (or nodes) whose graph waits for backward"""
    params = model.parameters()
    state = here(optimizer) if optimizer else ()
    return Bytes(sum(p.data.nbytes for p in params if not elsewhere(p.data)),
                 gradient_bytes(model),
                 sum(array.nbytes for arrays in state for array in arrays),
                 graph_bytes(*map(rooted, roots), exclude=known(model, batch)))


def refuse_too_large(sizes, batch):
    """Refuse what cannot fit, whatever else is held: parameters, tokens, and one layer's numbers.

    sizes: of a micro-batch on one rank.  A rank makes the whole model before it is cut"""
    needed = sizes.w * (cost.gpt_parameters(sizes) + sizes.N * sizes.D) + 16 * batch * sizes.T
    if needed > memory():
        raise BadInput(f"a model of width {sizes.D} and {sizes.L} layers and a batch of {batch} "
                       f"take over {needed / 1e9:,.0f} GB, and this machine has "
                       f"{memory() / 1e9:,.0f}; use a smaller --width, --layers or --batch")


def memory():
    """Bytes of this machine's memory; infinite where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return float("inf")


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


def classes(model, optimizer, *roots, batch=None):
    """Count what is held now, by class, whatever strategy holds it.  -> {class: bytes}

    gathered: parameters beyond this rank's pieces, whole or on their way (ZeRO, stage 3).
    buckets: buffers from which gradients are sent; at stage 1 my piece lies in one of them."""
    pieces, params = getattr(model, "pieces", {}), model.parameters()
    own = [pieces.get(p.name, p.data) for p in params]
    whole = [p.data for p in params if p.data is not pieces.get(p.name, p.data)]
    whole += [x for works in getattr(model, "whole", {}).values() for _, on, _ in works for x in on]
    sums = [*getattr(model, "sums", {}).values(), *(p.grad for p in params if p.grad is not None)]
    inside = [x for x in sums if any(bucket.nbytes and np.may_share_memory(x, bucket.flat)
                                     for bucket in getattr(model, "buckets", ()))]
    return {"parameters": nbytes(own), "gathered": nbytes(whole),
            "gradients": nbytes(sums) - nbytes(inside),
            "buckets": sum(bucket.nbytes for bucket in getattr(model, "buckets", ())),
            "optimizer": nbytes(x for arrays in here(optimizer) for x in arrays),
            "activations": graph_bytes(*map(rooted, roots), exclude=known(model, batch))}


def nbytes(arrays):
    """Add up the bytes of arrays, each once; nothing for those that lie elsewhere."""
    return sum({id(x): x.nbytes for x in arrays if not elsewhere(x)}.values())


def elsewhere(array):
    """Does an array look into a tier of minidist.offload, rather than into this rank's memory?"""
    return isinstance(getattr(buffer(array).base, "obj", None), mmap.mmap)


def here(optimizer):
    """List the arrays of an optimizer's state that are here; the chunks that pass by, too."""
    state = [[x for x in arrays if not elsewhere(x)] for arrays in optimizer.state.values()]
    state += [list(optimizer.masters.values())]
    offload = getattr(optimizer, "offload", None)
    return [*state, [offload.buffers]] if offload else state


def timeline(model, batch, optimizer, **options):
    """Take one training step and count by class at named points.  -> [(point, {class: bytes})]

    Points: a part has run and is still whole; a gradient is complete; the step is done.  options:
    see train_step.  Collective"""
    points, graph = [], []

    def note(point):
        points.append((point, classes(model, optimizer, *graph, batch=batch)))

    def around(name, forward, *args):
        y = forward(*args)
        graph.extend(nodes(y) if y.node else ())
        note(f"forward {name}")
        return y

    with watched(model, around, lambda p: note(f"backward {p.name}")):
        train_step(model, batch, optimizer, **options)
    graph.clear()
    note("step")
    return points


@contextmanager
def watched(model, around, hook):
    """Put around(name, forward, ...) into each part, innermost, and hook(p) first on each leaf."""
    wrappers = {name: partial(around, name) for name in model.parts}
    for name, wrapper in wrappers.items():                  # innermost: before a part is freed
        model.parts[name].__dict__.setdefault("wrappers", []).insert(0, wrapper)
    params = model.parameters()
    for p in params:
        p.hooks.insert(0, hook)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            model.parts[name].wrappers.remove(wrapper)
        for p in params:
            p.hooks.remove(hook)
