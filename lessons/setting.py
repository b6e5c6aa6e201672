"""What lessons share: one small GPT, its text, batches, meshes, and its twin in one process.

Everything is float64 and from fixed seeds, so every rank of every run makes the same.
"""
from functools import cache, partial

import numpy as np

from minidist import cost, dp, sp, step, tp, verify
from minidist.collectives import chosen
from minidist.engine import optim
from minidist.engine.data import Corpus, default_text, random_batch
from minidist.engine.gpt import GPT, preset
from minidist.mesh import DeviceMesh

VOCAB, CONTEXT = 29, 16
SGD = partial(optim.SGD, lr=0.1)
ADAMW = partial(optim.AdamW, lr=3e-3, eps=verify.ADAMW_EPS)


@cache
def corpus(context=CONTEXT):
    return Corpus(default_text()[:20000], context)


def model(vocab=VOCAB, seed=0, dtype=np.float64, **changes):
    """A small GPT for random words: 4 layers, 12 heads, D = 48, T = 16."""
    return GPT(preset("lesson", vocab, **changes), seed, dtype)


def shallow(**changes):
    """The same with two layers, where two show what four would."""
    return model(layers=2, **changes)


def reader(context=CONTEXT, dropout=0.1, layers=2):
    """The same for real text, with dropout; its vocabulary rarely divides over the ranks."""
    return model(corpus(context).vocab, context=context, dropout=dropout, layers=layers)


def words(rows, step=0, ragged=False, seed=0, vocab=VOCAB):
    """A batch of random words; ragged: some rows have fewer targets."""
    return random_batch(vocab, CONTEXT, rows, seed, step, ragged)


def text(rows, step=0, context=CONTEXT):
    """A batch of real text."""
    return corpus(context).batch(rows, seed=0, step=step)


def mesh(comm, axis):
    """All ranks along one axis."""
    return DeviceMesh(comm, **{axis: comm.size})


def cut(model, mesh, way):
    """Spread a plain model over a mesh.  way: dp, tp, or tp with sp: "again" or "keep" """
    if way in ("dp", "tp"):
        return {"dp": dp, "tp": tp}[way].parallelize(model, mesh[way])
    if way:
        tp.parallelize(model, mesh["tp"], sp.enter, sp.leave)
        sp.parallelize(model, mesh["tp"], keep_input=way == "keep")
    return model


def numbers(n, rank):
    """Some whole numbers, others on every rank: their sums are the same in any order."""
    return np.random.default_rng([n, rank]).integers(-99, 100, n).astype(float)


def group(p, r=0):
    """p ranks as cost sees them, with the algorithms that are chosen by size."""
    return cost.Group(p, r, chosen)


def letters(sizes, names="NBTDHKeLV", **others):
    """What a ledger's formulas call the sizes of the model."""
    return {name: getattr(sizes, name) for name in names} | others


def losses(model, batches, make, mesh=None):
    """Train, and return the loss before every step."""
    optimizer = make(model.parameters())
    return [step.train_step(model, batch, optimizer, mesh).loss for batch in batches]


def fields(verdict):
    """A verdict as data, as it goes from rank to rank."""
    return dict(equal=bool(verdict.equal), worst=float(verdict.worst), bound=verdict.bound,
                text=verdict.line())


def same_training(lesson, plain, spread, mesh, batches, make=SGD, name="the same training"):
    """Show the losses of one process and of the ranks; then compare everything, step by step."""
    alone = lesson.share(lambda: losses(plain(), batches, make))
    ours = losses(spread(plain(), mesh), batches, make, mesh)
    last, p = len(batches) - 1, lesson.comm.size
    lesson.table(["step", "one process", "1 rank" if p == 1 else f"{p} ranks"],
                 [(t, f"{alone[t]:.6f}", f"{ours[t]:.6f}") for t in (0, last)])
    lesson.verdict(verify.train(plain, make, spread, mesh, batches), name)
