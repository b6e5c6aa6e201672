"""One training step, on one process or on a mesh: nothing here asks which.

    my piece of the batch -> for each micro-batch: forward -> loss sum -> backward, seeded with 1
    then, once:  sums over ranks -> / number of target tokens -> norm -> optimizer

Losses and gradients stay sums until every token of the batch is in; the count comes from the data.
A mean per micro-batch, or per rank, would weigh a token by how few others share its piece.  So the
step is the same number however the tokens are dealt: to ranks, to micro-batches, evenly or not.

Lesson: python -m lessons.step
"""
from contextlib import nullcontext
from dataclasses import dataclass

from minidist.engine.optim import clip_scale
from minidist.mesh import DeviceMesh
from minidist.placement import finalize, grad_norm, total
from minidist.ranks.comm import solo

TOKENS = "dp", "cp"                                     # the axes that share out the tokens


@dataclass(frozen=True)
class Step:
    """Report one step: mean loss per target, number of targets, gradient norm before clipping."""
    loss: float
    count: int
    norm: float


def train_step(model, batch, optimizer, mesh=None, num_microbatches=1, max_norm=None):
    """Train on one global batch, each rank on its share, in num_microbatches pieces.

    A batch without targets changes nothing.
    Collective: every rank calls, with the whole batch, and gets the same Step."""
    mesh = mesh or DeviceMesh(solo())
    params = model.parameters()
    model.zero_grad()
    mine = model.localize(batch)
    loss = accumulate(model, mine.split(num_microbatches))
    loss, count = total([loss, mine.count], mesh, TOKENS)
    if count == 0:
        model.zero_grad()
        return Step(0.0, 0, 0.0)
    finalize(params, mesh, count)
    norm = grad_norm(params, mesh)
    optimizer.step(clip_scale(norm, max_norm))
    return Step(loss / count, int(count), norm)


def accumulate(model, batches):
    """Add up loss and gradients over micro-batches; only the last backward may communicate."""
    no_sync = getattr(model, "no_sync", nullcontext)    # DistributedDataParallel's, or nothing
    loss = 0.0
    for i, batch in enumerate(batches):
        with nullcontext() if i == len(batches) - 1 else no_sync():
            out = model(batch)
            out.backward()
        loss += out.item()
    return loss
