"""A GPT in the manner of GPT-2: pre-norm blocks, learned positions, one process, nothing else.

    tokens [B,T] -> embed -> blocks.0 -> ... -> blocks.L-1 -> head -> sum of the losses

          x --+--------------------------(+)--+------------------(+)-->      x is [B, T, D]
              |                           |   |                   |
              norm1 - attn - drop1 -------+   norm2 - mlp - drop2 +

The model is an ordered dict of parts, each called part(x, batch); its loss is the *sum* over the
target tokens, so that sums over pieces of a batch add up to the sum over the batch.

Lesson: python -m lessons.step
Paper:  Radford et al. 2019, "Language models are unsupervised multitask learners"
"""
from dataclasses import dataclass, replace

import numpy as np

from minidist import BadInput
from minidist.engine import functional as F
from minidist.engine.data import Batch
from minidist.engine.nn import Dropout, Embedding, LayerNorm, Linear, Module
from minidist.engine.tensor import no_grad


@dataclass(frozen=True)
class GPTConfig:
    """Fix the sizes of a model.  heads share kv_heads key/value heads (None: one each)."""
    vocab: int
    context: int
    width: int
    heads: int
    layers: int
    kv_heads: int | None = None
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self):
        sizes = dict(vocab=self.vocab, context=self.context, width=self.width, heads=self.heads,
                     layers=self.layers, kv_heads=self.groups)
        for name, size in sizes.items():
            if size < 1:
                raise BadInput(f"{name} = {size}: a model needs at least 1")
        if self.width % self.heads:
            raise BadInput(f"{self.heads} heads do not divide a width of {self.width}; "
                           f"use {divisors(self.width)} heads")
        if self.heads % self.groups:
            raise BadInput(f"{self.groups} key/value heads do not divide {self.heads} heads; "
                           f"use {divisors(self.heads)} key/value heads")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"dropout = {self.dropout}: the share must be at least 0 and below 1")

    @property
    def groups(self):
        """Number of key/value heads: each serves one group of query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self):
        return self.width // self.heads

    @property
    def hidden(self):
        return 4 * self.width


PRESETS = {
    "lesson": dict(context=16, width=48, heads=12, layers=4),        # cuts over 1, 2, 3 and 4
    "nano": dict(context=64, width=128, heads=4, layers=4),
    "mini": dict(context=256, width=384, heads=6, layers=6),
}


def sizes(name, **over):
    """Look up a preset's sizes; keyword arguments replace single ones.  -> dict"""
    if name not in PRESETS:
        raise BadInput(f"there is no preset {name!r}; use one of {', '.join(PRESETS)}")
    return {**PRESETS[name], **over}


def preset(name, vocab, **over):
    """Make a preset's configuration; keyword arguments replace its sizes."""
    return GPTConfig(vocab=vocab, **sizes(name, **over))


def divisors(n):
    """Spell out the divisors of n: '1, 2, 3 or 6'."""
    found = [str(d) for d in range(1, n + 1) if n % d == 0]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


class Embed(Module):
    """Turn tokens into vectors: what the token is plus where it stands.  [B, T] -> [B, T, D]"""

    def __init__(self, config, seed, dtype):
        self.wte = Embedding("embed.wte", config.vocab, config.width, seed, dtype)
        self.wpe = Embedding("embed.wpe", config.context, config.width, seed, dtype)
        self.drop = Dropout("embed.drop", config.dropout, seed)

    def forward(self, _, batch):
        return self.drop(self.wte(batch.tokens) + self.wpe(batch.stream), batch)


class Attention(Module):
    """Let every token gather from those before it, once per head.  [B, T, D] -> [B, T, D]

    The rows of qkv are grouped by key/value head: [its query heads, its key, its value], so that
    a contiguous piece of rows is a set of whole heads.  Four fields may be replaced from outside;
    they are fields because neither the parameters nor the callers change with them:
        heads   global ids of my query heads, by which the dropout masks are indexed
        groups  number of my key/value heads
        split   another way to take qkv apart, for rows that are not whole key/value heads
        core    another attention, as for keys that are held elsewhere; called like attend
    """

    def __init__(self, name, config, seed, dtype):
        self.heads = np.arange(config.heads)                     # global ids of my query heads
        self.groups = config.groups                              # number of my key/value heads
        self.share = config.heads // config.groups               # query heads in one group
        self.head_width = config.head_width
        rows = self.groups * (self.share + 2) * self.head_width
        self.qkv = Linear(name + ".qkv", rows, config.width, seed, dtype)
        self.drop = Dropout(name + ".drop", config.dropout, seed)
        self.proj = Linear(name + ".proj", config.width, config.width, seed, dtype,
                           std=residual_std(config))
        self.core = attend

    def split(self, z):
        """Take the projection apart.  [B, T, K(H/K + 2)e] -> [B, H, T, e], twice [B, K, T, e]"""
        B, T, _ = z.shape
        K, share, e = self.groups, self.share, self.head_width
        z = z.reshape(B, T, K, share + 2, e)
        q = z[:, :, :, :share].reshape(B, T, K * share, e)
        k, v = z[:, :, :, share], z[:, :, :, share + 1]
        return [x.transpose(0, 2, 1, 3) for x in (q, k, v)]

    def forward(self, x, batch):
        q, k, v = self.split(self.qkv(x))
        y = self.core(q, k, v, batch, self)
        B, H, T, e = y.shape
        return self.proj(y.transpose(0, 2, 1, 3).reshape(B, T, H * e))


