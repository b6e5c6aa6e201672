"""ZeRO: data parallelism in which parameters, gradients and optimizer state are held once.

Under plain data parallelism p ranks hold the same P, G and O, p times.  Here rank r is
responsible for piece r of every parameter, flattened, padded and cut into p equal pieces:

                  parameters P      gradients G        optimizer state O     sent per step
    stage 1       whole             whole              my piece              2 units
    stage 2       whole             my piece           my piece              m + 1 units
    stage 3       my piece          my piece           my piece              3 m units

    one unit = (p-1)/p of the model, in bytes; m = number of micro-batches

    stage 1   backward: reduce_scatter the sum of all micro-batches -> my piece of G
              step:     update my piece of P -> all_gather P
    stage 2   each micro-batch: reduce_scatter, add to my piece of G; its buckets are given back
    stage 3   each part of the model is gathered before its forward, and before its backward,
              and freed after; the next one is on its way while this one computes:

              forward    |gather 0|     0     |     1     |     2     |
              wire                [ gather 1 ][ gather 2 ]
              backward                |     2     |     1     |     0     |
              wire            [gather 2][gather 1][sum 2, gather 0][sum 1 ]  [sum 0]

Never all_reduce + all_gather: 3 units instead of 2, since an all_reduce gathers gradients, too.
Price and what is held: see cost.zero.  Gain: memory, and the optimizer's time.
Lesson: mpirun -n 4 python -m lessons.zero
Paper:  Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
        models"; Zhao et al. 2023, "PyTorch FSDP" (stage 3's prefetching and rate limit)
"""
import math
from contextlib import contextmanager
from functools import partial

import numpy as np

from minidist import BadInput, buckets
from minidist.dp import prepare
from minidist.engine.tape import replaying
from minidist.engine.tensor import Tensor
from minidist.mesh import key_of
from minidist.placement import Flat, cut

IN_FLIGHT = 2                   # buckets on their way at the same time: each one costs memory


def parallelize(model, comm, stage=1, **options):
    """Share the rows of every batch over comm, and hold once what `stage` says.  Collective

    The model is called, and asked for parameters, as before; attach(optimizer, model) lets an
    optimizer write pieces.  options: bucket_bytes and first_bucket_bytes, of stages 1 and 2."""
    if stage not in STAGES:
        raise BadInput(f"ZeRO has no stage {stage}; use 1 (optimizer state), 2 (and gradients) or "
                       "3 (and parameters)")
    return STAGES[stage](model, comm, **options)


def attach(optimizer, model):
    """Let the optimizer write my piece of every parameter, and then gather what is held whole.

    Only for optimizers that treat each element alone: SGD and AdamW do."""
    def target(p):
        flat = p.sliced.get(model.key)
        if flat is None:                                    # stage 3: data is my piece already
            return p.data, p.grad
        piece = p.data.reshape(-1)[flat.mine]
        return piece, None if p.grad is None else p.grad[:piece.size]

    optimizer.target = target
    optimizer.after_step.append(model.gather_all)
    return optimizer


# ------------------------------------------------------------------ stage 1: optimizer state

def gather_updated(params, key, comm):
    """Gather parameters of which every rank has written its own piece, in one message."""
    mine = [p.data.reshape(-1)[p.sliced[key].mine] for p in params]
    buckets.gather(mine, [p.data for p in params], comm)
    for p in params:
        p.changed()


