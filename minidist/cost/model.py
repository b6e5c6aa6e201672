"""What one process computes, moves and keeps in a training step of the GPT, in closed form.

    cost.gpt_flops(cost.Sizes.of(gpt.config, B=6))

Every formula takes the letters from one Sizes, so that no caller can put two of them in the wrong
order.

Lesson: python -m lessons.memory
"""
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Name the sizes of a GPT, of the batch that it is given, and of one number."""
    B: int = 1                  # rows of the batch
    T: int                      # positions in a row
    D: int                      # width
    H: int                      # query heads
    K: int | None = None        # key/value heads; None: as many as query heads
    V: int                      # vocabulary
    L: int                      # layers
    w: int = 4                  # bytes per number
    loss: int | None = None     # the same in the loss, 4 for a model in 16 bits; None: w
    tied: bool = True           # are the head's weights the embedding's?
    dropout: bool = False
    E: int = 0                  # experts in the place of each MLP; 0: the MLP itself
    k: int = 1                  # experts that a token goes through
    shared: bool = False        # and one more that all go through?
    biased: bool = False        # does a bias even out the choice?
    aux: bool = False           # or a loss?
    tile: int = 64              # attention takes so many queries at a time; 0: it keeps no weights

    def __post_init__(self):
        object.__setattr__(self, "K", self.K or self.H)

    @classmethod
    def of(cls, config, **others):
        """Read the sizes of a GPTConfig; others: B and w, or anything that differs from it."""
        return cls(**{**dict(T=config.context, D=config.width, H=config.heads, K=config.kv_heads,
                             V=config.vocab, L=config.layers, tied=config.tied,
                             dropout=config.dropout > 0), **others})

    @property
    def N(self):
        """Tokens in the batch."""
        return self.B * self.T

    @property
    def mlps(self):
        """MLPs that one token goes through in a layer."""
        return (self.k if self.E else 1) + self.shared

    @property
    def F(self):
        """Hidden width of the MLP."""
        return 4 * self.D

    @property
    def e(self):
        """Width of one head."""
        return self.D // self.H

    @property
    def wide(self):
        """Bytes per number in the loss."""
        return self.loss or self.w

    @property
    def kv(self):
        """Numbers per token in all keys and all values together."""
        return 2 * self.K * self.e


GPT3 = Sizes(B=1536, T=2048, D=12288, H=96, V=50257, L=96, w=2)    # Brown et al. 2020; a step


class Kept(NamedTuple):
    """What one operation keeps for its backward."""
    operation: str
    what: str
    formula: str
    bytes: int


def gpt_parameters(sizes):
    """Count the parameters of a GPT: about 12 L D^2; with experts, 4 L D^2 + 8 E L D^2."""
    D, F, E = sizes.D, sizes.F, sizes.E
    attention = (D + sizes.kv) * (D + 1) + D * (D + 1)
    mlps = ((E or 1) + sizes.shared) * (F * (D + 1) + D * (F + 1))
    router = E * D + E * sizes.biased
    words = sizes.V * D * (1 if sizes.tied else 2)
    return words + sizes.T * D + sizes.L * (attention + mlps + router + 4 * D) + 2 * D


def active_parameters(sizes):
    """Count the parameters that one token meets: of the experts, only the k chosen ones."""
    idle = (sizes.E - sizes.k) * (2 * sizes.F * sizes.D + sizes.F + sizes.D) if sizes.E else 0
    return gpt_parameters(sizes) - sizes.L * idle


class Share(NamedTuple):
    """What one rank has of a block; in one process, everything."""
    heads: int                  # query heads
    kv: int                     # numbers per token in its keys and values
    hidden: int                 # hidden units of the MLP
    stream: int                 # tokens of the residual stream
    inputs: int                 # tokens that it keeps of the input of qkv and fc1


def block_activations(sizes, share=None):
    """List what one block keeps for backward, operation by operation.

    An array is listed where it is first needed: the output of one operation is often the input
    that the next one keeps. A view, and a sum, keep nothing.
    """
    B, T, D, N, w = sizes.B, sizes.T, sizes.D, sizes.N, sizes.w
    own = share or Share(sizes.H, sizes.kv, sizes.F, N, N)
    norm = Kept("layer_norm", "normalised rows, 1/deviation", "N D + N", own.stream * (D + 1) * w)
    weights = B * own.heads * (tiles(T, sizes.tile) if sizes.tile else T)       # or lse, of flash
    attention = N * (2 * own.heads * sizes.e + own.kv) + weights
    rows = [
        norm,
        Kept("linear qkv", "its input", "N D", own.inputs * D * w),
        Kept("attention", "q, k, v, output, weights", "N (2D + 2Ke) + B H T^2", attention * w),
        Kept("linear proj", "its input, attention's output", "0", 0),
        norm,
        Kept("linear fc1", "its input", "N D", own.inputs * D * w),
        Kept("gelu", "its derivative", "4 N D", N * own.hidden * w),
        Kept("linear fc2", "its input", "4 N D", N * own.hidden * w)]
    if sizes.dropout:
        mask = B * own.heads * T * T if sizes.tile else 0
        rows += [Kept("dropout", "mask of the weights", "B H T^2", mask * w),
                 Kept("dropout", "masks of the residuals", "2 N D", 2 * own.stream * D * w)]
    return rows


def tiles(T, tile):
    """Count the weights of causal attention, T^2 less the tiles above the diagonal.

    In tiles: each `tile` queries meet the keys up to their last one's."""
    return sum(min(tile, T - i) * min(i + tile, T) for i in range(0, T, tile))


