"""Recomputation: keep the input of a piece of the model, and run its forward again in backward.

    activations held   |        .                 Without: forward piles up what L blocks keep.
                       |      .   .
                       |    .       .             With:    forward keeps one input per segment.
                       |  .    /|  /|  .                   Backward builds one segment up again
                       |. ____/ |_/ |_/|___                at a time, and takes it down: a saw.
                        forward   backward

    blocks       every block is a segment: L inputs, and one block at a time
    sqrt         ceil(sqrt(L)) blocks to a segment: about sqrt(L) inputs, and sqrt(L) blocks
    attention    the core of attention alone: its T x T weights are large, and cheap to make

`checkpoint` works on any function of Tensors.  Its first run finds out which parameters the
function uses, and drops the graph; its vjp runs the function once more and hands on what a backward
through that gives.  So a parameter's gradient is delivered once per backward, as ever, and what
reacts to gradients (buckets, ZeRO, pipeline stages) sees no difference.  Collectives in the
function run a second time, in the same order on all ranks.

Why the numbers are the same bit for bit: the same arithmetic on the same input, and a dropout mask
is a function of (seed, name, step, position).  What draws from a generator names it: rng.

Price: one more forward of what is recomputed (at most 4/3 of the step's products), and what that
sends.  See cost.recomputed_flops, cost.recomputed_activations.
Lesson: mpirun -n 4 python -m lessons.recompute
Paper:  Chen et al. 2016, "Training deep nets with sublinear memory cost"; Korthikanti et al. 2022,
        "Reducing activation recomputation in large transformer models" (selective)
"""
import math
from contextlib import contextmanager
from functools import partial

from minidist import BadInput
from minidist.engine.graph import Node
from minidist.engine.nn import Module
from minidist.engine.tape import again, forget, gradients
from minidist.engine.tensor import Tensor

WHAT = "blocks", "sqrt", "attention"


def checkpoint(fn, *args, rng=None):
    """Return fn(*args), a Tensor; keep its arguments, and compute it again in backward.

    fn: computes the same from the same, writes nothing, and gets every Tensor that requires a
    gradient, parameters aside, as an argument.  It may checkpoint parts of itself.
    rng: a NumPy generator that it draws from; the repetition draws the same numbers."""
    began, state = Node((), None).born, rng and rng.bit_generator.state
    inputs = [cut_off(arg) for arg in args]
    with forget():
        y = fn(*inputs)
    if y.node is None:                                      # a constant, or an argument as it is
        return next((arg for arg, x in zip(args, inputs) if x is y), y)
    leaves = used(y.node, began)
    origin = {x: arg for x, arg in zip(inputs, args) if isinstance(x, Tensor)}
    parents = [origin.get(leaf, leaf) for leaf in leaves]

    def vjp(g):
        with rewound(rng, state):
            root = again(fn, *inputs).node
        sums = gradients(root, g)
        return [sums.get(leaf) and handed_on(sums[leaf], leaf in origin) for leaf in leaves]

    return Tensor(y.data, parents, vjp)


def cut_off(arg):
    """Make a leaf of an activation, with the same data; anything else stays as it is."""
    inside = isinstance(arg, Tensor) and arg.node is not None
    return Tensor(arg.data, requires_grad=True) if inside else arg


def used(root, began):
    """List the leaves under a node, those whose gradients are complete first at the front."""
    found, todo = {root}, [root]
    while todo:
        fresh = {p for p in todo.pop().parents if isinstance(p, Node)} - found
        found |= fresh
        todo += fresh
    nodes = sorted(found, key=lambda node: -node.born)
    if nodes[-1].born < began:
        raise ValueError("a checkpointed function uses a Tensor that was computed before it and "
                         "requires a gradient; pass it as an argument")
    edges = [p for node in nodes for p in node.parents if p is not None and p not in found]
    return list(dict.fromkeys(edges))


def handed_on(total, argument):
    """Give the tape a gradient: of an argument at once, of a weight as a thunk, to keep as it is.

    Thunks for leaves may be put off, and the stage before waits for the gradient of an argument."""
    if argument:
        return total.array
    return lambda: total.array if total.owned else total.array.copy()


@contextmanager
def rewound(rng, state):
    """Let a generator repeat what it drew from a state on, and then go on where it was."""
    if rng is None:
        yield
        return
    now, rng.bit_generator.state = rng.bit_generator.state, state
    try:
        yield
    finally:
        rng.bit_generator.state = now


# ------------------------------------------------------------------------ in a GPT

class Segment(Module):
    """Run several blocks, one after the other.  [B, T, D] -> same"""

    def __init__(self, blocks):
        self.blocks = blocks

    def forward(self, x, batch):
        for block in self.blocks:
            x = block(x, batch)
        return x


def parallelize(model, what="blocks"):
    """Compute again in backward: every block, segments of blocks, or the core of attention."""
    if what not in WHAT:
        raise BadInput(f"there is no --recompute {what}; use one of {', '.join(WHAT)}")
    if what == "attention":
        return selective(model)
    return segments(model, 1 if what == "blocks" else math.ceil(math.sqrt(len(model.blocks))))


def segments(model, every):
    """Keep only the input of every so many blocks; compute what is between again."""
    if every < 1:
        raise BadInput(f"segments of {every} blocks; use 1 or more")
    if every > 1 and hasattr(model, "pipeline"):
        raise BadInput(f"segments of {every} blocks would join parts that a pipeline's schedule "
                       "knows one by one; use --recompute blocks")
    names = [name for name in model.parts if name.startswith("blocks.")]
    for some in (names[i:i + every] for i in range(0, len(names), every)):
        if every > 1:
            join(model, some)
        model.parts[some[0]].wrap(checkpoint)
    return model


def join(model, names):
    """Make one part of several, under the name and in the place of the first."""
    segment = Segment([model.parts[name] for name in names])
    parts = {name: segment if name == names[0] else part for name, part in model.parts.items()}
    model.parts = {name: part for name, part in parts.items() if name not in names[1:]}


def selective(model):
    """Compute only the core of attention again: softmax(q k^T) v, from q, k and v."""
    for block in model.blocks:
        block.attn.core = partial(core, block.attn.core)
    return model


def core(attend, q, k, v, batch, attn, **options):
    """Stand in for an attention's core."""
    def run(q, k, v):
        return attend(q, k, v, batch, attn, **options)
    return checkpoint(run, q, k, v)
