"""What each strategy sends and holds in a training step, in closed form.

    cost.tp(sizes, cost.Group(p, rank, collectives.chosen))    ->  (forward, backward), two Prices

sizes are those of the whole model and of the batch that the group works on.

Lesson: mpirun -n 4 python -m lessons.tp
"""
from minidist.cost import experts
from minidist.cost.messages import NOTHING, Group, Price, all_to_all, chunks
from minidist.cost.model import Share, block_activations


# === Data parallelism: the gradients of one step ===

def ddp(buckets, group, w):
    """Price of DistributedDataParallel: one all_reduce per bucket.  About 2(p-1)/p of the gradients

    buckets: numbers in each, its gradients and one flag for every parameter."""
    return sum((group.all_reduce(n, w) for n in buckets), NOTHING)


def dp(parameters, group, w, frozen=0):
    """Price of the plain form: one all_reduce per parameter, and one for all their flags.

    parameters: numbers in each; frozen: how many more have a flag only."""
    return group.all_reduce(len(parameters) + frozen, 4) + ddp(parameters, group, w)


def buckets(parameters, w, first, cap):
    """Count the numbers in each bucket, flags included."""
    return [sum(bucket) + len(bucket) for bucket in dealt(parameters, w, first, cap)]


def dealt(parameters, w, first, cap):
    """Deal parameters of so many numbers to buckets: one closes when it has reached its limit."""
    found, limit = [[]], min(first, cap)
    for numbers in parameters:
        found[-1].append(numbers)
        if sum(found[-1]) * w >= limit:
            found.append([])
            limit = cap
    return [bucket for bucket in found if bucket]


# === Tensor and sequence parallelism: p ranks cut each layer of the GPT ===

WHOLE = Group(1)                              # the only stage of a model that is no pipeline


def tp_shapes(sizes, group, stage=WHOLE, mine=None):
    """List the numbers in each parameter that one rank holds, in the order of the forward pass.

    stage: which of the stages of a pipeline.  mine: how many of the experts, if not all; a router's
    bias, which is not trained, is left out.
    -> [(numbers, is it cut?)]: matrices are; norms, row biases and positions are whole."""
    D, share = sizes.D, tp_share(sizes, group)
    words = chunks(sizes.V, group.p)[group.rank] * D
    qkv, width = share.heads * sizes.e + 2 * key_rows(sizes, group), share.heads * sizes.e
    norm = [(D, False), (D, False)]
    attention = [(qkv * D, True), (qkv, True), (D * width, True), (D, False)]
    mlp = [(share.hidden * D, True), (share.hidden, True), (D * share.hidden, True), (D, False)]
    if sizes.E:
        own = experts.shapes(sizes, group, sizes.E if mine is None else mine)
        mlp = [(sizes.E * D, False), *((n, True) for n in own if n), *mlp * sizes.shared]
    first, last = ends(stage)
    embed = [(words, True), (sizes.T * D, False)] * first
    head = (norm if sizes.tied and first else [*norm, (words, True)]) * last
    layers = chunks(sizes.L, stage.p)[stage.rank]
    return [*embed, *layers * [*norm, *attention, *norm, *mlp], *head]


def ends(stage):
    """Has it the embedding, has it the head?"""
    return stage.rank == 0, stage.rank == stage.p - 1


def tp_parameters(sizes, group):
    """Count the parameters that one rank holds: about 1/p of them."""
    return sum(numbers for numbers, _ in tp_shapes(sizes, group))


