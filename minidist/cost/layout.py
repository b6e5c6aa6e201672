"""A whole training step on any layout: what one rank sends, holds, moves and computes.

    cost.step(sizes, cost.Layout(dp=2, tp=2, recompute="blocks"), dp=0, tp=1)     ->  Step

sizes are those of the whole model and of the global batch.

Lesson: mpirun -n 4 python -m lessons.memory
"""
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from minidist.cost import experts
from minidist.cost.messages import NOTHING, Group, always_ring, chunks
from minidist.cost.model import block_activations, gpt_activations, segmented, tiles
from minidist.cost.shards import Moved, offload, pieces, zero, zero_held, zero_parts
from minidist.cost.strategies import (
    cp, ddp, dealt, dp, ends, key_rows, pp, sp, tp, tp_activations, tp_shapes, tp_share, ulysses)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Say how a training step is spread over ranks, as minidist.parallel spreads it."""
    pp: int = 1                         # stages, one on each rank, under 1F1B
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1                         # ranks, of those of dp, that share the experts
    method: str = "zigzag"              # over the ranks of cp: "ring", "zigzag" or "ulysses"
    zero: int = 0                       # the stage of ZeRO over the ranks of dp; 0: DDP
    sequence: str | None = None         # over the ranks of tp: "again", "keep" or not at all
    microbatches: int = 1
    state: int = 2                      # numbers of w bytes of optimizer state per parameter:
                                        # 2 for AdamW, 6 in fp16, where they are of 4 bytes
    scaled: bool = False                # is there a loss scale: does every step ask for overflows?
    recompute: str | None = None        # "blocks", "sqrt" or "attention"
    offload: int = 0                    # bytes of each array in a chunk; 0: all of it is here
    first: int = 1 << 20                # bytes that close DDP's first bucket
    cap: int = 25 << 20                 # bytes that close each further one
    chosen: object = always_ring        # see Group

    @property
    def edp(self):
        """Ranks of dp that hold the same experts."""
        return self.dp // self.ep


class Held(NamedTuple):
    """Bytes that one rank holds at the most, as minidist.ledger counts them."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int


class Step(NamedTuple):
    """What one rank sends in a step, by the axes of the groups it sends in; what else it does."""
    sent: dict                          # {"dp": Price, "tp": Price, "dp-tp": Price}
    held: Held
    moved: Moved                        # to and from what lies elsewhere
    flops: int                          # of matrix products, attention's in full


