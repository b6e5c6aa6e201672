"""Attention in tiles, with an online softmax: a T x T matrix is never held, forward or backward.

    keys   0 ......... S-1          A tile of queries meets one tile of keys after the other.
         +----+----+----+----+      What it has seen so far fits in two things per query:
    q  0 | \\  |    |    |    |
    u    |----+----+----+----+        out   the result, as if these were all the keys
    e    | ## | \\  |    |    |        lse   log of the sum of exp(score), their total weight
    r    |----+----+----+----+
    i    | ## | ## | \\  |    |      merge joins what two sets of keys say:
    e    |----+----+----+----+
    s    | ## | ## | ## | \\  |        lse = log(exp(lse1) + exp(lse2))
         +----+----+----+----+        out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

The scores of a tile die with it.  Backward computes them again, and needs no softmax for that:
a weight is exp(score - lse).  Tiles above the diagonal are skipped, by position.

`attend` and `attend_backward` add one set of keys to a state, so that keys may come in portions,
from other ranks too (minidist.cp).  Grouped heads are folded into rows: the H/K queries of one
token that share a key head are H/K rows of one matrix.

Price: one product more than plain attention, of seven: backward makes the scores a second time.
Gain: bytes held grow with T, not with T^2: q, k, v, out and one lse per query.

Lesson: python -m lessons.flash
Paper:  Dao et al. 2022, "FlashAttention"; Milakov & Gimelshein 2018, "Online normalizer
        calculation for softmax"
"""
import math
from typing import NamedTuple

import numpy as np

from minidist.engine.dtypes import widened
from minidist.engine.tensor import Tensor

QUERIES, KEYS = 128, 1024                 # a tile: its scores fit in the L2 cache
SCORES = 1 << 17                         # smaller tiles are taken several heads at a time
LOG2E = math.log2(math.e)                # NumPy's exp2 takes half the time of its exp


# ------------------------------------------------------------------------ the online softmax

def block(q, k, v, hidden=None, mask=None):
    """Attend to one tile of keys alone.  [n, t, e], [n, s, e], [n, s, e] -> [n, t, e], [n, t]

    k is times log2(e): powers of 2 are taken.  hidden: what to add to the scores of the last keys,
    -inf or 0; mask: what to multiply the weights with (dropout).  A query that sees no key gets
    0 and -inf."""
    s = k @ q.swapaxes(-1, -2)                              # [n, s, t]: reduces over rows
    if hidden is not None:
        s[:, -len(hidden):] += hidden
    top = np.maximum(s.max(-2), np.finfo(s.dtype).min)
    s -= top[:, None]
    np.exp2(s, out=s)
    total = np.ones(s.shape[-2], s.dtype) @ s
    if mask is not None:
        s *= mask
    out = s.swapaxes(-1, -2) @ v
    out /= np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):                      # log(0) = -inf: no key seen
        return out, (np.log2(total) + top) / s.dtype.type(LOG2E)


def merge(out, lse, out_new, lse_new):
    """Take what other keys say into out and lse, in place.  [..., e], [...], twice

    A set that nobody sees has lse = -inf, and changes nothing."""
    # The share of the new keys depends on the difference alone: exact to the digit where both
    # lse are some 10,000.  Lowest: not -inf - -inf.
    ahead = lse_new - np.maximum(lse, np.finfo(lse.dtype).min)
    share = np.exp(-np.logaddexp(0, -ahead))                # 1 / (1 + exp(-ahead))
    lse[...] = np.logaddexp(lse, lse_new)
    out_new = out_new - out
    out_new *= share[..., None]
    out += out_new


def attend(q, k, v, sight, out, lse):
    """Add what these keys say to the state.  [n, t, e], [n, s, e] twice; out [n, t, e], lse [n, t]

    q: scaled.  A state that has seen nothing is out = 0, lse = -inf (see `nothing`)."""
    k = k * k.dtype.type(LOG2E)
    for mine, seen, hidden, mask in sight.tiles(len(q), q.dtype):
        merge(out[mine], lse[mine], *block(q[mine], k[seen], v[seen], hidden, mask))


def nothing(q):
    """Make the state of queries that have seen no key.  -> out, lse"""
    return np.zeros_like(q), np.full(q.shape[:2], -np.inf, q.dtype)


