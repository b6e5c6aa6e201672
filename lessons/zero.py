"""ZERO      Data parallelism holds everything p times. Who needs whole what, and when?

  lifts   memory      P, G and O are held once over p ranks, instead of p times
  costs   bandwidth   stages 1 and 2 send what data parallelism sends; stage 3 half as much again
  code    minidist/zero.py, minidist/buckets.py, minidist/placement.py (Flat)
  run     mpirun -n 4 python -m lessons.zero       or: python -m lessons.zero -n 4
"""
import numpy as np

from lessons import kit, setting
from minidist import buckets, cost, ledger, step, verify, zero
from minidist.engine import optim
from minidist.mesh import DeviceMesh
from minidist.placement import Flat

EXERCISE = [zero.attach, zero.gather_updated, zero.keep_sum, zero.send_for, zero.free]
ROWS = 7
NUMBERS = np.arange(19.0)                           # divides over neither 2, 3 nor 4 ranks


def pieces(lesson):
    """Piece r of every parameter is mine

    Optimizers such as AdamW treat each element alone: whoever has a piece of P and G needs no more
    than that piece of O. So flatten each parameter, pad it with zeros, cut it into p pieces."""
    flat = Flat(NUMBERS.shape, lesson.comm)
    mine = flat.cut(NUMBERS)
    lesson.rows(["my piece of 19 numbers"], [" ".join(f"{x:g}" for x in mine)])
    lesson.check("joined again, without the padding", kit.difference(flat.join(mine), NUMBERS))
    lesson.say("""
        stage 1  O in pieces   reduce_scatter G, update my piece of P, all_gather P
        stage 2  and G         reduce_scatter each bucket as backward fills it, then free it
        stage 3  and P         all_gather each part before it computes, then free it""")


def what_is_held(lesson):
    """What is held

    With mixed precision a parameter costs 2 bytes, its gradient 2, AdamW 12 (a float32 copy and
    two moments). A model of 7.5 billion parameters on 64 GPUs, as in the ZeRO paper:"""
    lesson.predict("stage 3, on each GPU", 1.875, "GB", why="16 bytes x 7.5e9 / 64",
                   mistakes={16.6: "that is stage 2: parameters are in pieces, too"})
    models = ("7.5B on 64", 7.5e9, 64), ("1B on 64", 1e9, 64), ("GPT-3, 175B on 1024", 175e9, 1024)
    lesson.table(["GB per GPU", "all of it", "stage 1", "stage 2", "stage 3"], [
        [name, *(f"{cost.zero_memory(n, p, stage) / 1e9:,.2f}" for stage in range(4))]
        for name, n, p in models])
    lesson.say("And here, bytes of this rank's arrays between two steps, float64:")
    found = [ledger.classes(*trained(lesson.comm, stage)) for stage in (1, 2, 3)]
    names = "parameters", "gradients", "buckets", "optimizer"
    lesson.table(["stage", *names], [[i, *(f"{held[name]:,}" for name in names)]
                                     for i, held in enumerate(found, 1)])
    lesson.figure(bars, found)


def what_moves(lesson):
    """What moves

    One unit is (p-1)/p of the model. An all_reduce is a reduce_scatter and an all_gather: two
    units. With m micro-batches, stage 1 sums once; stages 2 and 3 have no place for whole sums."""
    lesson.predict("GPT-3 in 16 bits is 350 GB: at stage 3 each of many ranks sends", 1050, "GB",
                   why="2 gathers, 1 sum", mistakes={
                       700: "parameters are gathered again for backward"})
    lesson.predict("stage 2 with four micro-batches", 1750, "GB", why="four sums, one gather",
                   mistakes={700: "each micro-batch's gradients are summed by themselves"})
    D, B, T = 12288, 1, 2048
    lesson.fill(f"""
        A layer of GPT-3 has 12 D^2 = {12 * D * D / 1e9:.1f}e9 numbers, which stage 3 moves three
        times; tensor parallelism moves B T D = {B * T * D / 1e6:.0f}e6 numbers eight times
        (4 all_reduces). Stage 3 wins if B T > 4.5 D.""")


def whole_for_a_moment(lesson):
    """Whole for a moment

    Stage 3, one step: how much is whole beyond my piece. While a part computes, the next one is on
    its way; the peak is two parts, and a bucket beside them, however many layers there are."""
    model, points = timeline(lesson.comm, layers=4)
    shown = [points[i] for i in (0, 1, len(model.parts) - 1)]
    shown += [max(points, key=lambda point: point[1]["buckets"]), points[-1]]
    lesson.table(["point", "P in pieces", "gathered", "buckets", "G", "A"], [
        [name, *(f"{held[c]:,}" for c in ("parameters", "gathered", "buckets", "gradients",
                                          "activations"))] for name, held in shown])


