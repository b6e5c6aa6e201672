"""Buckets: many small gradients in a few flat buffers, one collective for each buffer.

    Bucket      one flat buffer, filled by gradients, emptied by the sum
    gather      pieces of many parameters in one message, the way back from reduce_scatter
    Reducer     fills the buckets of a model during backward, and sums them in the background

    summed by all_reduce        [ grad of p7 | grad of p6 | grad of p5 | u7 u6 u5 ]

    summed by reduce_scatter    [ piece 0 of p7 | of p6 | of p5 | u7 u6 u5 ]   row 0, for rank 0
                                [ piece 1 of p7 | of p6 | of p5 | u7 u6 u5 ]   row 1, for rank 1

A message costs a latency however small it is, so gradients travel together. Yet the first
bucket must not wait for the last gradient, or nothing is left to overlap with: the first is
small (1 MiB), the others larger (25 MiB). The numbers and the rule are PyTorch's: append, and
close the bucket once it has *reached* its limit, so that it may exceed it by one tensor.

u is 1 for a parameter that has a gradient and 0 otherwise. It travels in the same message, so
after the sum every rank knows, for free, which parameters were used anywhere.

A gradient is complete when it has been delivered once by each backward pass of the step,
whoever delivers it: the backward itself, or the weight pass that a backward has put off.

Lesson: mpirun -n 4 python -m lessons.dp
Paper:  Li et al. 2020, "PyTorch distributed: experiences on accelerating data parallel training"
"""
import math
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np

from minidist.collectives import all_gather, all_reduce, reduce_scatter
from minidist.engine.tape import deferred
from minidist.engine.tensor import Tensor, after_backward

FIRST, CAP = 1 << 20, 25 << 20                          # bytes: 1 MiB, 25 MiB


def assign(sizes, kinds=None, cap=CAP, first=FIRST):
    """Deal tensors of these sizes (bytes) into buckets, in order.  -> lists of indices

    A bucket closes when it has reached its limit: the smaller of both for a first one, then cap.
    kinds[i]: what must not mix, such as the dtype; every kind has its own first bucket."""
    closed, still_open, limits = [], {}, {}
    for i, size in enumerate(sizes):
        kind = kinds[i] if kinds else None
        members, total = still_open.get(kind, ([], 0))
        members, total = [*members, i], total + size
        if total >= limits.get(kind, min(first, cap)):
            closed.append(members)
            limits[kind] = cap
            members, total = [], 0
        still_open[kind] = members, total
    return sorted(closed + [members for members, _ in still_open.values() if members])


