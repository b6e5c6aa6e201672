"""What each strategy sends and holds in a training step, in closed form.

Lesson: mpirun -n 4 python -m lessons.tp
"""
from minidist.cost.messages import Price, all_gather, all_reduce, chunks, reduce_scatter
from minidist.cost.model import block_activations


# === Data parallelism: the gradients of one step ===
#
# algorithm(nbytes) -> the all_reduce that is taken for a message of that size.

def ddp(buckets, p, itemsize, rank, algorithm):
    """Price of DistributedDataParallel: one all_reduce per bucket.  About 2(p-1)/p of the gradients

    buckets: elements in each, its gradients and one flag for every parameter."""
    prices = [all_reduce(algorithm(n * itemsize), p, n, itemsize, rank) for n in buckets]
    return Price(*map(sum, zip(*prices, strict=True)))


def dp(parameters, p, itemsize, rank, algorithm):
    """Price of the plain form: one all_reduce per parameter, and one for all their flags.

    parameters: elements in each."""
    flags = all_reduce(algorithm(4 * len(parameters)), p, len(parameters), 4, rank)
    gradients = ddp(parameters, p, itemsize, rank, algorithm)
    return Price(*map(sum, zip(flags, gradients, strict=True)))


# === Tensor and sequence parallelism ===
#
# p ranks cut each layer of the GPT above; sizes are those of the whole model and the whole batch.
# chosen(collective, nbytes, p) -> the algorithm that is taken, as collectives.chosen.

def tp_parameters(D, L, T, V, H, p, rank, K=None, tied=True):
    """Count what one rank holds: matrices / p; norms, row biases and positions whole."""
    K, e = K or H, D // H
    hidden, sharers = chunks(4 * D, p)[rank], max(1, p // K)
    keys = max(1, K // p) * chunks(e, sharers)[rank % sharers]   # and as many rows of values
    attention = (D // p + 2 * keys) * (D + 1) + D * (D // p) + D
    mlp = hidden * (D + 1) + D * hidden + D
    words = chunks(V, p)[rank] * D * (1 if tied else 2)
    return words + T * D + L * (attention + mlp + 4 * D) + 2 * D


def tp(B, T, D, L, p, itemsize, rank, chosen):
    """Price of one step's tensor parallelism.  -> (forward, backward)

    Two all_reduces of [B, T, D] per layer each way; one more for the embedding (forward) and for
    the head (backward); three of [B, T] in the loss.  tp_keys comes on top where p > K."""
    def one(n):
        return all_reduce(chosen("all_reduce", n * itemsize, p), p, n, itemsize, rank)

    layers = times(2 * L + 1, one(B * T * D))
    return layers + times(3, one(B * T)), layers


def tp_keys(B, T, D, H, K, L, p, itemsize, rank, chosen):
    """Price of sharing each key/value head among p/K ranks.  -> (forward, backward)"""
    sharers = max(1, p // K)
    sizes = [B * T * 2 * e for e in chunks(D // H, sharers)]
    return tuple(times(L, move(chosen(name, sum(sizes) * itemsize, sharers), sizes, itemsize,
                               rank % sharers))
                 for name, move in (("all_gather", all_gather), ("reduce_scatter", reduce_scatter)))


def sp(B, T, D, L, p, itemsize, rank, chosen, keep_input=False):
    """Price of one step's sequence parallelism.  -> (forward, backward)

    Every all_reduce of tp becomes a reduce_scatter in one place and an all_gather in another;
    unless they keep their input, two layers of a block (and the head) gather it once more."""
    sizes = [B * T // p * D] * p
    there, back = (move(chosen(name, sum(sizes) * itemsize, p), sizes, itemsize, rank)
                   for name, move in (("all_gather", all_gather),
                                      ("reduce_scatter", reduce_scatter)))
    loss = all_reduce(chosen("all_reduce", B * T * itemsize, p), p, B * T, itemsize, rank)
    layers = times(2 * L + 1, there + back)
    again = times(0 if keep_input else 2 * L + 1, there)
    return layers + times(3, loss), layers + again


def times(k, price):
    """Pay a price k times."""
    return Price(*(k * x for x in price))


def between_cuts(kept):
    """Say whether tensor parallelism cuts it: between a column cut and the next row cut."""
    return (kept.operation in ("attention", "linear proj", "gelu", "linear fc2")
            or kept.what == "mask of the weights")


def tp_block_activations(B, T, D, H, p, K=None, w=4, tile=64, dropout=False, sequence=None):
    """List what one block keeps on one of p ranks (p divides K), as block_activations does.

    sequence: None for tensor parallelism alone; "again" or "keep" for sequence parallelism that
    gathers a column-parallel layer's input again in backward, or keeps it."""
    def divisor(kept):
        gathered = kept.operation.startswith("linear") and sequence == "keep"
        return p if between_cuts(kept) or sequence and not gathered else 1

    return [kept._replace(bytes=kept.bytes // divisor(kept))
            for kept in block_activations(B, T, D, H, K, w, tile, dropout)]