def key_rows(sizes, group):
    """Count the rows of keys that one rank projects: whole heads, or a slice of one (p > K)."""
    sharers = max(1, group.p // sizes.K)
    return max(1, sizes.K // group.p) * chunks(sizes.e, sharers)[group.rank % sharers]


def tp_share(sizes, group, sequence=None):
    """Say what one rank has of a block.  -> Share

    sequence: None for tensor parallelism alone; "again" or "keep" for sequence parallelism that
    gathers a column-parallel layer's input again in backward, or keeps it."""
    p, N = group.p, sizes.N
    return Share(heads=sizes.H // p, kv=2 * max(1, sizes.K // p) * sizes.e,
                 hidden=chunks(sizes.F, p)[group.rank], stream=N // p if sequence else N,
                 inputs=N // p if sequence == "again" else N)


def tp(sizes, group, first=True, last=True):
    """Price of one step's tensor parallelism.  -> (forward, backward)

    first, last: is the embedding among these layers, is the head?
    Two all_reduces of [B, T, D] per layer each way; one more for the embedding (forward) and for
    the head (backward); three of [B, T] in the loss; and, where p > K, tp_keys."""
    one = group.all_reduce(sizes.N * sizes.D, sizes.w)
    forward, backward = tp_keys(sizes, group)
    return ((2 * sizes.L + first) * one + 3 * last * group.all_reduce(sizes.N, sizes.wide)
            + forward, (2 * sizes.L + last) * one + backward)


def tp_keys(sizes, group):
    """Price of sharing each key/value head among p/K ranks.  -> (forward, backward)"""
    sharers = max(1, group.p // sizes.K)
    inner = Group(sharers, group.rank % sharers, group.chosen)
    slices = [sizes.N * 2 * e for e in chunks(sizes.e, sharers)]
    return (sizes.L * inner.all_gather(slices, sizes.w),
            sizes.L * inner.reduce_scatter(slices, sizes.w))


def sp(sizes, group, keep_input=False, first=True, last=True):
    """Price of one step's sequence parallelism.  -> (forward, backward)

    Every all_reduce of tp becomes a reduce_scatter in one place and an all_gather in another;
    unless they keep their input, two layers of a block (and the head) gather it once more."""
    pieces = [sizes.N // group.p * sizes.D] * group.p
    there, back = (move(pieces, sizes.w) for move in (group.all_gather, group.reduce_scatter))
    blocks = 2 * sizes.L * (there + back)
    again = (0 if keep_input else 2 * sizes.L + last) * there
    forward, backward = tp_keys(sizes, group)
    return (blocks + first * back + last * (there + 3 * group.all_reduce(sizes.N, sizes.wide))
            + forward, blocks + first * there + last * back + again + backward)


def between_cuts(kept):
    """Say whether tensor parallelism cuts it: between a column cut and the next row cut."""
    return (kept.operation in ("attention", "linear proj", "gelu", "linear fc2")
            or kept.what == "mask of the weights")


def tp_block_activations(sizes, p, sequence=None, rank=0):
    """List what one block keeps on one of p ranks, as block_activations does.

    sequence: see tp_share."""
    return block_activations(sizes, tp_share(sizes, Group(p, rank), sequence))


def tp_activations(sizes, group, sequence=None):
    """Bytes that one of p > 1 ranks keeps between forward and backward.

    Besides the blocks: ids and positions; which words are mine, for the embedding (1 byte per
    token) and for the loss (8, and 1 twice)."""
    share, D, w = tp_share(sizes, group, sequence), sizes.D, sizes.w
    positions = sizes.T // group.p if sequence else sizes.T
    embed = 9 * sizes.N + 8 * positions + (share.stream * D * w if sizes.dropout else 0)
    logits = sizes.N * chunks(sizes.V, group.p)[group.rank] * sizes.wide
    head = (share.stream * (D + 1) + share.inputs * D) * w + logits + 10 * sizes.N
    block = sum(kept.bytes for kept in block_activations(sizes, share))
    return embed + sizes.L * block + head


# === Context parallelism: p ranks share the tokens of every row ===

def cp(sizes, group):
    """Price of one step's ring attention, in order or zigzag.  -> (forward, backward)

    Per layer p-1 blocks of keys and values forward; backward as many, and as many of gradients."""
    hops, block = group.p - 1, sizes.N // group.p * sizes.kv * sizes.w
    there = sizes.L * Price(hops, hops, hops * block)
    return there, 2 * there


def ulysses(sizes, group):
    """Price of one step's heads for tokens and back.  -> (forward, backward), which are equal

    Per layer an all_to_all of queries, keys, values and results each; p > K: of p key heads."""
    p, tokens = group.p, sizes.N // group.p * sizes.e
    heads = [sizes.H, sizes.H, *[max(sizes.K, p)] * 2]
    there = sum((all_to_all("pairwise", [tokens * h // p] * p, sizes.w, group.rank)
                 for h in heads), NOTHING)
    return sizes.L * there, sizes.L * there


# === Pipeline parallelism: m micro-batches cross the borders of stages ===

def pp(sizes, group, m, v=1, folded=False):
    """Price of one step's pipeline: m messages per border to another rank and direction.

    Each of b T D numbers, where the b add up to B, and of 32 bytes that say which they are.
    folded: the second chunks are dealt in reverse, so that the last rank has two in a row."""
    if group.p == 1:
        return NOTHING
    first, last = group.rank == 0, group.rank == group.p - 1
    borders = 2 * (2 - first - last) if folded else 2 * v - first - last
    return borders * Price(m, m, sizes.N * sizes.D * sizes.w + 32 * m)
