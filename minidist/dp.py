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

Price per step and rank: 2(p-1)/p of the model's gradients in bytes. See cost.ddp_bytes.
Gain: time / p. Memory: none; all of P, G and O is held p times (minidist.zero removes that).

Lesson: mpirun -n 4 python -m lessons.dp
Paper:  Li et al. 2020, "PyTorch distributed: experiences on accelerating data parallel training"
"""
from contextlib import contextmanager
from functools import partial

from minidist import buckets
from minidist.collectives import all_reduce, broadcast
from minidist.engine.tensor import Tensor, after_backward


def share_rows(model, comm):
    """Let each rank take its rows of every batch; with fewer rows than ranks some take none."""
    model.localizers.append(lambda batch: batch.split(comm.size)[comm.rank])


def start_equal(model, comm):
    """Give every rank the first rank's parameters.  Collective."""
    for p in model.parameters():
        p.data[...] = broadcast(p.data, comm)


def parallelize(model, comm):
    """Share the rows, and leave every gradient to be summed after backward.  Collective."""
    share_rows(model, comm)
    start_equal(model, comm)
    for p in model.parameters():
        p.partial.add(comm.name)
    return model


class DistributedDataParallel:
    """Share the rows, and sum the gradients over ranks while backward is running.

    The model is called, and asked for parameters, as before.  When backward returns, every
    p.grad is the sum over ranks, as a view of its bucket; a parameter used on some ranks only
    got zeros from the others, one used nowhere has None.  Such a parameter holds back its
    bucket, and those after it, until the end of backward: right, but nothing is hidden.

    Buckets are filled in reverse order of the forward pass, the order in which gradients
    come, so (unlike PyTorch, which starts from the forward order) nothing is rebuilt later.

    bucket_bytes, first_bucket_bytes: see minidist.buckets.  Collective: every rank calls.
    """

    def __init__(self, model, comm, bucket_bytes=buckets.CAP, first_bucket_bytes=buckets.FIRST):
        share_rows(model, comm)
        start_equal(model, comm)
        self.model, self.stream = model, comm.stream()
        self.params = [p for p in reversed(model.parameters()) if p.requires_grad]
        self.buckets = buckets.build(self.params, bucket_bytes, first_bucket_bytes)
        self.bucket_of = {p.name: bucket for bucket in self.buckets for p in bucket.params}
        self.syncing, self.works = True, None              # works: those launched, in a pass
        model.wrap(self.watch)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.ready)

    def __call__(self, *args):
        return self.model(*args)

    def __getattr__(self, name):
        return getattr(self.__dict__["model"], name)

    @contextmanager
    def no_sync(self):
        """Let the gradients of backwards in here add up locally: all micro-batches but the last."""
        self.syncing, was = False, self.syncing
        try:
            yield
        finally:
            self.syncing = was

    def watch(self, forward, *args):
        """Learn when backward starts: the vjp of the model's result is the first to run."""
        y = forward(*args)

        def start(g):
            self.start()
            return (g,)

        return Tensor(y.data, (y,), start)

    def start(self):
        """Open the buckets, on every rank, even if it will use no parameter at all."""
        for p in self.params:
            if p.grad is self.bucket_of[p.name].views[p.name]:
                raise RuntimeError(f"{p.name} still holds the sum of the last step, which would "
                                   "be summed again: zero_grad() before the next backward")
        if self.syncing:
            self.works = []
            for bucket in self.buckets:
                bucket.open()
            after_backward(self.finish)

    def ready(self, p):
        """Put a finished gradient into its bucket, and send off the buckets that are complete.

        Strictly in order: a bucket that is complete early waits for those before it, because
        gradients may come in another order on another rank, and messages must pair up."""
        if self.works is None:
            return
        self.bucket_of[p.name].put(p)
        while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting:
            self.launch()

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
