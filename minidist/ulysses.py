"""DeepSpeed-Ulysses: heads for tokens, so that attention sees the whole sequence of a few heads.

Outside of attention each rank holds T/p tokens of all heads.  Heads need nothing from each other,
so one all_to_all before attention makes it all tokens of H/p heads, and one after it goes back:

             tokens                      tokens
    heads   0 | 0 | 0 | 0               0   0   0   0     heads
            1 | 1 | 1 | 1      --->     -------------
            2 | 2 | 2 | 2               1   1   1   1          any attention, as on one rank
            3 | 3 | 3 | 3      <---     -------------
         rank 0   1   2   3             2   2   2   2
                                        -------------
                                        3   3   3   3     on rank 3

Fewer key/value heads than ranks: each is sent to all the ranks whose query heads share it.

Price per layer: 4 all_to_alls forward, 4 backward; each way (2H + 2K) e B T/p numbers, of which
(p-1)/p leave the rank: as T and p grow together this stays the same, where the ring's grows with T.
Condition: p divides the heads (minidist.cp needs tokens only).  See cost.ulysses.

Lesson: mpirun -n 4 python -m lessons.ulysses
Paper:  Jacobs et al. 2023, "DeepSpeed Ulysses: system optimizations for enabling training of
        extreme long sequence transformer models"
"""
from dataclasses import replace

import numpy as np

from minidist import BadInput
from minidist.engine.tensor import Tensor
from minidist.mappings import all_to_all

HEADS, TOKENS = 1, 2                                        # dimensions of [B, H, T, e]


def to_heads(x, comm):
    """Give tokens of all heads, take all tokens of some heads.  [B, H, T/p, e] -> [B, H/p, T, e]"""
    return all_to_all(x, comm, apart=HEADS, together=TOKENS)


def to_tokens(x, comm):
    """Give all tokens of some heads, take tokens of all.  [B, H/p, T, e] -> [B, H, T/p, e]"""
    return all_to_all(x, comm, apart=TOKENS, together=HEADS)


def repeat(x, times):
    """Copy each head, for as many ranks; its gradient is the sum of theirs.

    [B, K, T, e] -> [B, K times, T, e]"""
    B, K, T, e = x.shape
    return Tensor(np.repeat(x.data, times, HEADS), (x,),
                  lambda g: (g.reshape(B, K, times, T, e).sum(2),))


def attend(q, k, v, batch, attn, comm, inner):
    """Attend with `inner`, which sees all tokens of my heads.  [B, H, T/p, e] -> [B, H, T/p, e]

    Collective: every rank calls, and calls backward."""
    if k.shape[HEADS] < comm.size:
        k, v = (repeat(x, comm.size // k.shape[HEADS]) for x in (k, v))
    q, k, v = (to_heads(x, comm) for x in (q, k, v))
    whole = replace(batch, positions=np.arange(q.shape[TOKENS]))
    mine = np.split(attn.heads, comm.size)[comm.rank]
    return to_tokens(inner(q, k, v, whole, attn, heads=mine), comm)


def refuse_uneven_heads(attn, p):
    """Raise BadInput unless each rank can have whole heads, of whole or shared groups."""
    H = len(attn.heads)
    K = max(1, H // attn.share)
    fits = [n for n in range(1, H + 1) if H % n == 0 and (K % n == 0 or n % K == 0)]
    if p not in fits:
        raise BadInput(f"{H} heads with {K} key/value heads do not split over {p} ranks; use "
                       f"--cp {', '.join(map(str, fits))}, or --cp-method zigzag")
