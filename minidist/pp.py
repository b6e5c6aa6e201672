"""Pipeline parallelism: each rank holds some of the layers, and micro-batches stream through.

    rank 0   embed, blocks 0 1    F0 F1 .. .. B0 F2 B1 F3 ...
                  | x [b, T, D]      \\      / dx
    rank 1   blocks 2 3, head        F0 B0 F1 B1 ...                   1f1b, two ranks

`split` keeps the parts of my stages, under their global names, so that initial values, dropout
masks and checkpoints do not change. What a rank does, and in which order, is a list (see
minidist.schedules); `Run` takes its actions one by one, whichever schedule they come from:

    F   receive x, or start with the tokens; forward; send the result on, drop it, keep its graph
    B   receive the gradient of the result, or start from the loss; backward; send x's gradient back
    I   the same, but weight gradients are put off        W   compute and add those put off

A message carries its micro-batch and its shape. The receive of the next action is posted before
the result of this one is sent, and sends return at once. Loss and gradients stay sums over tokens
until all micro-batches are in: nothing depends on how many there are, or on how full each is.

One version of the weights is enough, because every step ends with an empty pipeline (a flush).

Price per step, border of two stages and direction: m messages of b T D elements and 32 bytes each.
See cost.pp.  Idle: (p-1)/m of the working time under 1f1b and gpipe.
Gain: layers / p.  Memory: parameters, gradients, optimizer state / p; activations of up to p
micro-batches on the first rank.

Lesson: mpirun -n 4 python -m lessons.pp
Paper:  Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters
        using Megatron-LM"
"""
import time

import numpy as np

from minidist import BadInput, mappings, schedules
from minidist.cost import chunks
from minidist.engine.tensor import Tensor, run_deferred
from minidist.mesh import adopt, key_of, spelled
from minidist.placement import Held, cut
from minidist.schedules import passed

HEAD = 4                                    # int64 in front of a message: micro-batch, b, T, D
LABELS = {"F": "activations", "B": "gradients"}


def deal(layers, stages, weigh=(0, 0)):
    """Cut layers into consecutive stages, the first ones larger by one.  -> list of ranges

    weigh: for how many layers the embedding and the head count."""
    embed, head = weigh
    if layers + embed + head < stages:
        raise BadInput(f"{layers} layers do not fill {stages} stages; use fewer stages (--pp times "
                       f"--chunks) or at least {stages - embed - head} --layers")
    sizes = chunks(layers + embed + head, stages)
    sizes[0] -= embed
    sizes[-1] -= head
    if min(sizes) < 0:
        raise BadInput(f"an embedding that weighs {embed} layers and a head that weighs {head} "
                       f"leave one of {stages} stages fewer than no layers; use smaller weights")
    ends = np.cumsum(sizes).tolist()
    return [range(end - size, end) for size, end in zip(sizes, ends)]


def split(model, comm, schedule="1f1b", chunks=None, weigh=(0, 0)):
    """Keep the parts of my stages, and let train_step run them by a schedule.  Collective

    chunks: stages on each rank (None: as few as the schedule allows); weigh: see `deal`."""
    plan = schedules.make(schedule, comm.size, 1, chunks)
    stages = [[f"blocks.{i}" for i in layers]
              for layers in deal(model.config.layers, plan.stages, weigh)]
    stages[0].insert(0, "embed")
    stages[-1].append("head")
    place(model, comm, plan, stages)
    mine = [stages[plan.stage(comm.rank, chunk)] for chunk in range(plan.v)]
    model.parts = {name: model.parts[name] for names in mine for name in names}
    pipeline = model.pipeline = Pipeline(model, comm, plan, mine)
    model.wrap(pipeline.one_by_one)
    model.passes, model.deliveries = pipeline.run, pipeline.deliveries
    adopt(model, comm)
    return model


