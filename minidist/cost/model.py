"""What one process computes, moves and keeps in a training step of the GPT, in closed form.

B rows, T positions, D width, H heads, K key/value heads, V vocabulary, L layers, hidden width 4D.

Lesson: python -m lessons.memory
"""
from typing import NamedTuple


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
