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

The picture is of positions, not of places in an array: queries and keys are sorted by position if
they are not, so a piece of the sequence, or a zigzag of pieces, skips what it cannot see as well.
Grouped heads: H query heads share K key/value heads, H/K each; keys are never copied per head.

Lesson: python -m lessons.step
Paper:  Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries)
"""
import numpy as np

from .dtypes import product, widened
from .tape import forgetting
from .tensor import Tensor

TILE = 64                                # queries at a time
SCORES = 1 << 17                         # scores at a time: they fit in the L2 cache


def scaled_dot_product_attention(q, k, v, causal=True, positions=None, key_positions=None,
                                 dropout=None, return_lse=False):
    """softmax(q k^T / sqrt(e)) v.  [B, H, T, e], [B, K, S, e], [B, K, S, e] -> [B, H, T, e]

    positions, key_positions: global ids of queries and keys, [T] and [S], in any order (None:
    0..T-1, 0..S-1); a causal query sees the keys whose id is at most its own, and one that sees
    none gives 0.  dropout: what the weights are multiplied with, [B, H, T, S], or None.
    return_lse: return (y, lse), lse = log sum exp of each query's scores, [B, H, T] (-inf: it sees
    none).  With it, results y_i on pieces of the keys merge, gradients included, into the result on
    all of them: the sum of y_i exp(lse_i - lse), where lse = log sum exp(lse_i).
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not share {k.shape[1]} key/value heads "
                         "evenly")
    ids, rows = _ascending(positions, q.shape[2], causal)
    key_ids, columns = _ascending(key_positions, k.shape[2], causal)
    q, k, v = _take(q, rows), _take(k, columns), _take(v, columns)
    if dropout is not None and (rows is not None or columns is not None):
        dropout = dropout[:, :, _all(rows)][..., _all(columns)]
    y = _attention(q, k, v, causal, ids, key_ids, dropout, return_lse)
    y = _take(y, None if rows is None else np.argsort(rows))
    return (y[..., :-1], y[..., -1]) if return_lse else y


def _ascending(positions, n, causal):
    """Sort positions, if attention depends on them.  -> sorted, the order or None if they were"""
    ids = np.arange(n) if positions is None else np.asarray(positions)
    if not causal or (ids[:-1] <= ids[1:]).all():
        return ids, None
    order = np.argsort(ids, kind="stable")
    return ids[order], order


def _all(order):
    return slice(None) if order is None else order


def _take(x, order):
    """Put the tokens of [B, H, T, e] into another order; None: leave them."""
    if order is None:
        return x
    back = np.argsort(order)
    return Tensor(x.data[:, :, order], (x,), lambda g: (g[:, :, back],))