class Stage1(buckets.Reducer):
    """Sum gradients in buckets during the last backward of a step; p.grad is my piece then."""

    def __init__(self, model, comm, bucket_bytes=buckets.CAP, first_bucket_bytes=buckets.FIRST):
        held = prepare(model, comm)
        self.comm, self.key = comm, key_of(comm)
        for p in held:
            p.data = np.ascontiguousarray(p.data)           # the optimizer writes through a view
        super().__init__(model, comm, [p for p in reversed(held) if p.requires_grad],
                         bucket_bytes, first_bucket_bytes, comm.size, self.groups(model, held))
        self.lay(held)

    def groups(self, model, held):
        """Which parameters may share a bucket: all."""

    def lay(self, held):
        """Say that optimizer state and finished gradient of what is trained lie in pieces."""
        for p in self.params:
            p.sliced[self.key] = Flat(p.shape, self.comm)

    def collect(self, bucket, mine):
        """Leave my piece where it was among the whole gradients: nothing is held beside them."""
        bucket.rows[self.comm.rank] = mine[0]
        bucket.hand_out(bucket.rows[self.comm.rank])

    def gather_all(self):
        """Gather all that was trained, once my pieces are written: one message per bucket."""
        for bucket in self.buckets:
            gather_updated(bucket.params, self.key, self.comm)


# ------------------------------------------------------------------ stage 2: and gradients

def keep_sum(bucket, row, sums):
    """Add row, my piece of a bucket's sum, to sums[name] of earlier passes; free the buffer."""
    bucket.hand_out(row)
    bucket.free()
    for p in bucket.params:
        if p.grad is not None:
            sums[p.name] = sums[p.name] + p.grad if p.name in sums else p.grad
        p.grad = None


class Stage2(Stage1):
    """Sum every backward by itself, and add up my pieces; whole gradients live for a moment."""

    several = False                                         # inside of summing()

    @contextmanager
    def summing(self, passes):
        """Add up the pieces of all backward passes in here; p.grad is their sum at the end."""
        self.drop()
        self.sums, self.several = {}, True
        try:
            yield
        finally:
            self.several = False
        self.hand_out()

    def open(self, passes=1):
        if not self.several:
            self.sums = {}
        super().open(passes)

    def refuse_changes(self):
        super().refuse_changes()
        for p in self.params:
            if p.grad is not None:
                raise RuntimeError(f"{p.name} still holds its piece of the last sum, to which a "
                                   "whole gradient cannot be added: zero_grad() first, or run all "
                                   "passes of a step inside `with model.summing(passes):`")

    def drop(self):
        super().drop()
        for bucket in self.buckets:
            bucket.free()

    def launch(self):
        """Send off the next bucket; wait for an earlier one if too many are on their way."""
        super().launch()
        late = len(self.works) - 1 - IN_FLIGHT
        if late >= 0:
            work, self.works[late] = self.works[late], None
            self.collect(self.buckets[late], work.wait())

    def collect(self, bucket, mine):
        """Keep my piece of the sum, and nothing else."""
        keep_sum(bucket, mine[0], self.sums)

    def finish(self):
        super().finish()
        if not self.several:
            self.hand_out()

    def hand_out(self):
        """Give every parameter my piece of its gradient; None if no rank had one."""
        for p in self.params:
            p.grad = self.sums.pop(p.name, None)


# ------------------------------------------------------------------ stage 3: and parameters

def send_for(params, pieces, key, stream):
    """Gather in the background, one message for each dtype.  -> [(parameters, wholes, work)]"""
    sent = []
    for dtype in sorted({p.dtype for p in params}, key=str):
        members = [p for p in params if p.dtype == dtype]
        mine = [pieces[p.name] for p in members]
        wholes = [np.empty(p.placements[key].shape, dtype) for p in members]
        sent.append((members, wholes, stream.submit(buckets.gather, mine, wholes)))
    return sent


def marked(x, then, i):
    """Call then(i) when backward comes to x."""
    return Tensor(x.data, (x,), lambda g: then(i) or (g,))


def free(params, pieces):
    """Hold my pieces of these parameters only."""
    for p in params:
        p.data = pieces[p.name]


