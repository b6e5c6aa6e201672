"""Closed forms: what every technique sends, holds and waits for, before it runs.

Bytes are bytes *sent* by one rank.  Imports nothing but math, knows no array and no rank but its number.
"""
from typing import NamedTuple

# === Collectives: cost.all_reduce("ring", p, n, itemsize, rank) -> Price(steps, messages, bytes) ===

from minidist.traffic import (                                                  # noqa: F401
    Price, all_gather, all_reduce, all_to_all, broadcast, chunks, double_tree, gather, hierarchical,
    reduce, reduce_scatter, scatter)


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
        Kept("layer_norm", "the normalised rows, 1/deviation", "N D + N", (N * D + N) * w),
        Kept("linear qkv", "its input", "N D", N * D * w),
        Kept("attention", "q, k, v, q/sqrt(e), the output", "N (3D + 2Ke)", N * (3 * D + kv) * w),
        Kept("attention", "the weights a query sees, by tile", "B H tiles", B * H * tiles(T, tile) * w),
        Kept("attention", "what hides the future", "tile^2", diagonals(T, tile) * w),
        Kept("linear proj", "its input: attention's output", "", 0),
        Kept("layer_norm", "the normalised rows, 1/deviation", "N D + N", (N * D + N) * w),
        Kept("linear fc1", "its input", "N D", N * D * w),
        Kept("gelu", "its derivative", "4 N D", 4 * N * D * w),
        Kept("linear fc2", "its input", "4 N D", 4 * N * D * w)]
    if dropout:
        rows += [Kept("dropout", "mask of the weights", "B H T^2", B * H * T * T * w),
                 Kept("dropout", "masks of the residuals", "2 N D", 2 * N * D * w)]
    return rows


def tiles(T, tile):
    """Count the weights of causal attention in tiles: `tile` queries meet the keys up to their last."""
    return sum(min(tile, T - i) * min(i + tile, T) for i in range(0, T, tile))


def diagonals(T, tile):
    """Count the pairs of the tiles on the diagonal, the only ones that see a part of their keys."""
    return sum(min(tile, T - i) ** 2 for i in range(0, T, tile))


def gpt_activations(B, T, D, H, L, V, targets, K=None, w=4, tile=64, dropout=False):
    """Bytes that a GPT keeps between forward and backward, at w bytes per number."""
    N = B * T
    embed = N * D * w if dropout else 0                          # the mask; ids are the batch's own
    head = (2 * N * D + N) * w + N * V * w + 2 * 8 * targets     # norm, its output, softmax, indices
    block = sum(kept.bytes for kept in block_activations(B, T, D, H, K, w, tile, dropout))
    return embed + L * block + head


def textbook_activations(B, T, D, H):
    """Bytes per layer by Korthikanti et al. 2022: 16-bit numbers, masks of one byte, full T x T."""
    return 34 * B * T * D + 5 * H * T * T * B
