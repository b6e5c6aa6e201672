"""Context parallelism: the tokens of one long sequence over p ranks, in attention too.

Everything in a GPT but attention looks at one token at a time, so each rank keeps T/p tokens from
the embedding to the loss.  In attention the queries stay, and the keys and values go around:

    step        0       1       2       3        rank r meets the keys of rank r - step; what it
    rank 0     k0      k3      k2      k1        has seen so far is (out, lse), and the next keys
    rank 1     k1      k0      k3      k2        join it by `flash.merge`.  While it works on one
    rank 2     k2      k1      k0      k3        block, the next is on its way.
    rank 3     k3      k2      k1      k0

Backward sends the keys around again, with the final lse; the gradient of a block of keys travels
one step behind the block, from its right neighbour on, and ends at home after p - 1 hops.

    method     rank r of 4 holds            why
    ring       chunk r of 4                 simple; but a causal query of rank 0 sees few keys, one
                                            of rank 3 many: all wait for rank 3
    zigzag     chunks r and 7 - r of 8      an early and a late chunk: equal work in every step
    ulysses    chunk r of 4                 no ring: heads for tokens (minidist.ulysses)

Price per layer: p - 1 blocks of keys and values forward, 2(p - 1) backward; each is 2 B K e T/p
numbers.  See cost.cp.  Sums of all gradients over the group, as in data parallelism.
Gain: activations / p, and attention's time / p; weights stay whole (minidist.zero).

Lesson: mpirun -n 4 python -m lessons.cp
Paper:  Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context"
"""
import functools

import numpy as np

from minidist import BadInput, flash, ulysses
from minidist.engine.dtypes import widened
from minidist.engine.tensor import Tensor
from minidist.mesh import adopt
from minidist.placement import mark_partial


# ------------------------------------------------------------------------ who holds which tokens

def contiguous(T, p):
    """Give each rank one run of tokens.  -> p index arrays"""
    return np.split(np.arange(T), p)


def zigzag(T, p):
    """Give each rank two runs, the r-th from the front and the r-th from the back."""
    runs = np.split(np.arange(T), 2 * p)
    return [np.concatenate([runs[r], runs[-1 - r]]) for r in range(p)]


METHODS = {"ring": contiguous, "zigzag": zigzag, "ulysses": contiguous}


def take_tokens(batch, comm, method):
    """Narrow a batch to my tokens: positions and targets follow them.

    A batch without targets, of which only the logits are wanted, is left whole."""
    if batch.targets is None:
        return batch
    T = len(batch.positions)
    refuse_uneven_tokens(T, comm.size, method)
    return batch.take_tokens(METHODS[method](T, comm.size)[comm.rank])


# ------------------------------------------------------------------------ the ring

def hop(x, comm):
    """Start to send x to the right and to receive as much from the left.  -> function that waits"""
    coming = comm.irecv(np.empty_like(x), (comm.rank - 1) % comm.size)
    going = comm.isend(x, (comm.rank + 1) % comm.size)

    def arrive():
        going.wait()
        return coming.wait()

    return arrive


def forward(q, kv, comm, sights):
    """Let my queries meet the keys of all ranks.  [n, t, e], [2, n, s, e] -> out, lse

    sights[r]: how my queries see the keys of rank r.  p - 1 hops."""
    out, lse = flash.nothing(q)
    for step in range(comm.size):
        arrive = hop(kv, comm) if step < comm.size - 1 else None
        flash.attend(q, *kv, sights[comm.rank - step], out, lse)
        kv = arrive() if arrive else None
    return out, lse


def backward(q, g, kv, comm, sights):
    """Gradients of my queries, and of my keys and values.  -> [n, t, e], [2, n, s, e]

    q, g: from flash.prepare, which needs the final lse.  p - 1 hops of keys, p - 1 of gradients."""
    gq, home, gathered = np.zeros_like(q[..., :-1]), np.zeros_like(kv), None
    for step in range(comm.size):
        arrive = hop(kv, comm) if step < comm.size - 1 else None
        gkv = np.zeros_like(kv) if step else home
        flash.attend_backward(q, g, *kv, sights[comm.rank - step], gq, *gkv)
        if step:                                            # what others found, and I, goes on
            gathered = hop(gkv + gathered() if gathered else gkv, comm)
        kv = arrive() if arrive else None
    return gq, home + gathered() if gathered else home


