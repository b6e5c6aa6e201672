"""What each strategy sends and holds in a training step, in closed form.

    cost.tp(sizes, cost.Group(p, rank, collectives.chosen))    ->  (forward, backward), two Prices

sizes are those of the whole model and of the whole batch that the group works on.

Lesson: mpirun -n 4 python -m lessons.tp
"""
from minidist.cost.messages import NOTHING, Group, chunks
from minidist.cost.model import block_activations


# === Data parallelism: the gradients of one step ===

def ddp(buckets, group, w):
    """Price of DistributedDataParallel: one all_reduce per bucket.  About 2(p-1)/p of the gradients

    buckets: numbers in each, its gradients and one flag for every parameter."""
    return sum((group.all_reduce(n, w) for n in buckets), NOTHING)


def dp(parameters, group, w):
    """Price of the plain form: one all_reduce per parameter, and one for all their flags.

    parameters: numbers in each."""
    return group.all_reduce(len(parameters), 4) + ddp(parameters, group, w)


# === Tensor and sequence parallelism: p ranks cut each layer of the GPT ===

def tp_parameters(sizes, group):
    """Count what one rank holds: matrices / p; norms, row biases and positions whole."""
    D, p, rank = sizes.D, group.p, group.rank
    hidden, keys = chunks(sizes.F, p)[rank], key_rows(sizes, p, rank)
    attention = (D // p + 2 * keys) * (D + 1) + D * (D // p) + D
    mlp = hidden * (D + 1) + D * hidden + D
    words = chunks(sizes.V, p)[rank] * D * (1 if sizes.tied else 2)
    return words + sizes.T * D + sizes.L * (attention + mlp + 4 * D) + 2 * D


def key_rows(sizes, p, rank):
    """Count the rows of keys that one rank projects: whole heads, or a slice of one (p > K)."""
    sharers = max(1, p // sizes.K)
    return max(1, sizes.K // p) * chunks(sizes.e, sharers)[rank % sharers]


def tp(sizes, group):
    """Price of one step's tensor parallelism.  -> (forward, backward)

    Two all_reduces of [B, T, D] per layer each way; one more for the embedding (forward) and for
    the head (backward); three of [B, T] in the loss; and, where p > K, tp_keys."""
    layers = (2 * sizes.L + 1) * group.all_reduce(sizes.N * sizes.D, sizes.w)
    forward, backward = tp_keys(sizes, group)
    return layers + 3 * group.all_reduce(sizes.N, sizes.w) + forward, layers + backward


def tp_keys(sizes, group):
    """Price of sharing each key/value head among p/K ranks.  -> (forward, backward)"""
    sharers = max(1, group.p // sizes.K)
    inner = Group(sharers, group.rank % sharers, group.chosen)
    slices = [sizes.N * 2 * e for e in chunks(sizes.e, sharers)]
    return (sizes.L * inner.all_gather(slices, sizes.w),
            sizes.L * inner.reduce_scatter(slices, sizes.w))


def sp(sizes, group, keep_input=False):
    """Price of one step's sequence parallelism.  -> (forward, backward)

    Every all_reduce of tp becomes a reduce_scatter in one place and an all_gather in another;
    unless they keep their input, two layers of a block (and the head) gather it once more."""
    pieces = [sizes.N // group.p * sizes.D] * group.p
    there, back = (move(pieces, sizes.w) for move in (group.all_gather, group.reduce_scatter))
    layers = (2 * sizes.L + 1) * (there + back)
    again = (0 if keep_input else 2 * sizes.L + 1) * there
    forward, backward = tp_keys(sizes, group)
    return layers + 3 * group.all_reduce(sizes.N, sizes.w) + forward, layers + again + backward


def between_cuts(kept):
    """Say whether tensor parallelism cuts it: between a column cut and the next row cut."""
    return (kept.operation in ("attention", "linear proj", "gelu", "linear fc2")
            or kept.what == "mask of the weights")


def tp_block_activations(sizes, p, sequence=None):
    """List what one block keeps on one of p ranks (p divides K), as block_activations does.

    sequence: None for tensor parallelism alone; "again" or "keep" for sequence parallelism that
    gathers a column-parallel layer's input again in backward, or keeps it."""
    def divisor(kept):
        gathered = kept.operation.startswith("linear") and sequence == "keep"
        return p if between_cuts(kept) or sequence and not gathered else 1

    return [kept._replace(bytes=kept.bytes // divisor(kept)) for kept in block_activations(sizes)]
