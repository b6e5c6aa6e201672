"""Scaled dot-product attention, in tiles of queries that meet only the keys they can see.

        keys 0 ......... S-1
      +----+----+----+----+
    q | t0 |                        tile 0 needs 1 column block of 4,
    u |----+----+                   tile 1 needs 2, ...: about half the work
    e | t1 : t1 |                   of the full T x T product
    r |----+----+----+
    i | t2 : t2 : t2 |              a tile is kept transposed, [S, t], so that the
    e |----+----+----+----+         softmax reduces over rows, which NumPy vectorises
    s | t3 : t3 : t3 : t3 |
      +----+----+----+----+

Grouped heads: H query heads share K key/value heads, H/K each; keys are never copied per head.

Lesson: python -m lessons.step
Paper:  Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries)
"""
import numpy as np

from .tensor import Tensor

TILE = 64                                # queries at a time
SCORES = 1 << 17                         # scores at a time: they fit in the L2 cache


def scaled_dot_product_attention(q, k, v, causal=True, positions=None, key_positions=None,
                                 dropout=None):
    """softmax(q k^T / sqrt(e)) v.  [B, H, T, e], [B, K, S, e], [B, K, S, e] -> [B, H, T, e]

    positions, key_positions: global ids of queries and keys, [T] and [S], in any order (None:
    0..T-1, 0..S-1); a causal query sees the keys whose id is at most its own, and one that sees
    none gives 0.  dropout: what the weights are multiplied with, [B, H, T, S], or None.
    """
    (B, H, T, e), (K, S) = q.shape, k.shape[1:3]
    if H % K:
        raise ValueError(f"{H} query heads do not share {K} key/value heads evenly")
    shape, scale = (B, K, H // K, T, e), q.dtype.type(e ** -0.5)
    qs = np.multiply(q.data, scale, order="C").reshape(shape)
    ks, vs = (np.ascontiguousarray(x.data)[:, :, None] for x in (k, v))
    out = np.empty((B, T, K, H // K, e), q.dtype).transpose(0, 2, 3, 1, 4)
    masks = None if dropout is None else dropout.reshape(*shape[:4], S).swapaxes(-1, -2)
    tiles = []                                              # queries, keys they see, weights
    for mine, seen, hidden in _tiles(shape, S, causal, positions, key_positions, q.dtype):
        p = _softmax(ks[seen] @ qs[mine].swapaxes(-1, -2), hidden)
        tiles.append((mine, seen, p))
        kept = p if masks is None else p * masks[seen][..., mine[-1]]
        np.matmul(kept.swapaxes(-1, -2), vs[seen], out=out[mine])

    def vjp(g):
        g = np.ascontiguousarray(g).reshape(shape)
        empty = np.empty_like if T else np.zeros_like       # without queries no tile fills them
        gq, gk, gv = empty(qs), empty(ks), empty(vs)
        dot = np.einsum("bkgte,bkgte->bkgt", g, out)        # sum of weight x its gradient
        for mine, seen, p in tiles:
            gp, kept = vs[seen] @ g[mine].swapaxes(-1, -2), p
            if masks is not None:
                mask = masks[seen][..., mine[-1]]
                gp, kept = gp * mask, p * mask
            first = mine[-1].stop == T                      # the last queries: they meet all keys
            _sum_groups(gv[seen], kept, g[mine], first)
            gp -= dot[mine][..., None, :]
            gp *= p                                         # now the gradient of the scores
            _sum_groups(gk[seen], gp, qs[mine], first)
            np.matmul(gp.swapaxes(-1, -2), ks[seen], out=gq[mine])
        gq *= scale
        return gq.reshape(B, H, T, e), gk[:, :, 0], gv[:, :, 0]
    return Tensor(out.reshape(B, H, T, e), (q, k, v), vjp)


def _tiles(shape, S, causal, positions, key_positions, dtype):
    """Yield (index of some queries, of the keys they may see, what to add to hide the others).

    The last queries come first.  A tile takes as many batch rows as keep its scores in the cache.
    """
    B, K, groups, T, _ = shape
    plain = causal and positions is None and key_positions is None and T == S
    qs = np.arange(T) if positions is None else np.asarray(positions)
    ks = np.arange(S) if key_positions is None else np.asarray(key_positions)
    batch = max(1, SCORES // max(1, K * groups * S * min(T, TILE)))
    for lo in reversed(range(0, T, TILE)):
        mine = slice(lo, min(lo + TILE, T))
        seen = slice(0, mine.stop if plain else S)
        masked = slice(lo if plain else 0, seen.stop)       # earlier keys are visible to all
        hidden = np.where(qs[mine] < ks[masked, None], -np.inf, 0).astype(dtype)
        for i in range(0, B, batch):
            some = slice(i, i + batch), slice(None), slice(None)
            yield (*some, mine), (*some, seen), hidden if causal else None


def _softmax(s, hidden):
    """Normalise each column of scores, in place; a column without visible keys becomes 0."""
    if hidden is not None:
        s[..., s.shape[-2] - len(hidden):, :] += hidden
    s -= np.maximum(s.max(-2, keepdims=True), np.finfo(s.dtype).min)
    np.exp(s, out=s)
    total = s.sum(-2, keepdims=True)
    total[total == 0] = 1
    s /= total
    return s


def _sum_groups(total, weights, x, first):
    """Add weights @ x, for all query heads of a group, to the one head they share."""
    total = total[:, :, 0]
    for i in range(weights.shape[2]):
        if first and i == 0:
            np.matmul(weights[:, :, i], x[:, :, i], out=total)
        else:
            total += weights[:, :, i] @ x[:, :, i]
