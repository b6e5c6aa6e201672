"""Closed forms: what every technique sends, holds and waits for, before it runs.

Bytes are bytes *sent* by one rank.  Imports no array, and knows no rank but its number.
"""
from typing import NamedTuple

# === Collectives: cost.all_reduce("ring", p, n, itemsize, rank) -> Price(steps, messages, bytes)

from minidist.traffic import (                                                  # noqa: F401
    Price, all_gather, all_reduce, all_to_all, broadcast, chunks, double_tree, gather, hierarchical,
    reduce, reduce_scatter, scatter, seconds)


# === One training step ===
#
# B rows, T positions, D width, H heads, K key/value heads, V vocabulary, L layers, hidden width 4D.

class Kept(NamedTuple):
    """What one operation keeps for its backward."""
    operation: str
    what: str
    formula: str
    bytes: int


def gpt_parameters(D, L, T, V, H, K=None, tied=True):
    """Count the parameters of a GPT: about 12 L D^2."""
    rows = D + 2 * (K or H) * D // H                             # of the fused projection
    attention = rows * (D + 1) + D * (D + 1)
    mlp = 4 * D * (D + 1) + D * (4 * D + 1)
    block = attention + mlp + 2 * 2 * D
    return V * D + T * D + L * block + 2 * D + (0 if tied else V * D)


def block_activations(B, T, D, H, K=None, w=4, tile=64, dropout=False):
    """List what one block keeps for backward, operation by operation, at w bytes per number.

    An array is listed where it is first needed: the output of one operation is often the input
    that the next one keeps. A view, and a sum, keep nothing.
    """
    N, kv = B * T, 2 * (K or H) * D // H
    rows = [
        Kept("layer_norm", "normalised rows, 1/deviation", "N D + N", (N * D + N) * w),
        Kept("linear qkv", "its input", "N D", N * D * w),
        Kept("attention", "q, k, v, output, weights", "N (2D + 2Ke) + B H T^2",
             (N * (2 * D + kv) + B * H * tiles(T, tile)) * w),
        Kept("linear proj", "its input, attention's output", "0", 0),
        Kept("layer_norm", "normalised rows, 1/deviation", "N D + N", (N * D + N) * w),
        Kept("linear fc1", "its input", "N D", N * D * w),
        Kept("gelu", "its derivative", "4 N D", 4 * N * D * w),
        Kept("linear fc2", "its input", "4 N D", 4 * N * D * w)]
    if dropout:
        rows += [Kept("dropout", "mask of the weights", "B H T^2", B * H * T * T * w),
                 Kept("dropout", "masks of the residuals", "2 N D", 2 * N * D * w)]
    return rows


def tiles(T, tile):
    """Count the weights of causal attention, T^2 less the tiles above the diagonal.

    In tiles: each `tile` queries meet the keys up to their last one's."""
    return sum(min(tile, T - i) * min(i + tile, T) for i in range(0, T, tile))


def gpt_activations(B, T, D, H, L, V, targets, K=None, w=4, tile=64, dropout=False):
    """Bytes that a GPT keeps between forward and backward, at w bytes per number."""
    N = B * T
    embed = N * D * w if dropout else 0                      # the mask; ids are the batch's own
    head = (2 * N * D + N + N * V) * w + 2 * 8 * targets     # norm, its output, softmax, indices
    block = sum(kept.bytes for kept in block_activations(B, T, D, H, K, w, tile, dropout))
    return embed + L * block + head


def gpt_flops(B, T, D, H, L, V, K=None):
    """FLOPs of the matrix products of one step, with attention's T x T weights counted in full.

    Two per multiply and add; backward makes two products for each one of forward."""
    N, rows = B * T, D + 2 * (K or H) * D // H
    block = N * D * rows + N * D * D + 8 * N * D * D + 2 * N * T * D
    return 3 * 2 * (L * block + N * D * V)


def textbook_activations(B, T, D, H):
    """Bytes per layer by Korthikanti et al. 2022: 16-bit numbers, masks of one byte, full T x T."""
    return 34 * B * T * D + 5 * H * T * T * B


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


# === One operation, forward: what it computes, and what it must move at the least ===
#
# Every input read once, every result written once, w bytes per number; a multiply-add is two flops.

class Work(NamedTuple):
    """What an operation asks of a machine."""
    flops: int
    bytes: int


def linear_work(N, D, F, w=4):
    """Work of N tokens through weights [F, D] and a bias: 2 flops per weight and token."""
    return Work(2 * N * D * F + N * F, w * (N * D + D * F + F + N * F))


def attention_work(B, T, D, H, w=4, tile=64):
    """Work of causal attention: two products, in tiles; reads q, k and v, writes one as large.

    The softmax between them is not counted: some 6 flops where the products have 4 D/H."""
    return Work(2 * 2 * B * D * tiles(T, tile), w * 4 * B * T * D)


def at_least(work, peak, bandwidth):
    """Seconds that no machine can beat: its flops per second, or bytes per second, run out."""
    return max(work.flops / peak, work.bytes / bandwidth)