# ------------------------------------------------------------------------ backward

def prepare(q, g, out, lse):
    """Give queries and gradients a last column, which makes products subtract: -lse, -dot.

    dot: sum over keys of weight x its gradient, which is g . out.  A query that saw nothing gets
    -inf, and so weights of 0.  -> [n, t, e + 1] twice"""
    lse = np.where(lse == -np.inf, np.inf, lse * lse.dtype.type(LOG2E))
    return with_column(q, -lse), with_column(g, -np.einsum("nte,nte->nt", g, out))


def with_column(x, column):
    """Append a column.  [n, t, e], [n, t] or number -> [n, t, e + 1]"""
    column = np.broadcast_to(np.asarray(column, x.dtype), x.shape[:2])
    return np.concatenate([x, column[..., None]], -1)


def attend_backward(q, g, k, v, sight, gq, gk, gv):
    """Add the gradients that come from these keys to gq, gk and gv.  q, g: from `prepare`"""
    k1, v1 = with_column(k * k.dtype.type(LOG2E), 1), with_column(v, 1)
    for mine, seen, hidden, mask in sight.tiles(len(q), q.dtype):
        qt, gt, dot = q[mine], g[mine], g[mine][:, None, :, -1]
        p = k1[seen] @ qt.swapaxes(-1, -2)                  # score - lse, in powers of 2
        if hidden is not None:
            p[:, -len(hidden):] += hidden
        np.exp2(p, out=p)                                   # the weights
        gp = v1[seen] @ gt.swapaxes(-1, -2)                 # their gradient, less dot
        gp = gp if mask is None else (gp - dot) * mask + dot
        gp *= p                                             # the gradient of the scores
        kept = p if mask is None else p * mask
        gv[seen] += kept @ gt[..., :-1]
        gk[seen] += gp @ qt[..., :-1]
        gq[mine] += gp.swapaxes(-1, -2) @ k[seen]


# ------------------------------------------------------------------------ who sees whom

def spans(positions, length):
    """Cut into runs of successive positions, and those into slices of at most this length."""
    start = 0
    for end in [*np.flatnonzero(np.diff(positions) != 1) + 1, len(positions)]:
        for at in range(start, end, length):
            yield slice(at, min(at + length, end))
        start = end


def tiles(queries, keys, causal=True, height=QUERIES, width=KEYS):
    """List the tiles that are computed: (slice of the queries, slice of the keys).

    A causal query sees the keys whose position is at most its own."""
    columns = list(spans(keys, width))
    for mine in spans(queries, height):
        last = queries[mine.stop - 1]
        for seen in columns:
            stop = min(seen.stop, seen.start + last - keys[seen.start] + 1) if causal else seen.stop
            if stop > seen.start:
                yield mine, slice(seen.start, stop)