class Bucket:
    """The gradients of some parameters, one after another in one flat buffer.

    ranks: None for an all_reduce; p for a reduce_scatter, where each of p rows holds one piece of
    every gradient (as placement.Flat cuts it, padded with zeros).  The buffer is made when it is
    first needed; free() gives it back until it is needed again."""

    def __init__(self, params, ranks=None):
        self.params, self.whole, ranks = params, ranks is None, ranks or 1
        sizes = [-(-p.data.size // ranks) for p in params]
        ends = np.cumsum(sizes)
        self.shape, self.dtype = (ranks, int(ends[-1]) + len(params)), params[0].dtype
        self.columns = {p.name: slice(end - size, end) for p, size, end in zip(params, sizes, ends)}
        self.waiting = {}                                # name -> deliveries still to come

    flat = cached_property(lambda self: np.zeros(math.prod(self.shape), self.dtype))
    rows = cached_property(lambda self: self.flat.reshape(self.shape))
    used = cached_property(lambda self: self.rows[:, -len(self.params):])

    def free(self):
        """Give the buffer back: what was in it has been sent, or is not wanted."""
        for view in "flat", "rows", "used":
            self.__dict__.pop(view, None)

    @property
    def nbytes(self):
        """Bytes of the buffer, 0 while there is none."""
        return self.flat.nbytes if "flat" in self.__dict__ else 0

    def open(self, passes=1):
        """Expect every gradient anew, once from each backward pass.  Or {name: how often}"""
        often = passes if isinstance(passes, dict) else {}
        self.waiting = {p.name: often.get(p.name, passes) for p in self.params}
        if self.nbytes:
            self.used[...] = 0

    def deliver(self, p):
        """Count a delivery of p's gradient, and take it in once it is the last one."""
        left = self.waiting.get(p.name, 0) - 1
        if left < 0:
            raise RuntimeError(f"{p.name} got a gradient after the last one that was expected: its "
                               "bucket may be on its way already; say how many backward passes "
                               "there are, with model.summing(passes)")
        self.waiting[p.name] = left
        if left == 0:
            self.put(p)

    def put(self, p):
        """Take p's gradient in; p.grad is a view of this buffer now, or None if it has rows."""
        grad, rows = p.grad.reshape(-1), self.rows[:, self.columns[p.name]]
        for row, start in zip(rows, range(0, rows.size, rows.shape[1] or 1)):
            piece = grad[start:start + row.size]
            row[:piece.size], row[piece.size:] = piece, 0
        self.used[:, self.params.index(p)] = 1
        p.grad = rows[0].reshape(p.shape) if self.whole else None
        del self.waiting[p.name]

    def close(self):
        """Take in what came less often than expected; what never came counts as zero."""
        for p in self.params:
            if p.name in self.waiting and p.grad is not None:
                self.put(p)
            elif p.name in self.waiting:
                self.rows[:, self.columns[p.name]] = 0
        self.waiting = {}

    def hand_out(self, row=None):
        """Give every parameter its sum, or my piece of it; None if no rank had a gradient for it.

        row: what reduce_scatter has left me; after an all_reduce, the only one."""
        row = self.rows[0] if row is None else row
        for p, users in zip(self.params, row[-len(self.params):]):
            piece = row[self.columns[p.name]]
            p.grad = (piece.reshape(p.shape) if self.whole else piece) if users else None

    def holds(self, p):
        """Is p.grad a view of this buffer: the sum of an earlier step?"""
        return bool(p.grad is not None and self.nbytes) and np.may_share_memory(p.grad, self.flat)


def build(params, cap=CAP, first=FIRST, ranks=None):
    """Put parameters, in the order in which their gradients come, into buckets."""
    kinds = [p.dtype for p in params]
    lists = assign([p.data.nbytes for p in params], kinds, cap, first)
    return [Bucket([params[i] for i in members], ranks) for members in lists]


def gather(pieces, wholes, comm):
    """Gather the pieces of some parameters in one message, each into its whole array."""
    sizes = [-(-whole.size // comm.size) for whole in wholes]
    ends = np.cumsum(sizes)
    columns = [slice(end - size, end) for size, end in zip(sizes, ends)]
    row = np.zeros(ends[-1], wholes[0].dtype)
    for piece, column in zip(pieces, columns):
        row[column][:piece.size] = piece
    rows = all_gather(row, comm).reshape(comm.size, -1)
    for whole, size, column in zip(wholes, sizes, columns):
        flat = whole.reshape(-1)
        for r, row in enumerate(rows):
            part = flat[r * size:(r + 1) * size]            # shorter, or empty, where padding is
            part[...] = row[column][:part.size]
    return wholes


class Reducer:
    """Sum gradients over ranks while backward is running.

    When backward returns, every p.grad of params is the sum over the ranks of comm: a view of its
    bucket, or with ranks=comm.size this rank's piece of it.  A parameter used on some ranks only
    got zeros from the others, one used nowhere has None.  Such a parameter holds back its
    bucket, and those after it, until the end of backward: right, but nothing is hidden.

    Several backward passes of one step go into `with reducer.summing(passes):`, as train_step's do
    if it is the model's: then a gradient is complete when each pass has delivered it.

    params: in the order in which their gradients come; groups: the same, in lists of those that may
    share a bucket.  Collective.  Ends with close(), or `with`.
    """
    algorithm = None            # of the all_reduce, such as "ring"; None: by size
    compressor = None           # what sums a bucket instead: see minidist.compress

    def __init__(self, model, comm, params, bucket_bytes=CAP, first_bucket_bytes=FIRST, ranks=None,
                 groups=None):
        self.model, self.params, self.stream = model, params, comm.stream()
        self.buckets = [bucket for members in groups or [params] for bucket in
                        build(members, bucket_bytes, first_bucket_bytes, ranks)]
        self.bucket_of = {p.name: bucket for bucket in self.buckets for p in bucket.params}
        self.known = {p for p in model.parameters() if p.requires_grad}
        self.works = None                                  # those launched, while a step is open
        self.told = False                                  # that there are several passes
        self.hooks = [p.register_post_accumulate_grad_hook(self.ready) for p in params]
        model.wrap(self.watch)

    @contextmanager
    def summing(self, passes):
        """Sum what so many backward passes in here deliver.  Collective"""
        self.open(passes)
        self.told = True
        try:
            yield
        finally:
            self.told = False
        self.finish()

    def open(self, passes=1):
        """Expect every gradient, once from each backward pass."""
        if not self.hooks:
            raise RuntimeError("the buckets are closed: nobody sums these gradients")
        self.drop()
        self.refuse_changes()
        for bucket in self.buckets:
            bucket.open(passes)
        self.works = []

    def refuse_changes(self):
        """Raise RuntimeError for a gradient that would be summed by nobody, or twice."""
        now = {p for p in self.model.parameters() if p.requires_grad}
        if new := sorted(p.name for p in now - self.known):
            raise RuntimeError(f"{new[0]} was added, replaced or unfrozen after the buckets were "
                               "made: its gradient would not be summed; make them anew, after all "
                               "changes")
        for p in self.params:
            if self.bucket_of[p.name].holds(p):
                raise RuntimeError(f"{p.name} still holds the sum of the last step, which would be "
                                   "summed again: zero_grad() before the next backward, or run "
                                   "all passes of a step inside `with model.summing(passes):`")

    def drop(self):
        """Let what a step that has failed left under way come to its end, and forget it."""
        for work in filter(None, self.works or ()):
            work.wait()
        self.works = None

    def watch(self, forward, *args):
        """Learn when a backward starts, on every rank, even if it uses no parameter at all there.

        The vjp of the model's result is the first to run."""
        if not self.told:
            self.drop()
        y = forward(*args)

        def start(g):
            if self.works is None:
                self.open()
            self.finish_after_backward()
            return (g,)

        return Tensor(y.data, (y,), start)

    def finish_after_backward(self):
        """Close the step with this backward, unless it is one of several, or puts some work off."""
        def settle():
            if self.works is not None and not self.told and not deferred():
                self.finish()

        if not self.told:
            after_backward(settle)

    def ready(self, p):
        """Put a finished gradient into its bucket, and send off the buckets that are complete."""
        if self.works is None:
            raise RuntimeError(f"{p.name} got a gradient outside of a step: its backward did not "
                               "come from a result of the model, or was put off "
                               "beyond the next forward; run it inside model.summing(passes)")
        self.bucket_of[p.name].deliver(p)
        self.launch_complete()
        self.finish_after_backward()

    def launch_complete(self):
        """Send off the buckets that are complete, strictly in order.

        One that is complete early waits for those before it, because gradients may come in another
        order on another rank, and messages must pair up."""
        while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting:
            self.launch()

    def launch(self):
        """Sum the next bucket on the background stream."""
        bucket = self.buckets[len(self.works)]
        if self.compressor:
            work = self.stream.submit(self.compressor, bucket)
        elif bucket.whole:
            summed = partial(all_reduce, out=bucket.flat, algorithm=self.algorithm)
            work = self.stream.submit(summed, bucket.flat)
        else:
            work = self.stream.submit(reduce_scatter, bucket.rows)
        self.works.append(work)

    def finish(self):
        """Send off what is left, wait for all of it, and hand out the sums."""
        while len(self.works) < len(self.buckets):
            self.buckets[len(self.works)].close()
            self.launch()
        for work, bucket in zip(self.works, self.buckets):
            if work:
                self.collect(bucket, work.wait())
        self.works = None

    def collect(self, bucket, mine):
        """Hand out a bucket whose sum has come."""
        bucket.hand_out(None if bucket.whole else mine[0])

    def close(self):
        """Sum no more, and give the stream back; the model stays as it is.  Collective"""
        if self.hooks:
            self.drop()
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
            self.model.wrappers.remove(self.watch)
            self.stream.close()

    def __call__(self, *args):
        return self.model(*args)

    def __getattr__(self, name):
        return getattr(self.__dict__["model"], name)

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None:                                   # else the others may never come to close
            self.close()
