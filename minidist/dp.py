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
from minidist import buckets
from minidist.collectives import broadcast
from minidist.mesh import adopt
from minidist.placement import alike_in, mark_partial


def share_rows(model, comm):
    """Let each rank take its rows of every batch; with fewer rows than ranks some take none.

    A batch without targets, of which only the logits are wanted, is left whole."""
    def mine(batch):
        return batch if batch.targets is None else batch.split(comm.size)[comm.rank]

    model.localizers.append(mine)


def start_equal(model, comm):
    """Give every rank the parameters of the first rank that holds the same.  Collective."""
    for p in model.parameters():
        p.data[...] = broadcast(p.data, alike_in(comm, p))


def parallelize(model, comm):
    """Share the rows, and leave every gradient to be summed after backward.  Collective."""
    adopt(model, comm, tokens=True)
    share_rows(model, comm)
    start_equal(model, comm)
    for p in model.parameters():
        mark_partial(p, comm)
    return model


def prepare(model, comm):
    """Share the rows, start equal, name partial what is cut within comm.  -> other parameters"""
    adopt(model, comm, tokens=True)
    share_rows(model, comm)
    start_equal(model, comm)
    whole = [p for p in model.parameters() if alike_in(comm, p) is comm]
    for p in set(model.parameters()).difference(whole):
        mark_partial(p, comm)
    return whole


class DistributedDataParallel(buckets.Reducer):
    """Share the rows, and sum the gradients over ranks while backward is running.

    The model is called, and asked for parameters, as before.  When backward returns, every
    p.grad is the sum over ranks, as a view of its bucket: see buckets.Reducer.

    Buckets are filled in reverse order of the forward pass, the order in which gradients
    come, so (unlike PyTorch, which starts from the forward order) nothing is rebuilt later.
    A parameter that is cut within comm, such as an expert, is left to be summed after backward.

    bucket_bytes, first_bucket_bytes: see minidist.buckets.  Collective: every rank calls.
    """

    def __init__(self, model, comm, bucket_bytes=buckets.CAP, first_bucket_bytes=buckets.FIRST):
        whole = prepare(model, comm)
        super().__init__(model, comm, [p for p in reversed(whole) if p.requires_grad],
                         bucket_bytes, first_bucket_bytes)
