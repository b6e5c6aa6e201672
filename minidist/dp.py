"""Data parallelism: every rank holds the whole model and works on its share of the batch.

    batch, rows 0..7 --+-- rows 0..3 --> rank 0   forward, backward --> gradient 0 --+
                       |                                                             +--> sum
                       +-- rows 4..7 --> rank 1   forward, backward --> gradient 1 --+

The loss is a sum over tokens, so the gradient of the whole batch is the sum of the ranks'
gradients: one all_reduce, and every rank takes the same step from the same place. What is
divided by, once and later (placement.finalize), is the number of target tokens of all ranks.

Two forms of the same sum:

    parallelize               after backward, one all_reduce per parameter
    DistributedDataParallel   during backward: gradients fill buckets from the last layer to
                              the first; a full bucket is summed on a background stream while
                              backward goes on with the layers before it

      compute  | forward | block 3 | block 2 | block 1 | block 0 |        | step
      wire                          [bucket 0][bucket 1 ][bucket 2][bucket 3]

Price per step and rank: 2(p-1)/p of the model's gradients in bytes. See cost.ddp.
Gain: time / p. Memory: none; every rank still holds all parameters, gradients and optimizer state.

Lesson: mpirun -n 4 python -m lessons.dp
Paper:  Li et al. 2020, "PyTorch distributed: experiences on accelerating data parallel training"
"""
from contextlib import contextmanager
from functools import partial

from minidist import buckets
from minidist.collectives import all_reduce, broadcast
from minidist.engine.tape import deferred
from minidist.engine.tensor import Tensor, after_backward
from minidist.mesh import adopt
from minidist.placement import mark_partial


def share_rows(model, comm):
    """Let each rank take its rows of every batch; with fewer rows than ranks some take none.

    A batch without targets, of which only the logits are wanted, is left whole."""
    def mine(batch):
        return batch if batch.targets is None else batch.split(comm.size)[comm.rank]

    model.localizers.append(mine)


def start_equal(model, comm):
    """Give every rank the first rank's parameters.  Collective."""
    for p in model.parameters():
        p.data[...] = broadcast(p.data, comm)


def parallelize(model, comm):
    """Share the rows, and leave every gradient to be summed after backward.  Collective."""
    adopt(model, comm)
    share_rows(model, comm)
    start_equal(model, comm)
    for p in model.parameters():
        mark_partial(p, comm)
    return model


class DistributedDataParallel:
    """Share the rows, and sum the gradients over ranks while backward is running.

    The model is called, and asked for parameters, as before.  When backward returns, every
    p.grad is the sum over ranks, as a view of its bucket; a parameter used on some ranks only
    got zeros from the others, one used nowhere has None.  Such a parameter holds back its
    bucket, and those after it, until the end of backward: right, but nothing is hidden.

    Several backward passes of one step go into `with model.summing(passes):`, as train_step's do:
    then a gradient is complete when each pass has delivered it, and at the end all are summed.

    Buckets are filled in reverse order of the forward pass, the order in which gradients
    come, so (unlike PyTorch, which starts from the forward order) nothing is rebuilt later.

    bucket_bytes, first_bucket_bytes: see minidist.buckets.  Collective: every rank calls.
    Ends with close(), or with `with`.
    """

    def __init__(self, model, comm, bucket_bytes=buckets.CAP, first_bucket_bytes=buckets.FIRST):
        adopt(model, comm)
        share_rows(model, comm)
        start_equal(model, comm)
        self.model, self.stream = model, comm.stream()
        self.params = [p for p in reversed(model.parameters()) if p.requires_grad]
        self.buckets = buckets.build(self.params, bucket_bytes, first_bucket_bytes)
        self.bucket_of = {p.name: bucket for bucket in self.buckets for p in bucket.params}
        self.works = None                                  # those launched, while a step is open
        self.told = False                                  # that there are several passes
        self.hooks = [p.register_post_accumulate_grad_hook(self.ready) for p in self.params]
        model.wrap(self.watch)

    def __call__(self, *args):
        return self.model(*args)

    def __getattr__(self, name):
        return getattr(self.__dict__["model"], name)

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
            raise RuntimeError("this DistributedDataParallel is closed: nobody sums its gradients")
        self.drop()
        for p in self.params:
            if self.bucket_of[p.name].holds(p):
                raise RuntimeError(f"{p.name} still holds the sum of the last step, which would be "
                                   "summed again: zero_grad() before the next backward, or run "
                                   "all passes of a step inside `with model.summing(passes):`")
        for bucket in self.buckets:
            bucket.open(passes)
        self.works = []

    def drop(self):
        """Let what a step that has failed left under way come to its end, and forget it."""
        for work in self.works or ():
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
        """Put a finished gradient into its bucket, and send off the buckets that are complete.

        Strictly in order: a bucket that is complete early waits for those before it, because
        gradients may come in another order on another rank, and messages must pair up."""
        if self.works is None:
            raise RuntimeError(f"{p.name} got a gradient outside of a step: its backward did not "
                               "come from a result of this DistributedDataParallel, or was put off "
                               "beyond the next forward; run it inside model.summing(passes)")
        self.bucket_of[p.name].deliver(p)
        while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting:
            self.launch()
        self.finish_after_backward()

    def launch(self):
        """Sum the next bucket on the background stream."""
        flat = self.buckets[len(self.works)].flat
        self.works.append(self.stream.submit(partial(all_reduce, out=flat), flat))

    def finish(self):
        """Send off what is left, wait for all of it, and hand out the sums."""
        while len(self.works) < len(self.buckets):
            self.buckets[len(self.works)].close()
            self.launch()
        for work, bucket in zip(self.works, self.buckets):
            work.wait()
            bucket.hand_out()
        self.works = None

    def close(self):
        """Sum no more, and give the stream back; the model stays as it is.  Collective"""
        for hook in self.hooks:
            hook.remove()
        if self.hooks:
            self.hooks = []
            self.model.wrappers.remove(self.watch)
            self.stream.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None:                                   # else the others may never come to close
            self.close()