class Stage3(Stage2):
    """Hold pieces of parameters, too; a part of the model is whole while it computes.

    At most two parts are whole at a time: the one that computes, and the next one on its way.
    A tied parameter is gathered by each part that uses it; the first one sums its gradient.

    All ranks submit gathers and sums in one order, by the parts and not by when gradients come:
    gather i, gather i-1, sum i, gather i-2, ...  A rank whose backward leaves a part out makes up
    for it (catch_up)."""

    def __init__(self, model, comm):
        super().__init__(model, comm, math.inf, math.inf)

    def groups(self, model, held):
        """Make one unit of each part of the model, and one bucket of what a unit is first to use.

        Dtypes do not mix in a message: a unit may have several of both."""
        parts = list(getattr(model, "parts", {"model": model}).values())
        self.units = [[p for p in part.parameters() if p in set(held)] for part in parts]
        self.whole, self.pieces, self.below = {}, {}, -1
        owner = {p: i for i, unit in reversed(list(enumerate(self.units))) for p in unit}
        if lost := [p.name for p in held if p not in owner]:
            raise BadInput(f"{lost[0]} is in no part of the model, so no part would gather it; put "
                           "it into one of model.parts, or use stage 2")
        for i, part in enumerate(parts):
            part.wrap(partial(self.around, i))
        self.owned = [[p for p in reversed(unit) if p.requires_grad and owner[p] == i]
                      for i, unit in enumerate(self.units)]
        return [own for own in reversed(self.owned) if own]

    def lay(self, held):
        """Keep my piece of every parameter, frozen ones too."""
        for p in held:
            cut(p, self.key, Flat(p.shape, self.comm))
            self.pieces[p.name] = p.data
        self.sources = self.pieces                          # what gathers read; see offload

    def gather_all(self):
        """Gather nothing after a step: each part will, before it computes."""

    def ask(self, i):
        """Send for part i, in the background."""
        if 0 <= i < len(self.units) and i not in self.whole:
            self.whole[i] = send_for(self.units[i], self.sources, self.key, self.stream)

    def need(self, i):
        """Make part i whole."""
        self.ask(i)
        for members, wholes, work in self.whole[i]:
            work.wait()
            for p, whole in zip(members, wholes):
                p.data = whole
        self.whole[i] = []

    def free(self, i):
        """Keep my pieces of part i only; what another part shares with it stays whole."""
        del self.whole[i]
        shared = {p for other in self.whole for p in self.units[other]}
        free([p for p in self.units[i] if p not in shared], self.pieces)

    def drop(self):
        super().drop()
        for i in list(self.whole):                          # a step that failed has left them
            self.need(i)
            self.free(i)

    def around(self, i, forward, *args):
        """Run a part's forward while it is whole, and mark where its backward begins and ends."""
        self.need(i)
        if not replaying():
            self.ask(i + 1)
        y = forward(*[marked(x, self.end, i) if isinstance(x, Tensor) else x for x in args])
        if not replaying():                                 # its backward follows at once
            self.free(i)
        return marked(y, self.begin, i)

    def open(self, passes=1):
        super().open(passes)
        self.below = len(self.units) - 1                    # parts 0 .. below are still to come

    def begin(self, i):
        """Make part i whole for its backward, and send for the one before it."""
        if i > self.below:
            raise RuntimeError(f"part {i} of the model has run its backward already: ZeRO stage 3 "
                               "needs each part to run once per forward; use stage 2")
        self.catch_up(i)
        self.need(i)
        self.ask(i - 1)

    def end(self, i):
        """Free part i, and send off its gradients."""
        if i <= self.below:
            self.catch_up(i)
            self.free(i)
            self.below = i - 1
            for _ in {p.dtype for p in self.owned[i]}:
                self.buckets[len(self.works)].close()
                self.launch()

    def catch_up(self, i):
        """Do what is left of the parts after i, which this rank's backward has not met."""
        while self.below > i:
            self.begin(self.below)
            self.end(self.below)

    def launch_complete(self):
        """Send off nothing when a gradient comes: end() does, in the same order on all ranks."""

    def finish(self):
        self.catch_up(-1)
        super().finish()


STAGES = {1: Stage1, 2: Stage2, 3: Stage3}