def attend(q, k, v, batch, attn, heads=None, key_positions=None, **options):
    """Attend from the batch's tokens to the keys at key_positions (None: to the same tokens).

    heads: global ids of the query heads in q (None: attn.heads).  options: see
    scaled_dot_product_attention.
    """
    heads = attn.heads if heads is None else heads
    keys = batch.positions if key_positions is None else key_positions
    mask = attn.drop.mask(batch.step, q.dtype, batch.rows, heads, batch.positions, keys)
    return F.scaled_dot_product_attention(q, k, v, positions=batch.positions, key_positions=keys,
                                          dropout=mask, **options)


class MLP(Module):
    """Two matrices with a gelu between them, applied to each token alone.  [B, T, D] -> [B, T, D]

    The hidden width is 4 D.
    """

    def __init__(self, name, config, seed, dtype):
        D, hidden = config.width, config.hidden
        self.fc1 = Linear(name + ".fc1", hidden, D, seed, dtype)
        self.fc2 = Linear(name + ".fc2", D, hidden, seed, dtype, std=residual_std(config))

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def residual_std(config):
    """Scale down what adds to the residual stream: 2L such terms together keep its variance."""
    return 0.02 / np.sqrt(2 * config.layers)


class Block(Module):
    """Add to each token what attention finds, then what the MLP makes of it.  [B, T, D] -> same"""

    def __init__(self, name, config, seed, dtype):
        self.norm1 = LayerNorm(name + ".norm1", config.width, dtype)
        self.attn = Attention(name + ".attn", config, seed, dtype)
        self.drop1 = Dropout(name + ".drop1", config.dropout, seed)
        self.norm2 = LayerNorm(name + ".norm2", config.width, dtype)
        self.mlp = MLP(name + ".mlp", config, seed, dtype)
        self.drop2 = Dropout(name + ".drop2", config.dropout, seed)

    def forward(self, x, batch):
        x = x + self.drop1(self.attn(self.norm1(x), batch), batch)
        return x + self.drop2(self.mlp(self.norm2(x)), batch)


class Head(Module):
    """Score the next token and sum the losses.  [B, T, D] -> []; without targets, [B, T, V]

    `loss` may be replaced from outside, for logits of only a piece of the vocabulary; it is a field
    because neither the parameters nor the callers change with it.
    """

    def __init__(self, config, seed, dtype, tied=None):
        self.norm = LayerNorm("head.norm", config.width, dtype)
        self.out = Linear("head.out", config.vocab, config.width, seed, dtype, bias=False)
        if tied is not None:
            self.out.weight = tied

    def loss(self, logits, targets):
        return F.cross_entropy(logits, targets)[0]

    def forward(self, x, batch):
        logits = self.out(self.norm(x))
        return logits if batch.targets is None else self.loss(logits, batch.targets)


class GPT(Module):
    """Predict every next token: a dict of parts, called one after the other."""

    def __init__(self, config, seed=0, dtype=np.float32):
        self.config = config
        self.localizers = []                     # each narrows a batch to the piece that is mine
        self.parts = {"embed": Embed(config, seed, dtype)}
        for i in range(config.layers):
            self.parts[f"blocks.{i}"] = Block(f"blocks.{i}", config, seed, dtype)
        tied = self.parts["embed"].wte.weight if config.tied else None
        self.parts["head"] = Head(config, seed, dtype, tied)

    @property
    def blocks(self):
        return [part for name, part in self.parts.items() if name.startswith("blocks.")]

    def localize(self, batch):
        """Narrow a global batch to the piece that this model works on; a piece stays as it is."""
        if batch.narrowed:
            return batch
        for narrow in self.localizers:
            batch = narrow(batch)
        return replace(batch, narrowed=True)

    def forward(self, batch, x=None):
        batch = self.localize(batch)
        for part in self.parts.values():
            x = part(x, batch)
        return x

    def logits(self, batch):
        """Score every next token.  [B, T] -> [B, T, V]"""
        return self(replace(batch, targets=None))


def generate(model, tokens, count, rng):
    """Continue a list of tokens by count more, each drawn from the model's distribution."""
    tokens = list(tokens)
    with no_grad():
        for _ in range(count):
            recent = np.array([tokens[-model.config.context:]])
            scores = model.logits(Batch.of(recent)).data[0, -1].astype(np.float64)
            if not np.isfinite(scores.max()):
                raise FloatingPointError(f"the best score of a next token is {scores.max()}")
            weights = np.exp(scores - scores.max())
            tokens.append(int(rng.choice(len(weights), p=weights / weights.sum())))
    return tokens