def ring_attention(q, k, v, comm, sights):
    """Attend from my tokens to those of all ranks.  [B, H, T/p, e], [B, K, T/p, e] twice

    -> [B, H, T/p, e].  Collective: every rank calls, and calls backward."""
    shape, kv_shape, dtype, scale = q.shape, k.shape, q.dtype, q.shape[-1] ** -0.5
    K = kv_shape[1]
    qs = flash.fold(widened(q.data) * scale, K)
    kv = widened(np.array([flash.fold(k.data, K), flash.fold(v.data, K)]))
    with comm.operation("ring_attention"):
        out, lse = forward(qs, kv, comm, sights)
    y = flash.unfold(out, shape)

    def vjp(g):
        q1, g1 = flash.prepare(qs, flash.fold(widened(g), K), flash.fold(y, K), lse)
        with comm.operation("ring_attention"):
            gq, (gk, gv) = backward(q1, g1, kv, comm, sights)
        gq *= scale
        return [x.astype(dtype, copy=False) for x in (
            flash.unfold(gq, shape), gk.reshape(kv_shape), gv.reshape(kv_shape))]

    return Tensor(y.astype(dtype, copy=False), (q, k, v), vjp)


# ------------------------------------------------------------------------ in a GPT

def parallelize(model, comm, method="zigzag"):
    """Share out the tokens of every row over the ranks of comm.  method: one of METHODS

    Weights stay whole, their gradients are left to be summed after backward.  Attention works in
    tiles; with ulysses, as it did before.
    Collective.  Raises BadInput, on all ranks alike, for tokens or heads that do not divide."""
    if method not in METHODS:
        raise BadInput(f"there is no method {method!r}; use one of {', '.join(METHODS)}")
    refuse_uneven_tokens(model.config.context, comm.size, method)
    adopt(model, comm, tokens=True)
    for block in model.blocks:
        block.attn.core = make_core(block.attn, comm, method)
    model.localizers.append(functools.partial(take_tokens, comm=comm, method=method))
    for p in model.parameters():
        mark_partial(p, comm)
    return model


def refuse_uneven_tokens(T, p, method):
    """Raise BadInput unless all ranks can hold as many tokens, in as many equal runs."""
    runs = 2 * p if method == "zigzag" else p
    if T % runs:
        needs = f"{runs} runs on {p} ranks" if method == "zigzag" else f"{p} ranks"
        raise BadInput(f"{T} tokens do not split over {needs} (--cp-method {method}); "
                       f"use a context of {max(T // runs, 1) * runs} or "
                       f"{(max(T // runs, 1) + 1) * runs}")


def make_core(attn, comm, method):
    """Make what stands in for the core of one attention."""
    whole = attn.core
    if method == "ulysses":
        ulysses.refuse_uneven_heads(attn, comm.size)
        part = functools.partial(ulysses.attend, comm=comm, inner=whole)
    else:
        part = functools.partial(attend, comm=comm, method=method)

    def core(q, k, v, batch, attn):
        return (whole if batch.targets is None else part)(q, k, v, batch, attn)

    return core


def attend(q, k, v, batch, attn, comm, method):
    """Attend from the batch's tokens, which are mine, to everybody's."""
    H, K = q.shape[1], k.shape[1]
    dropout = flash.dropped(batch, attn.drop, attn.heads, K, q.dtype)
    places = METHODS[method](comm.size * len(batch.positions), comm.size)
    sights = [flash.Sight(batch.positions, keys, True, K, H // K, dropout) for keys in places]
    return ring_attention(q, k, v, comm, sights)