def _attention(q, k, v, causal, ids, key_ids, dropout, with_lse):
    """Attend, ids ascending.  -> [B, H, T, e], or with the log-sum-exp behind it, [B, H, T, e+1]"""
    (B, H, T, e), (K, S) = q.shape, k.shape[1:3]
    shape, scale = (B, K, H // K, T, e), q.dtype.type(e ** -0.5)
    qs = np.multiply(q.data, scale, order="C").reshape(shape)
    ks, vs = (np.ascontiguousarray(x.data)[:, :, None] for x in (k, v))
    masks = None if dropout is None else dropout.reshape(*shape[:4], S).swapaxes(-1, -2)
    every = T and S and not (causal and (ids[0] < key_ids[0] or ids[-1] < key_ids[-1]))
    blank = np.empty if every else np.zeros                 # zero where no tile comes by
    result = blank((B, T, K, H // K, e + with_lse), q.dtype).transpose(0, 2, 3, 1, 4)
    result[..., e:] = -np.inf
    plan = _tiles(shape, S, causal, ids, key_ids, q.dtype)
    tiles, out = _forward(plan, masks, qs, ks, vs, result), result[..., :e]

    def vjp(g):
        g, g_lse = np.split(g.reshape(result.shape), [e], -1)
        g = np.ascontiguousarray(g)
        dot = np.einsum("bkgte,bkgte->bkgt", g, out)
        if with_lse:
            dot -= g_lse[..., 0]                            # d lse / d score is the weight
        gq, gk, gv = (blank(x.shape, x.dtype) for x in (qs, ks, vs))
        _backward(tiles, masks, (g, dot, qs, ks, vs), (gq, gk, gv))
        gq *= scale
        return gq.reshape(B, H, T, e), gk[:, :, 0], gv[:, :, 0]
    return Tensor(result.reshape(B, H, T, e + with_lse), (q, k, v), vjp)


def _forward(plan, masks, qs, ks, vs, result):
    """Fill in the result, with the log-sum-exp if it has a place for it.

    -> tiles for backward: (queries, keys, weights)
    """
    e, tiles = vs.shape[-1], []
    for mine, seen, hidden in plan:
        scores = widened(ks[seen]) @ widened(qs[mine]).swapaxes(-1, -2)
        p, top, total = _softmax(scores, hidden, qs.dtype)
        if not forgetting():
            tiles.append((mine, seen, p))
        kept = p if masks is None else p * masks[seen][..., mine[-1]]
        product(kept.swapaxes(-1, -2), vs[seen], out=result[mine][..., :e])
        if result.shape[-1] > e:
            with np.errstate(divide="ignore"):              # log 0 = -inf is what is meant
                result[mine][..., e] = (top + np.log(total))[..., 0, :]
    return tiles


def _backward(tiles, masks, arrays, gradients):
    """Fill in the gradients of scaled queries, keys, values.  dot: sum of weight x its gradient"""
    (g, dot, qs, ks, vs), (gq, gk, gv) = arrays, gradients
    for mine, seen, p in tiles:
        gp, kept = widened(vs[seen]) @ widened(g[mine]).swapaxes(-1, -2), p
        if masks is not None:
            mask = masks[seen][..., mine[-1]]
            gp, kept = gp * mask, p * mask
        first = mine[-1].stop == qs.shape[3]                # the last queries: they come first
        _sum_groups(gv[seen], kept, g[mine], first)
        gp -= dot[mine][..., None, :]
        gp *= p                                             # now the gradient of the scores
        _sum_groups(gk[seen], gp, qs[mine], first)
        product(gp.swapaxes(-1, -2), ks[seen], out=gq[mine])


def _tiles(shape, S, causal, ids, key_ids, dtype):
    """Yield (index of some queries, of the keys they may see, what to add to hide the others).

    The last queries come first: they see all keys that any query sees.  Queries that see no key
    are left out.  A tile takes as many batch rows as keep its scores in the cache.
    """
    B, K, groups, T, _ = shape
    batch = max(1, SCORES // max(1, K * groups * S * min(T, TILE)))
    for lo in reversed(range(0, T, TILE)):
        mine, seen, hidden = slice(lo, min(lo + TILE, T)), slice(0, S), None
        if causal:
            plain, end = np.searchsorted(key_ids, (ids[lo], ids[mine.stop - 1]), "right")
            seen = slice(0, end)                            # the first `plain` are seen by all
            hidden = np.where(ids[mine] < key_ids[plain:end, None], -np.inf, 0).astype(dtype)
        for i in range(0, B if seen.stop else 0, batch):
            some = slice(i, i + batch), slice(None), slice(None)
            yield (*some, mine), (*some, seen), hidden


def _softmax(s, hidden, dtype):
    """Normalise each column of scores, in place; one without visible keys becomes 0.

    -> weights, largest score of each column, sum of exp above it; hidden: for the last keys
    """
    if hidden is not None and len(hidden):
        s[..., s.shape[-2] - len(hidden):, :] += hidden
    top = np.maximum(s.max(-2, keepdims=True), np.finfo(s.dtype).min)
    s -= top
    np.exp(s, out=s)
    total = s.sum(-2, keepdims=True)
    s /= np.where(total == 0, total.dtype.type(1), total)
    return s.astype(dtype, copy=False), top, total


def _sum_groups(total, weights, x, first):
    """Add weights @ x, for all query heads of a group, to the one head they share."""
    total = total[:, :, 0]
    for i in range(weights.shape[2]):
        if first and i == 0:
            product(weights[:, :, i], x[:, :, i], out=total)
        else:
            total += product(weights[:, :, i], x[:, :, i])
