"""Tensor parallelism: one layer over several ranks, so that none of them holds it whole.

Cut the first matrix of a pair by columns (outputs) and the second by the matching rows (inputs),
and each rank keeps whole hidden units, whole heads.  Between the two matrices no rank needs data
from another; only the last product is a sum over the ranks:

                 rank 0   x --f--> x W1[:, 0] -> gelu -> h0 W2[0, :] --+
    x [B,T,D]                                                          +--g--> y [B,T,D] + bias
                 rank 1   x --f--> x W1[:, 1] -> gelu -> h1 W2[1, :] --+

        f = copy_to      forward: nothing        backward: all_reduce
        g = reduce_from  forward: all_reduce     backward: nothing

Attention is the same pair: its hidden units are heads.  The vocabulary is cut by words, for the
embedding as for the head, and the loss is taken without ever gathering the logits.

Price: per layer and step 2 all_reduces of [B, T, D] forward and 2 backward; one more each way for
the embedding and the head; three of [B, T] in the loss.  See cost.tp.
Gain: matrices, their gradients and their optimizer state / p; norms and row biases stay whole.

Lesson: mpirun -n 4 python -m lessons.tp
Paper:  Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models"
"""
import functools
from fnmatch import fnmatch

import numpy as np

from minidist import BadInput
from minidist.collectives import all_reduce
from minidist.cost import chunks
from minidist.engine import functional, nn
from minidist.engine.functional import IGNORE
from minidist.engine.tensor import Tensor
from minidist.mappings import all_gather, copy_to, gather, reduce_from
from minidist.mesh import adopt, key_of
from minidist.placement import Shard, cut


# ------------------------------------------------------------------------------ the layers