def state_bytes(form=None):
    """Bytes of each parameter, its gradient, and AdamW's state of it with the master in it.

    form: fp16, bf16 (in arrays of 16 bits), or None for fp32.  A bf16 weight's gradient is fp32."""
    return {"fp16": (2, 2, 12), "bf16": (2, 4, 12)}.get(form, (4, 4, 8))


def gpt_activations(sizes, targets=None):
    """Bytes that a GPT keeps between forward and backward.

    targets: how many tokens have one; None: all."""
    N, D, w = sizes.N, sizes.D, sizes.w
    targets = N if targets is None else targets
    embed = 8 * (N + sizes.T) + (N * D * w if sizes.dropout else 0)      # ids, positions; mask
    head = (2 * N * D + N) * w + N * sizes.V * sizes.wide + 16 * targets     # softmax, index last
    return embed + sizes.L * sum(kept.bytes for kept in block_activations(sizes)) + head


def gpt_flops(sizes):
    """FLOPs of the matrix products of one step, with attention's T x T weights counted in full.

    Two per multiply and add; backward makes two products for each one of forward."""
    D, N = sizes.D, sizes.N
    mlps = N * D * (2 * sizes.F * sizes.mlps + sizes.E)
    block = N * D * (D + sizes.kv) + N * D * D + mlps + 2 * N * sizes.T * D
    return 3 * 2 * (sizes.L * block + N * D * sizes.V)


def recomputed_activations(sizes, every, targets=None):
    """Bytes kept when only the input of every so many blocks is.  -> when forward ends, at the top

    In backward one segment at a time is whole again; the inputs of those before it are there."""
    block = sum(kept.bytes for kept in block_activations(sizes))
    one, outside = sizes.N * sizes.D * sizes.w, gpt_activations(sizes, targets) - sizes.L * block
    embed = 8 * (sizes.N + sizes.T) + (one if sizes.dropout else 0)
    return segmented(sizes.L, every, outside, embed, one, block)


def segmented(layers, every, outside, embed, one, block):
    """Bytes kept of segments of blocks: one for its input, `block` for each block built up again.

    outside: of all but blocks; embed: of what is before them.  -> when forward ends, at the top"""
    lengths = [min(every, layers - i) for i in range(0, layers, every)]
    end = outside + len(lengths) * one
    return end, max(end, *(embed + (i + 1) * one + n * block for i, n in enumerate(lengths)))


def selective_activations(sizes, targets=None):
    """Bytes kept when forward ends, if the weights of attention, and their masks, are not.

    Queries that share keys are copied out of the projection, and kept beside it."""
    T, rows = sizes.T, sizes.B * sizes.H
    copies = sizes.N * sizes.D if 1 < sizes.K < sizes.H else 0
    seen = tiles(T, sizes.tile) if sizes.tile else T
    masks = rows * T * T if sizes.dropout and sizes.tile else 0
    return gpt_activations(sizes, targets) - sizes.L * (rows * seen + masks - copies) * sizes.w


def recomputed_flops(sizes, what="blocks"):
    """FLOPs that a step's products take more: of all blocks, or of attention's core alone."""
    D, N = sizes.D, sizes.N
    attention = 2 * N * sizes.T * D
    mlps = N * D * (2 * sizes.F * sizes.mlps + sizes.E)
    block = attention + N * D * (D + sizes.kv) + N * D * D + mlps
    return 2 * sizes.L * (attention if what == "attention" else block)


def textbook_activations(sizes, p=1, sequence=False, again=None):
    """Bytes per layer and rank by Korthikanti et al. 2022: 16-bit numbers, masks of one byte.

    p ranks of tp, with sequence of sp as well.  again: what backward computes again, "blocks",
    "attention" or None; a layer's attention is kept as T x T."""
    one = sizes.N * sizes.D
    outside = (10 / p if sequence else 10) * one            # norms, dropouts, what is between
    inside = (24 * one + (0 if again else 5 * sizes.H * sizes.T * sizes.N)) / p
    if again == "blocks":
        outside, inside = (2 / p if sequence else 2) * one, 0
    return int(outside + inside)


# === One operation, forward: what it computes, and what it must move at the least ===
#
# Every input read once, every result written once, w bytes per number; a multiply-add is two flops.

class Work(NamedTuple):
    """What an operation asks of a machine."""
    flops: int
    bytes: int


def linear_work(N, D, F, w=4):
    """Work of N tokens through weights [F, D] and a bias: 2 flops per weight and token, 1 per bias.

    Input, weights, bias and result cross the memory once."""
    return Work(2 * N * D * F + N * F, w * (N * D + D * F + F + N * F))


def attention_work(B, T, D, w=4, tile=64):
    """Work of causal attention: two products, in tiles; reads q, k and v, writes one as large.

    The softmax between them is not counted: some 6 flops where the products have 4 D/H."""
    return Work(2 * 2 * B * D * tiles(T, tile), w * 4 * B * T * D)


def at_least(work, peak, bandwidth):
    """Seconds that no machine can beat: its flops per second, or bytes per second, run out."""
    return max(work.flops / peak, work.bytes / bandwidth)