class Sight(NamedTuple):
    """Who sees whom: positions of queries [T] and keys [S], and what is dropped.

    K key heads, each for `share` query heads.  dropout(some, i, j): what the weights of matrices
    some, a slice of the B K, are multiplied with, for queries at positions i and keys at positions
    j, [n, share, t, s]; or None.  A slice takes some heads of one row, or whole rows."""
    queries: np.ndarray
    keys: np.ndarray
    causal: bool = True
    K: int = 1
    share: int = 1
    dropout: object = None

    def tiles(self, n, dtype):
        """Yield (index of some rows of queries, of the keys they meet, hidden, mask)."""
        height = max(1, QUERIES // self.share)
        for mine, seen in tiles(self.queries, self.keys, self.causal, height):
            i, j = self.queries[mine], self.keys[seen]
            hidden = self.hidden(i, j[j > i[0]], dtype) if self.causal and j[-1] > i[0] else None
            rows = slice(mine.start * self.share, mine.stop * self.share)
            few = self.at_once(SCORES // (len(i) * self.share * len(j)))
            for some in (slice(a, min(a + few, n)) for a in range(0, n, few)):
                yield (some, rows), (some, seen), hidden, self.mask(some, i, j)

    def at_once(self, most):
        """Say how many matrices to take: whole rows of K, or a part of one that divides K."""
        if most >= self.K:
            return most // self.K * self.K
        return next(few for few in range(max(1, most), 0, -1) if self.K % few == 0)

    def hidden(self, i, j, dtype):
        """Hide later keys; j: those that are later for some query.  -> [s, t]"""
        return np.where(np.repeat(i, self.share) < j[:, None], dtype.type(-np.inf), dtype.type(0))

    def mask(self, some, i, j):
        """Collect the dropout masks of some matrices, rows as they are folded.  -> [n, s, t]"""
        if self.dropout is None:
            return None
        mask = self.dropout(some, i, j).transpose(0, 3, 2, 1)
        return mask.reshape(len(mask), len(j), -1)


# ------------------------------------------------------------------------ on the tape

def fold(x, K):
    """Make the heads that share a key head rows of one matrix.  [B, H, T, e] -> [B K, T H/K, e]"""
    B, H, T, e = x.shape
    return x.reshape(B, K, H // K, T, e).swapaxes(2, 3).reshape(B * K, T * H // K, e)


def unfold(x, shape):
    """Undo fold.  [B K, T H/K, e] -> shape, [B, H, T, e]

    A view of [B, T, H, e], the layout in which the next layer takes it, and keeps it, uncopied."""
    B, H, T, e = shape
    share = x.shape[1] // T                                     # B may be 0, a batch without rows
    x = x.reshape(B, H // share, T, share, e).swapaxes(1, 2)
    return np.ascontiguousarray(x).reshape(B, T, H, e).swapaxes(1, 2)


def attention(q, k, v, causal=True, positions=None, key_positions=None, dropout=None):
    """softmax(q k^T / sqrt(e)) v.  [B, H, T, e], [B, K, S, e], [B, K, S, e] -> [B, H, T, e]

    positions, key_positions: global positions of queries and keys (None: 0, 1, ...), in any order;
    runs of successive ones are fast.  A causal query that sees no key gives 0.
    dropout(some, i, j): see Sight."""
    (B, H, T, e), (K, S) = q.shape, k.shape[1:3]
    if H % K:
        raise ValueError(f"{H} query heads do not share {K} key/value heads evenly")
    sight = Sight(np.arange(T) if positions is None else np.asarray(positions),
                  np.arange(S) if key_positions is None else np.asarray(key_positions),
                  causal, K, H // K, dropout)
    shape, dtype, scale = q.shape, q.dtype, e ** -0.5
    qs = fold(widened(q.data) * scale, K)
    ks, vs = (fold(widened(x.data), K) for x in (k, v))
    out, lse = nothing(qs)
    attend(qs, ks, vs, sight, out, lse)
    y = unfold(out, shape)

    def vjp(g):
        gq, gk, gv = np.zeros_like(qs), np.zeros_like(ks), np.zeros_like(vs)
        q1, g1 = prepare(qs, fold(widened(g), K), fold(y, K), lse)
        attend_backward(q1, g1, ks, vs, sight, gq, gk, gv)
        gq *= scale
        return [x.astype(dtype, copy=False) for x in (
            unfold(gq, shape), gk.reshape(B, K, S, e), gv.reshape(B, K, S, e))]

    return Tensor(y.astype(dtype, copy=False), (q, k, v), vjp)


# ------------------------------------------------------------------------ in a GPT

def use(model):
    """Let every attention of a GPT work in tiles."""
    for block in model.blocks:
        block.attn.core = core
    return model


def core(q, k, v, batch, attn, heads=None, key_positions=None):
    """Stand in for gpt.attend."""
    keys = batch.positions if key_positions is None else key_positions
    heads = attn.heads if heads is None else heads
    return attention(q, k, v, positions=batch.positions, key_positions=keys,
                     dropout=dropped(batch, attn.drop, heads, k.shape[1], q.dtype))


def dropped(batch, drop, heads, K, dtype):
    """Say what dropout does to a piece of the weights: a function as Sight wants it, or None.

    heads: global ids of the query heads, which share K key heads."""
    if not drop.rate or batch.step is None:
        return None
    groups = np.reshape(heads, (K, -1))

    def mask(some, i, j):
        rows = batch.rows[some.start // K:(some.stop - 1) // K + 1]
        mine = groups[some.start % K:some.start % K + some.stop - some.start]
        return drop.mask(batch.step, dtype, rows, mine.reshape(-1), i, j).reshape(
            -1, groups.shape[1], len(i), len(j))

    return mask
