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
    scale = q.dtype.type(e ** -0.5)
    qs = (q.data * scale).reshape(B, K, H // K, T, e)
    ks, vs = (np.ascontiguousarray(x.data)[:, :, None] for x in (k, v))
    out = np.empty((B, T, K, H // K, e), q.dtype).transpose(0, 2, 3, 1, 4)
    masks = None if dropout is None else dropout.reshape(B, K, H // K, T, S).swapaxes(-1, -2)
    tiles = []                                              # queries, keys they see, weights
    for rows, seen, hidden in _tiles(T, S, causal, positions, key_positions, q.dtype):
        p = _softmax(ks[..., seen, :] @ qs[..., rows, :].swapaxes(-1, -2), hidden)
        tiles.append((rows, seen, p))
        kept = p if masks is None else p * masks[..., seen, rows]
        np.matmul(kept.swapaxes(-1, -2), vs[..., seen, :], out=out[..., rows, :])

    def vjp(g):
        g = np.ascontiguousarray(g).reshape(qs.shape)
        gq, gk, gv = np.empty_like(qs), np.zeros((B, K, S, e), g.dtype), np.zeros((B, K, S, e), g.dtype)
        dot = np.einsum("bkgte,bkgte->bkgt", g, out)        # sum of weight x its gradient
        for rows, seen, p in tiles:
            gp = vs[..., seen, :] @ g[..., rows, :].swapaxes(-1, -2)
            kept = p
            if masks is not None:
                kept, gp = p * masks[..., seen, rows], gp * masks[..., seen, rows]
            _add_groups(gv[..., seen, :], kept, g[..., rows, :])
            gp -= dot[..., None, rows]
            gp *= p
            _add_groups(gk[..., seen, :], gp, qs[..., rows, :])
            np.matmul(gp.swapaxes(-1, -2), ks[..., seen, :], out=gq[..., rows, :])
        gq *= scale
        return gq.reshape(B, H, T, e), gk, gv
    return Tensor(out.reshape(B, H, T, e), (q, k, v), vjp)


def _tiles(T, S, causal, positions, key_positions, dtype):
    """Yield (queries, keys they may see, what to add to the scores of the last of these)."""
    plain = causal and positions is None and key_positions is None and T == S
    qs = np.arange(T) if positions is None else np.asarray(positions)
    ks = np.arange(S) if key_positions is None else np.asarray(key_positions)
    for lo in range(0, T, TILE):
        hi = min(lo + TILE, T)
        first, end = (lo, hi) if plain else (0, S)          # keys before `first`: all visible
        hidden = None
        if causal:
            visible = qs[lo:hi] >= ks[first:end, None]
            hidden = np.where(visible, 0, -np.inf).astype(dtype)
        yield slice(lo, hi), slice(0, end), hidden


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


def _add_groups(total, weights, x):
    """total += weights @ x, summed over the query heads of each group."""
    for i in range(weights.shape[2]):
        total += weights[:, :, i] @ x[:, :, i]
