"""One training step, on one process or on a mesh: nothing here asks which.

    my piece of the batch -> for each micro-batch: forward -> loss sum -> backward, seeded with 1
    then, once:  sums over ranks -> / number of target tokens -> norm -> optimizer

Losses and gradients stay sums until every token of the batch is in; the count comes from the data.
If every micro-batch, or rank, took its own mean, a token in a short piece would count more than one
in a long piece.  So the step is the same number however the tokens are dealt: to ranks, to
micro-batches, evenly or not.

Lesson: python -m lessons.step
"""
import math
from contextlib import nullcontext
from dataclasses import dataclass

from minidist import precision
from minidist.engine.optim import clip_scale
from minidist.mesh import AXES, mesh_of
from minidist.placement import finalize, grad_norm, total

STAGES = [axis for axis in AXES if AXES[axis].stages]
PARTS = [axis for axis in AXES if AXES[axis].tokens or AXES[axis].stages]    # of the loss


@dataclass(frozen=True)
class Step:
    """Report one step: mean loss per target, number of targets, gradient norm before clipping.

    scale: what losses were multiplied by.  norm inf: the step was skipped, see precision.update."""
    loss: float
    count: int
    norm: float
    scale: float = 1.0

    @property
    def skipped(self):
        return math.isinf(self.norm)


def train_step(model, batch, optimizer, mesh=None, num_microbatches=1, max_norm=None,
               passes=None):
    """Train on one global batch, each rank on its share, in num_microbatches pieces.

    mesh: the model's own if it is spread over one.  A batch without targets changes nothing.
    passes(model, micro-batches) -> loss sum: how the forward and backward passes are run
    (None: as the model says, a pipeline by a schedule; else one by one).
    Collective: every rank calls, with the whole batch, and gets the same Step.
    Raises FloatingPointError, before anything is updated, if a gradient is infinite or NaN; with a
    loss scale the step is skipped instead."""
    mesh, scale = mesh_of(model, mesh), getattr(optimizer, "loss_scale", None)
    params = model.parameters()
    model.zero_grad()
    mine = model.localize(batch)
    with precision.scaled(scale), summing(model, num_microbatches):
        passes = passes or getattr(model, "passes", accumulate)
        loss = passes(model, mine.split(num_microbatches))
    loss, count = summed(loss, mine.count, mesh)
    if count == 0:
        model.zero_grad()
        return Step(0.0, 0, 0.0)
    finish = update if scale is None else precision.update
    norm = finish(optimizer, params, mesh, count, max_norm)
    step = Step(loss / count, count, norm, scale.value if scale else 1.0)
    if step.skipped:
        model.zero_grad()
    else:
        for hook in getattr(model, "after_step", ()):
            hook()
    return step


def update(optimizer, params, mesh, count, max_norm):
    """Update from sums of gradients.  -> norm of the mean gradient, before clipping

    Collective.  Raises FloatingPointError, on all ranks alike, if the norm is not finite."""
    finalize(params, mesh, count)
    norm = grad_norm(params, mesh)
    if not math.isfinite(norm):
        raise FloatingPointError(f"the norm of the gradients is {norm}: no step was taken, nothing "
                                 "has changed")
    optimizer.step(clip_scale(norm, max_norm))
    return norm


def accumulate(model, batches):
    """Run forward and backward on each micro-batch; losses and gradients add up.  -> loss"""
    loss = 0.0
    for batch in batches:
        out = model(batch)
        out.backward()
        loss += out.item()
    return loss


def summing(model, passes):
    """Make the context in which so many backward passes are summed: a strategy's, or none.

    A model may say itself how often they deliver each gradient: deliveries(passes) -> {name: n}"""
    often = getattr(model, "deliveries", lambda passes: passes)(passes)
    return getattr(model, "summing", nullcontext)(often)


def summed(loss, count, mesh):
    """Add up loss and targets over all ranks that have a share.  -> loss, count

    Only the last stage of a pipeline has a loss; every stage has the targets, and one counts."""
    counts = count if all(mesh.coords[axis] == 0 for axis in STAGES) else 0
    loss, count = total([loss, counts], mesh, PARTS)
    return loss, int(count)