def place(model, comm, plan, stages):
    """Say of each parameter which ranks hold it; a gradient is partial over several.  Collective"""
    holders, groups, axis = {}, {}, key_of(comm)
    for stage, names in enumerate(stages):
        for p in (p for name in names for p in model.parts[name].parameters()):
            holders.setdefault(p.name, (p, set()))[1].add(plan.home(stage)[0])
    alone = comm.split(comm.rank, name=comm.name)
    for p, ranks in holders.values():
        ranks, shared = tuple(sorted(ranks)), len(ranks) > 1
        if shared and ranks not in groups:                  # all ranks make each group
            groups[ranks] = comm.split(0 if comm.rank in ranks else None, name=comm.name)
        if comm.rank in ranks:
            cut(p, axis, Held(ranks, groups[ranks] if shared else alone))
            p.partial.update(spelled([axis]) if shared else ())


class Pipeline:
    """One rank's stages, the groups that their messages travel in, and how passes are run."""

    def __init__(self, model, comm, plan, parts):
        self.model, self.comm, self.plan = model, comm, plan
        self.parts = parts                                  # [chunk] -> names of its parts
        # Two ranks may have several borders between them, and meet them in different orders.
        self.groups = {(kind, chunk): comm.split(0, name=comm.name)
                       for kind in "FB" for chunk in range(plan.v)}
        self.listeners = []                                 # called with (action, start, end)

    @property
    def dtype(self):
        """Of what travels: that of the parameters, now."""
        return self.model.parameters()[0].dtype

    def deliveries(self, microbatches):
        """Count the gradients that a step delivers to each parameter.  -> {name: number}"""
        found = {}
        for names in self.parts:
            for name in {p.name for part in names for p in self.model.parts[part].parameters()}:
                found[name] = found.get(name, 0) + microbatches
        return found

    def stage(self, chunk, x, batch):
        """Compute one of my stages.  [b, T, D] -> [b, T, D], or [] behind the last"""
        for name in self.parts[chunk]:
            x = self.model.parts[name](x, batch)
        return x

    def shape(self, batch):
        """Say what crosses a border for this micro-batch."""
        return len(batch.rows), len(batch.stream), self.model.config.width

    def run(self, model, batches):
        """Run forward and backward on all micro-batches, by the schedule.  -> my loss sum"""
        schedule = schedules.make(self.plan.name, self.plan.p, len(batches), self.plan.v)
        return Run(self, schedule, batches).all()

    def one_by_one(self, forward, batch):
        """Take one batch through all stages, on one tape per rank: the naive pipeline.

        The loss on the last stage, 0 elsewhere; backward visits the ranks in reverse."""
        if batch.targets is None:
            raise ValueError("the scores of a pipeline exist on its last stage only: gather the "
                             "parameters into a plain model (placement.everything) to sample")
        x, roots, loss, rank = None, [], np.zeros(()), self.comm.rank
        for chunk in range(self.plan.v):
            before, after = self.plan.neighbours(rank, ("F", 0, chunk))
            if before is not None and self.plan.home(before)[0] != rank:
                there, its = self.plan.home(before)
                x = mappings.recv(self.shape(batch), self.dtype, self.groups["F", its], there)
            x = self.stage(chunk, x, batch)
            if after is None:
                loss = x.data
                roots.append(x)
            elif self.plan.home(after)[0] != rank:
                there, _ = self.plan.home(after)
                roots.append(mappings.send(x, self.groups["F", chunk], there))
        return Tensor(loss, roots, lambda g: [g if r.ndim == 0 else np.empty(0, self.dtype)
                                              for r in roots])


# === One step ===