class ColumnParallelLinear(nn.Module):
    """Compute my share of the outputs.  [B, T, D] -> [B, T, F/p]"""

    def __init__(self, linear, parts, comm, enter=copy_to):
        self.weight, self.bias = linear.weight, linear.bias
        self.comm, self.enter = comm, enter
        cut(self.weight, key_of(comm), Shard(0, parts, comm))
        if self.bias is not None:
            cut(self.bias, key_of(comm), Shard(0, parts, comm))

    def forward(self, x):
        return functional.linear(self.enter(x, self.comm), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Multiply my share of the inputs and sum over ranks.  [B, T, F/p] -> [B, T, D]"""

    def __init__(self, linear, parts, comm, leave=reduce_from):
        self.weight, self.bias = linear.weight, linear.bias
        self.comm, self.leave = comm, leave
        cut(self.weight, key_of(comm), Shard(1, parts, comm))

    def forward(self, x):
        y = self.leave(functional.linear(x, self.weight), self.comm)
        return y if self.bias is None else y + self.bias       # once, after the sum


class VocabParallelEmbedding(nn.Module):
    """Look up my share of the words, zero for the others, and sum.  [B, T] -> [B, T, D]"""

    def __init__(self, embedding, parts, comm, leave=reduce_from):
        self.weight = embedding.weight
        self.comm, self.leave = comm, leave
        self.sizes = [len(words) for words in parts]
        cut(self.weight, key_of(comm), Shard(0, parts, comm))

    def forward(self, ids):
        mine, inside = localize(ids, self.sizes, self.comm.rank)
        return self.leave(functional.embedding(self.weight, mine, inside), self.comm)


def localize(ids, sizes, rank):
    """Count ids from my first word on; say which are mine.  IndexError on all ranks alike."""
    if ids.size and not 0 <= ids.min() <= ids.max() < sum(sizes):
        raise IndexError(f"ids from {ids.min()} to {ids.max()} in a vocabulary of {sum(sizes)}")
    mine = ids - sum(sizes[:rank])
    return mine, (mine >= 0) & (mine < sizes[rank])


# ------------------------------------------------------------------------------ the loss

def vocab_parallel_cross_entropy(logits, targets, comm, sizes=None):
    """Sum -log softmax(logits)[target] over tokens.  [B, T, V/p], [B, T] -> []

    The softmax needs three numbers per token from the other ranks, an all_reduce each, never their
    logits: the largest logit, the sum of exponentials, and the target's logit from who holds it.

    A target IGNORE, which is no word, counts nothing and gives no gradient, whatever its logits.
    Keeps for backward one array like the logits, my share of the softmax, and whose targets I hold.
    sizes: how many words each rank holds; all as many as I when not given."""
    counted = targets != IGNORE
    sizes = sizes or [logits.shape[-1]] * comm.size
    if logits.shape[-1] != sizes[comm.rank]:
        raise ValueError(f"logits of {logits.shape[-1]} words on rank {comm.rank}, which holds "
                         f"{sizes[comm.rank]} of the {sum(sizes)}: give each rank its piece")
    mine, inside = localize(np.where(counted, targets, 0), sizes, comm.rank)
    here = counted & inside                                    # tokens whose target I hold

    top = all_reduce(logits.data.max(-1, initial=-np.inf), comm, op="max")
    z = logits.data - np.where(counted, top, 0)[..., None]
    z[~counted] = 0                                            # whatever their logits are
    hit = np.zeros_like(top)
    hit[here] = z[here, mine[here]]
    hit = all_reduce(hit, comm)
    total = all_reduce(np.exp(z, out=z).sum(-1), comm)
    z /= total[..., None]                                      # my share of the softmax

    def vjp(g):
        z[here, mine[here]] -= 1
        z[...] *= (g * counted)[..., None]
        return (z,)

    return Tensor(((np.log(total) - hit) * counted).sum(), (logits,), vjp)


# ------------------------------------------------------------------------------ the plan

def words(config, p):
    """Cut the vocabulary into runs of words, whether or not it divides."""
    return np.array_split(np.arange(config.vocab), p)


def hidden_units(config, p):
    """Cut the hidden units of the MLP, whether or not they divide."""
    return np.array_split(np.arange(config.hidden), p)


def head_columns(config, p):
    """Cut what attention puts out by whole query heads."""
    return np.split(np.arange(config.width), p)


def head_rows(config, p):
    """Cut the fused rows [queries.. key value] x groups by whole groups.

    With fewer groups than ranks, several ranks share one: each takes some of its query heads,
    and a slice of its key and of its value, so that still no row lies on two ranks."""
    K, share, e = config.groups, config.heads // config.groups, config.head_width
    groups = np.arange(K * (share + 2) * e).reshape(K, share + 2, e)
    if K % p == 0:
        return [whole.ravel() for whole in np.split(groups, p)]
    return [np.concatenate([queries.ravel(), key, value])
            for group in groups
            for queries, key, value in zip(np.split(group[:share], p // K),
                                           np.array_split(group[share], p // K),
                                           np.array_split(group[share + 1], p // K))]


#        part        layer        becomes                  and rank r keeps piece r of
PLAN = [("embed",    "wte",       VocabParallelEmbedding,  words),
        ("blocks.*", "attn.qkv",  ColumnParallelLinear,    head_rows),
        ("blocks.*", "attn.proj", RowParallelLinear,       head_columns),
        ("blocks.*", "mlp.fc1",   ColumnParallelLinear,    hidden_units),
        ("blocks.*", "mlp.fc2",   RowParallelLinear,       hidden_units),
        ("blocks.*", "mlp.shared.fc1", ColumnParallelLinear, hidden_units),    # beside experts
        ("blocks.*", "mlp.shared.fc2", RowParallelLinear,    hidden_units),
        ("head",     "out",       ColumnParallelLinear,    words)]


def parallelize(model, comm, enter=copy_to, leave=reduce_from):
    """Cut a plain GPT over the ranks of comm, by PLAN; everything it does not name stays whole.

    enter and leave are the conjugate pair around each pair of matrices.  The model still takes
    the whole batch and returns the whole loss.  Collective: every rank calls.
    Raises BadInput, on all ranks alike, when the heads cannot be cut."""
    refuse_uneven_heads(model.config, comm.size)
    if enter is not copy_to and any(hasattr(block.mlp, "experts") for block in model.blocks):
        raise BadInput("sequence parallelism would give a router only some of the tokens that its "
                       "experts work on; leave out --sp, or --experts")
    adopt(model, comm)
    ends = {ColumnParallelLinear: enter, RowParallelLinear: leave, VocabParallelEmbedding: leave}
    for name, part in model.parts.items():
        for pattern, path, layer, pieces in PLAN:
            if fnmatch(name, pattern):
                *outer, last = path.split(".")
                owner = functools.reduce(lambda at, name: getattr(at, name, None), outer, part)
                if hasattr(owner, last):
                    parts = pieces(model.config, comm.size)
                    setattr(owner, last, layer(getattr(owner, last), parts, comm, ends[layer]))
    split_experts(model, comm)
    split_heads(model, comm)
    split_loss(model, comm)
    return model


def refuse_uneven_heads(config, p):
    """Raise BadInput unless every rank can have words, and whole query heads of whole or shared
    groups."""
    H, K = config.heads, config.groups
    fits = [n for n in range(1, H + 1) if H % n == 0 and (K % n == 0 or n % K == 0)]
    if p not in fits:
        grouped = "" if H == K else f" with {K} key/value heads"
        choice = ", ".join(map(str, fits))
        raise BadInput(f"{H} heads{grouped} do not split over {p} ranks; use --tp {choice}")
    if config.vocab < p:
        words = "1 word does" if config.vocab == 1 else f"{config.vocab} words do"
        raise BadInput(f"{words} not give each of {p} ranks of --tp one; use a longer text")


def split_experts(model, comm):
    """Cut the hidden units of each expert, as those of an MLP; the bias of its result by columns.

    Every rank routes all tokens, and sums up once what its pieces of a token's experts made."""
    hidden = hidden_units(model.config, comm.size)
    columns = np.array_split(np.arange(model.config.width), comm.size)
    for layer in (block.mlp for block in model.blocks if hasattr(block.mlp, "experts")):
        own = layer.experts
        for p, dim, parts in ((own.fc1, 1, hidden), (own.fc1_bias, 1, hidden),
                              (own.fc2, 2, hidden), (own.fc2_bias, 1, columns)):
            cut(p, key_of(comm), Shard(dim, parts, comm))
        own.columns = slice(columns[comm.rank][0], columns[comm.rank][-1] + 1)
        layer.enter = functools.partial(copy_to, comm=comm)
        layer.leave = functools.partial(reduce_from, comm=comm)


def split_heads(model, comm):
    """Tell each attention which heads it has now."""
    config, p = model.config, comm.size
    sharing = share_groups(config, comm) if config.groups % p else None
    for block in model.blocks:
        block.attn.heads = np.split(np.arange(config.heads), p)[comm.rank]
        if sharing:
            block.attn.split = sharing
        else:
            block.attn.groups = config.groups // p


def share_groups(config, comm):
    """Make the split for attention with fewer key/value heads than ranks.

    A rank projects only a slice of its group's key and value, and gathers the rest from the
    ranks it shares the group with: activations travel, parameters lie on one rank each."""
    sharers = comm.size // config.groups
    group = comm.split(comm.rank // sharers, comm.rank, name=comm.name + ".kv")
    heads, e = config.heads // comm.size, config.head_width
    slices = chunks(e, sharers)

    def split(z):
        B, T, _ = z.shape
        q = z[:, :, :heads * e].reshape(B, T, heads, e)
        mine = z[:, :, heads * e:].reshape(B, T, 2, slices[group.rank])
        kv = all_gather(mine, group, 3, slices)
        return [x.transpose(0, 2, 1, 3) for x in (q, kv[:, :, :1], kv[:, :, 1:])]

    return split


def split_loss(model, comm):
    """Take the loss from cut logits; gather them only for who asks for the logits themselves."""
    sizes = [len(piece) for piece in words(model.config, comm.size)]

    def around(forward, x, batch):
        y = forward(x, batch)
        return gather(y, comm, 2, sizes) if batch.targets is None else y

    head = model.parts["head"]
    head.loss = functools.partial(vocab_parallel_cross_entropy, comm=comm, sizes=sizes)
    head.wrap(around)