class Rank:
    """One rank of a layout: its groups, its micro-batches, its parameters."""

    def __init__(self, sizes, layout, at, routed=None):
        self.layout, self.at = layout, {axis: at.get(axis, 0) for axis in AXES}
        self.at |= dict(zip(("edp", "ep"), divmod(self.at["dp"], layout.ep)))
        self.sizes, self.tp = sizes, self.group("tp")
        rows = chunks(sizes.B, layout.dp)[self.at["dp"]]
        self.stage = self.group("pp")
        self.first, self.last = ends(self.stage)            # have I the embedding, the head?
        self.mine = replace(sizes, B=rows, T=sizes.T // layout.cp,
                            L=chunks(sizes.L, layout.pp)[self.stage.rank])
        self.batches = [replace(self.mine, B=b) for b in chunks(rows, layout.microbatches)]
        self.held = chunks(sizes.E, layout.ep)
        mine = self.held[self.at["ep"]]
        self.shapes = tp_shapes(sizes, self.tp, self.stage, mine if layout.ep == 1 else 0)
        self.experts = experts.shapes(sizes, self.tp, mine) * sizes.L if layout.ep > 1 else []
        self.frozen = sizes.L * sizes.E * sizes.biased      # numbers of biases, whole everywhere
        self.routed = routed or self.even_routing

    def even_routing(self, i, layer):
        """Rows of micro-batch i that go to each rank of ep, and come from it, dealt evenly."""
        layout, ours = self.layout, range(self.at["dp"] - self.at["ep"],
                                          self.at["dp"] - self.at["ep"] + self.layout.ep)
        rows = [chunks(chunks(self.sizes.B, layout.dp)[d], layout.microbatches)[i] for d in ours]
        each = self.sizes.k * (self.sizes.T // layout.cp)
        return experts.evenly([each * b for b in rows], layout.ep, self.at["ep"])

    @property
    def zero(self):
        """The stage that has anything to share."""
        return self.layout.zero if self.layout.dp > 1 else 0

    def states(self):
        """Count the numbers of parameters, gradients, and of each array of optimizer state."""
        numbers = [numbers for numbers, _ in self.shapes]
        held = (sum(numbers),) * 3
        if self.zero:
            held = zero_held(numbers, self.group("dp"), self.zero, state=1)
        P, G, state = (n + sum(self.experts) for n in held)
        return P + self.frozen, G, state

    def group(self, *axes):
        """Look up the group along these axes, its ranks numbered row by row."""
        p, rank = 1, 0
        for axis in axes:
            size = getattr(self.layout, axis)
            p, rank = p * size, rank * size + self.at[axis]
        return Group(p, rank, self.layout.chosen)


AXES = "pp", "dp", "cp", "tp"                 # of a layout, outermost first


def data_parallel_sends(rank):
    """Gradients, in buckets from the last parameter to the first; then the loss and its count."""
    layout, w, group = rank.layout, rank.sizes.w, rank.group("dp")
    numbers = [numbers for numbers, _ in rank.shapes]
    sums, gathers = dealt(numbers[::-1], w, layout.first, layout.cap), None
    if layout.zero == 3:
        sums, gathers = zero_parts(numbers, rank.sizes.L, rank.sizes.tied)
    if layout.zero and group.p > 1:
        yield ("dp",), zero(sums, group, w, layout.zero, layout.microbatches, gathers)
    else:
        yield ("dp",), ddp([sum(one) + len(one) for one in sums], group, w)
    everyone = "pp", "dp", "cp"
    yield everyone, rank.group(*everyone).all_reduce(2, 8)


def tensor_parallel_sends(rank):
    """Activations of each micro-batch; under sp, the gradients of what is whole as well."""
    if rank.tp.p == 1:
        return
    way = rank.layout.sequence
    for sizes in rank.batches:
        ends = rank.first, rank.last
        forward, backward = (sp(sizes, rank.tp, way == "keep", *ends) if way
                             else tp(sizes, rank.tp, *ends))
        yield ("tp",), forward + backward
    if way:
        yield ("cp", "tp"), rest(rank, (False,), "cp", "tp")


def context_parallel_sends(rank):
    """Keys and values, or heads, of each micro-batch; then gradients, of what sp leaves."""
    layout, group, way = rank.layout, rank.group("cp"), rank.layout.sequence
    if group.p == 1:
        return
    for sizes in rank.batches:
        mine = replace(sizes, T=sizes.T * group.p, D=sizes.D // layout.tp, H=sizes.H // layout.tp,
                       K=max(1, sizes.K // layout.tp))
        forward, backward = (ulysses if layout.method == "ulysses" else cp)(mine, group)
        yield ("cp",), forward + backward
    yield ("cp",), rest(rank, (True,) if way and rank.tp.p > 1 else (True, False), "cp")


def pipeline_sends(rank):
    """Activations and gradients of each micro-batch; then what two stages hold, if tied."""
    layout, sizes, w = rank.layout, rank.mine, rank.sizes.w
    stream = sizes.T // (layout.tp if layout.sequence else 1)
    yield ("pp",), pp(replace(sizes, T=stream), rank.stage, layout.microbatches)
    if sizes.tied and layout.pp > 1 and (rank.first or rank.last):
        words, p = rank.shapes[0 if rank.first else -1][0], layout.dp if layout.zero else 1
        yield ("pp",), dp([-(-words // p)], Group(2, int(rank.last), layout.chosen), w)


def rest(rank, kinds, *axes):
    """Price of summing gradients after backward: those that are cut by tp, or not."""
    p = rank.layout.dp if rank.layout.zero else 1                   # ZeRO: of my piece of each
    biases = rank.sizes.L * (rank.frozen > 0) * (False in kinds)
    return dp([-(-numbers // p) for numbers, cut in rank.shapes if cut in kinds],
              rank.group(*axes), rank.sizes.w, biases)


def expert_sends(rank):
    """Rows of each micro-batch, both ways; experts' gradients; counts that balance looks at."""
    sizes, w, both = rank.sizes, rank.sizes.w, rank.group("dp", "cp")
    for i, batch in enumerate(rank.batches if sizes.E else ()):
        for layer in range(sizes.L):
            forward, backward = experts.ep(*rank.routed(i, layer), rank.held, batch,
                                           rank.group("ep"))
            yield ("ep",), forward + backward
        if rank.tp.p > 1:
            more = 2 * sizes.shared * rank.tp.all_reduce(batch.N * batch.D, w)
            yield ("tp",), sizes.L * (rank.tp.all_reduce(batch.N * batch.k, max(w, 4)) + more)
        yield ("dp", "cp"), sizes.L * sizes.aux * both.all_reduce(sizes.E, 8)
    if sizes.E:
        yield ("dp", "cp"), sizes.L * sizes.biased * both.all_reduce(sizes.E, 8)
    if rank.experts:
        yield ("edp", "cp"), dp(rank.experts, rank.group("edp", "cp"), w)


def norm_sends(rank):
    """Sum the squares of all gradients, one number, over everybody; ask for an overflow."""
    yield AXES, rank.group(*AXES).all_reduce(1, 8)
    if rank.layout.scaled:
        yield AXES, rank.group(*AXES).all_reduce(1, 4)


SENDS = [data_parallel_sends, tensor_parallel_sends, context_parallel_sends, expert_sends,
         pipeline_sends, norm_sends]


def step(sizes, layout, targets=None, routed=None, **at):
    """Predict one training step of the rank at these coordinates (dp=1, tp=0).  -> Step

    sizes: of the whole model and the global batch.  targets: how many tokens of this rank's first
    micro-batch have one; None: all.  routed(micro-batch, layer) -> rows to and from each rank of
    ep; None: dealt evenly.  A strategy adds its messages by a function in SENDS."""
    if sizes.E and (layout.recompute or layout.offload or layout.zero == 3 or layout.pp > 1):
        raise ValueError("not predicted: experts beside a pipeline, recomputation, offload, or "
                         "stage 3 of ZeRO")
    rank, sent = Rank(sizes, layout, at, routed), {}
    for sends in SENDS:
        for axes, price in sends(rank):
            long = "-".join(axis for axis in axes if getattr(layout, axis) > 1)
            if long:
                sent[long] = sent.get(long, NOTHING) + price
    moved, (P, G, state) = moves(rank), (numbers * sizes.w for numbers in rank.states())
    held = Held(0 if layout.offload and rank.zero == 3 else P, G,
                moved.buffers if layout.offload else layout.state * state,
                activations(rank, targets)[1])
    return Step(sent, held, moved, sum(flops(rank, i) for i in range(len(rank.batches))))


def moves(rank):
    """What lies elsewhere and moves: optimizer state; at stage 3 parameters, which are gathered."""
    layout, w = rank.layout, rank.sizes.w
    if not layout.offload:
        return Moved(0, 0, 0, 0)
    updated, gathered = rank.states()[2], None
    if rank.zero == 3:
        parts = zero_parts([n for n, _ in rank.shapes], rank.sizes.L, rank.sizes.tied)[1]
        gathered = 2 * layout.microbatches * sum(pieces(one, layout.dp) for one in parts)
    return offload(updated, w, layout.state, layout.offload, gathered)


# === What is kept between forward and backward, and computed ===

def activations(rank, targets=None):
    """Bytes kept of the first micro-batch.  -> when forward ends, and at the top of backward

    Stage r of p under 1F1B keeps so much of up to p - r micro-batches at a time."""
    sizes, layout, places = rank.batches[0], rank.layout, 0
    if layout.cp > 1 and layout.method != "ulysses":        # tiles; and whose keys stand where
        sizes, places = replace(sizes, tile=0), 8 * rank.sizes.T
    share = tp_share(sizes, rank.tp, layout.sequence)
    block = places + sum(kept.bytes for kept in block_activations(sizes, share))
    one = share.stream * sizes.D * sizes.w
    embed = 8 * (sizes.N + sizes.T) if rank.tp.p == 1 else (
        9 * sizes.N + 8 * sizes.T // (rank.tp.p if layout.sequence else 1))
    embed += one * sizes.dropout
    A = sizes.L * block + rank.first * embed + rank.last * head(rank, sizes, targets, block, embed)
    for layer in range(sizes.L if sizes.E else 0):
        A += experts.kept(sizes, share.hidden, sum(rank.routed(0, layer)[1]), layout.ep > 1)
        A -= sizes.N * (sizes.D + 2 * share.hidden) * sizes.w
    if layout.recompute == "attention":
        A -= sizes.L * (core(sizes, share) + places)
    if layout.recompute not in ("blocks", "sqrt"):
        return A, A
    every = 1 if layout.recompute == "blocks" else math.ceil(math.sqrt(sizes.L))
    return segmented(sizes.L, every, A - sizes.L * block, rank.first * embed, one, block)


def head(rank, sizes, targets, block, embed):
    """Bytes that the head keeps: what blocks and embedding leave of the whole."""
    one = replace(sizes, L=1)
    A = (gpt_activations(one, targets) if rank.tp.p == 1 else
         tp_activations(one, rank.tp, rank.layout.sequence))
    places = 8 * rank.sizes.T if rank.layout.cp > 1 and rank.layout.method != "ulysses" else 0
    return A - (block - places) - embed


def core(sizes, share):
    """Bytes of a block that selective recomputation does not keep: weights, and their masks.

    Queries that share keys are copied out of the projection, and kept beside it."""
    T, K = sizes.T, share.kv // (2 * sizes.e)
    weights = tiles(T, sizes.tile) + (T * T if sizes.dropout else 0) if sizes.tile else T
    copies = sizes.N * share.heads * sizes.e if 1 < K < share.heads else 0
    return (sizes.B * share.heads * weights - copies) * sizes.w


def flops(rank, i):
    """FLOPs of the products of one micro-batch, forward, backward and what is computed again.

    Two per multiply and add; backward makes two products for each one of forward."""
    sizes, E = rank.batches[i], rank.sizes.E
    N, D, share = sizes.N, sizes.D, tp_share(sizes, rank.tp)
    rows = [sum(rank.routed(i, layer)[1]) for layer in range(sizes.L)] if E else [N] * sizes.L
    mlps = sum(2 * n * D * share.hidden for n in rows)
    mlps += sizes.L * N * D * (E + 2 * share.hidden * sizes.shared)
    width = share.heads * sizes.e
    attention = 2 * N * rank.sizes.T * width
    block = N * D * (2 * width + 2 * key_rows(sizes, rank.tp)) + attention
    scores = rank.last * N * D * chunks(sizes.V, rank.tp.p)[rank.tp.rank]
    again = {None: 0, "attention": sizes.L * attention}.get(rank.layout.recompute,
                                                           sizes.L * block + mlps)
    return 2 * (3 * (sizes.L * block + mlps + scores) + again)