class Run:
    """One rank's way through its list of actions.

    All that an action leaves for a later one is kept under its micro-batch and chunk or stage."""

    def __init__(self, pipeline, schedule, batches):
        self.pipeline, self.schedule, self.batches = pipeline, schedule, batches
        self.rank = pipeline.comm.rank
        self.live = {}                      # (micro-batch, chunk): input and result, for backward
        self.late = {}                      # (micro-batch, chunk): weight gradients put off
        self.here = {}                      # (pass, micro-batch, stage): result for my own stage
        self.coming = {}                    # (pass, micro-batch, stage): receives posted
        self.going = []                     # sends that may be under way
        self.loss = 0.0

    def all(self):
        """Take all actions.  -> loss sum, 0 without the last stage"""
        actions = self.schedule.actions[self.rank]
        self.post(actions[0])
        for action, following in zip(actions, [*actions[1:], None]):
            if following is not None:
                self.post(following)
            x = self.take_in(action)
            start = time.perf_counter()
            y = act(self, *action, x)
            for listener in self.pipeline.listeners:
                listener(self, action, start, time.perf_counter())
            self.hand_on(action, y)
        for request in self.going:
            request.wait()
        return self.loss

    def forward(self, i, chunk, x):
        """Compute a stage's result and keep its graph; of the last stage, the loss."""
        x = None if x is None else Tensor(x, requires_grad=True)
        y = self.pipeline.stage(chunk, x, self.batches[i])
        self.live[i, chunk] = x, y
        if y.ndim == 0:
            self.loss += y.item()
            return None
        result, y.data = y.data, np.broadcast_to(np.zeros((), y.dtype), y.shape)
        return result                                       # the graph alone does not keep it

    def backward(self, i, chunk, g, put_off):
        """Run back through a stage.  -> gradient of its input, None on the first stage"""
        x, y = self.live.pop((i, chunk))
        y.backward(g, defer=put_off)
        return None if x is None else x.grad

    # --- messages

    def post(self, action):
        """Post the receive of what an action starts from, if it comes from another rank."""
        source, _ = self.schedule.neighbours(self.rank, action)
        if source is None or self.schedule.home(source)[0] == self.rank:
            return
        kind, i = passed(action[0]), action[1]
        rank, chunk = self.schedule.home(source)
        size = 8 * HEAD + np.prod(self.shape(i), dtype=int) * self.pipeline.dtype.itemsize
        group = self.pipeline.groups[kind, chunk]
        with group.label(LABELS[kind]):
            self.coming[kind, i, source] = group.irecv(np.empty(size, "u1"), rank)

    def shape(self, i):
        return self.pipeline.shape(self.batches[i])

    def take_in(self, action):
        """Wait for what an action starts from.  -> array; None at the ends of the pipeline"""
        source, _ = self.schedule.neighbours(self.rank, action)
        kind, i = passed(action[0]), action[1]
        if source is None:
            return None
        if (kind, i, source) in self.here:
            return self.here.pop((kind, i, source))
        head, x = unpack(self.coming.pop((kind, i, source)).wait(), self.shape(i),
                         self.pipeline.dtype)
        if head != [i, *self.shape(i)]:
            raise RuntimeError(f"rank {self.rank} waits for {kind} of micro-batch {i}, shape "
                               f"{list(self.shape(i))}, and stage {source} has sent micro-batch "
                               f"{head[0]}, shape {head[1:]}")
        return x

    def hand_on(self, action, y):
        """Give a result to the stage that it is for."""
        _, target = self.schedule.neighbours(self.rank, action)
        if target is None:
            return
        kind, i, chunk = passed(action[0]), *action[1:]
        there, _ = self.schedule.home(target)
        if there == self.rank:
            self.here[kind, i, self.schedule.stage(self.rank, chunk)] = y
            return
        group = self.pipeline.groups[kind, chunk]
        with group.label(LABELS[kind]):
            self.going.append(group.isend(pack(i, y), there))
        arrived = [request for request in self.going if request.ready()]
        for request in arrived:
            request.wait()
            self.going.remove(request)


def act(run, kind, i, chunk, x):
    """Take one action with run.forward, run.backward, run_deferred.  -> what it leaves, or None

    x: what it starts from.  "I" puts weight gradients off into run.late[i, chunk], a list that "W"
    removes and runs; "B" puts nothing off (None)."""
    if kind == "F":
        return run.forward(i, chunk, x)
    if kind == "W":
        return run_deferred(run.late.pop((i, chunk)))
    if kind == "I":
        run.late[i, chunk] = []
    return run.backward(i, chunk, x, run.late.get((i, chunk)))


def pack(i, x):
    """Put micro-batch and shape in front of an array.  -> bytes"""
    frame = np.empty(8 * HEAD + x.nbytes, "u1")
    frame[:8 * HEAD].view(np.int64)[:] = i, *x.shape
    frame[8 * HEAD:].view(x.dtype).reshape(x.shape)[...] = x
    return frame


def unpack(frame, shape, dtype):
    """Take a message apart.  -> [micro-batch, b, T, D], array of this shape"""
    return frame[:8 * HEAD].view(np.int64).tolist(), frame[8 * HEAD:].view(dtype).reshape(shape)