def prove(lesson):
    """Is it the same training, and what does it cost?

    Ragged batches, dropout, clipping, two micro-batches; SGD tells a factor, AdamW a state. Then
    n parameters, padded, in f tensors; w of them are the word table, gathered twice as often."""
    comm, mesh = lesson.comm, DeviceMesh(lesson.comm, dp=lesson.comm.size)
    back = buckets.gather([Flat(NUMBERS.shape, comm).cut(NUMBERS)], [np.empty(19)], comm)[0]
    lesson.check("gather: 19 numbers come home", kit.difference(back, NUMBERS))
    for stage, make in (1, setting.ADAMW), (2, setting.SGD), (3, setting.SGD), (3, setting.ADAMW):
        verdict = verify.train(lambda: setting.shallow(dropout=0.1), make, spread(stage), mesh,
                               [batch_at(t) for t in range(2)], num_microbatches=2,
                               max_norm=0.5, equip=lambda o, m, mesh: zero.attach(o, m))
        lesson.verdict(verdict, f"stage {stage}, {make.func.__name__}")
    held = [point["gathered"] for _, point in timeline(comm)[1]]
    lesson.check("stage 3: two parts whole at most, none between steps",
                 max(0, max(held) - two_parts()) + held[-1])
    cases, p = ((1, 1), (1, 3), (2, 3), (3, 1)), comm.size
    sent = {(stage, m): sends(lesson, stage, m) for stage, m in cases}
    params = setting.shallow().parameters()
    n = sum(p * -(-x.size // p) for x in params)
    words = p * -(-setting.shallow().parameters()[0].size // p)
    lesson.ledger(("stage 1, all ranks", "(p-1) 8 (2n+p f)", None, sent[1, 1]),
                  ("stage 1, m = 3", "(p-1) 8 (2n+p f)", None, sent[1, 3]),
                  ("stage 2, m = 3", "(p-1) 8 (4n+3 p f)", None, sent[2, 3]),
                  ("stage 3", "(p-1) 8 (3n+2w+p f)", None, sent[3, 1]),
                  p=p, n=n, f=len(params), w=words)


@kit.breaks(zero, "gather_updated")
def stale(params, key, comm):
    """Updated pieces are not gathered: other ranks' pieces stay one step behind.

    Every loss falls; ranks compute with different parameters."""


@kit.breaks(zero, "keep_sum")
def last_micro_batch(bucket, row, sums):
    """Only the last micro-batch's pieces are kept.

    With one micro-batch nothing is wrong."""
    sums.update(dict.fromkeys(bucket.columns, 0.0))
    last_micro_batch.original(bucket, row, sums)


@kit.breaks(zero.Stage3, "begin")
def freed_too_early(self, i):
    """A part's parameters are freed before its backward instead of after it.

    What kept the forward's arrays alive would hide it, and the memory would not be free."""
    freed_too_early.original(self, i)
    zero.free(self.units[i], self.pieces)


@kit.breaks(optim.Optimizer, "decay")
def decay_all(self, p):
    """Weight decay pulls at all of a flat piece: its one dimension does not say what it is of."""
    return self.weight_decay if p.sliced or p.placements else decay_all.original(self, p)


@kit.breaks(step, "grad_norm")
def local_norm(params, mesh):
    """The norm is that of my pieces only, so ranks clip by different factors.

    Without clipping nothing is wrong."""
    return float(np.sqrt(optim.square_sum(params)))


@kit.breaks(Flat, "pad")
def no_padding(self, x):
    """The last numbers, where p does not divide, are dropped instead of padded.

    Sizes that divide hide it."""
    rows = np.zeros((self.comm.size, self.size), x.dtype)
    even = x.size // self.comm.size * self.comm.size
    rows.reshape(-1)[:even] = x.reshape(-1)[:even]
    return rows


def bars(figure, found):
    """Stack what a rank holds at each stage."""
    axes, below = figure.subplots(), np.zeros(len(found))
    for name in ("parameters", "gradients", "buckets", "optimizer"):
        part = np.array([held[name] for held in found]) / 1e6
        axes.bar(["stage 1", "stage 2", "stage 3"], part, bottom=below, label=name)
        below += part
    axes.set(ylabel="MB held between steps")
    axes.legend()


def batch_at(t):
    return setting.words(ROWS, t, ragged=True)


def spread(stage):
    return lambda model, mesh: zero.parallelize(model, mesh["dp"], stage)


def trained(comm, stage, layers=2):
    """Take a step.  -> model, optimizer"""
    mesh = DeviceMesh(comm, dp=comm.size)
    model = spread(stage)(setting.model(layers=layers), mesh)
    optimizer = zero.attach(setting.ADAMW(model.parameters()), model)
    step.train_step(model, batch_at(0), optimizer)
    return model, optimizer


def timeline(comm, layers=2):
    """Hold a step of stage 3 to the ledger.  -> model, points"""
    model, optimizer = trained(comm, 3, layers)
    return model, ledger.timeline(model, batch_at(1), optimizer)


def two_parts():
    """Count the bytes of the two largest neighbours among the parts."""
    parts = setting.shallow().parts.values()
    each = [sum(p.data.nbytes for p in part.parameters()) for part in parts]
    return max(a + b for a, b in zip(each, each[1:]))


def sends(lesson, stage, passes):
    """Count what gradients and parameters cost in a step.  -> bytes of all ranks"""
    model, optimizer = trained(lesson.comm, stage)
    with lesson.comm.counting() as counted:
        step.train_step(model, batch_at(1), optimizer, num_microbatches=passes)
    labels = [counted.by_label.get(name) for name in ("reduce_scatter", "all_gather")]
    mine = sum(label.bytes for label in labels if label)
    return int(sum(lesson.collect(mine)))


TAKEAWAY = "Hold once what is needed whole only for a moment; stage 3 pays in half as much again."
FIELD = "DeepSpeed ZeRO, torch FSDP2 fully_shard, Megatron's distributed optimizer"
TRY = ["why may LAMB, whose step needs a norm per layer, not run on pieces?"]
SCREENS = [pieces, what_is_held, what_moves, whole_for_a_moment, prove, last_micro_batch]

if __name__ == "__main__":
    kit.run(SCREENS)
