"""Mixture of experts: each token goes through k of E MLPs, chosen by a router; one process.

    x [n,D] -> router -> chosen experts [n,k], gates [n,k]
            -> rows in expert order -> expert e on its run of rows -> back, times gate, sum over k

A token that an expert has no place for gets zero from it; the gates of the others stay as they are.
Auxiliary losses are sums over tokens, like the loss itself.
Capacity and balance count the tokens of one call: pieces of a batch count each for itself, so
dropless training without the balance loss is the one that does not depend on how it is cut.

Papers: Lepikhin et al. 2020, "GShard"; Fedus et al. 2021, "Switch Transformers"
"""
import math
from dataclasses import dataclass

import numpy as np

from minidist import BadInput
from minidist.engine import functional as F
from minidist.engine import tensor as T
from minidist.engine.gpt import MLP, residual_std
from minidist.engine.nn import Module, Parameter, init


@dataclass(frozen=True)
class MoEConfig:
    """Fix how tokens are routed.  capacity: a factor (None: dropless); drop: which go first."""
    experts: int
    top_k: int = 1
    capacity: float | None = None
    drop: str = "probability"
    aux: float = 0.0
    z: float = 0.0
    shared: bool = False

    def __post_init__(self):
        if not 1 <= self.top_k <= self.experts:
            raise BadInput(f"top_k = {self.top_k} of {self.experts} experts: use 1 to "
                           f"{self.experts}")
        if self.capacity is not None and not self.capacity > 0:
            raise BadInput(f"capacity = {self.capacity}: use a factor above 0, or none")
        if self.drop not in ("probability", "position"):
            raise BadInput(f"drop = {self.drop!r}: use 'probability' or 'position'")


def choose(scores, k):
    """Find the k largest of each row, ties to the lower index.  [n, E] -> [n, k]"""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def count(chosen, experts):
    """Count the tokens that chose each expert.  [n, k] -> [E]"""
    return np.bincount(chosen.reshape(-1), minlength=experts)


def places(tokens, config):
    """Places of one expert for so many tokens: ceil(tokens k / E x capacity)."""
    return math.ceil(tokens * config.top_k / config.experts * config.capacity)


def keep(chosen, probabilities, config):
    """Say which choices have a place.  [n, k], [n, k] -> bool [n, k]"""
    if config.capacity is None:
        return np.ones(chosen.shape, bool)
    limit, flat = places(len(chosen), config), chosen.reshape(-1)
    kept = np.zeros(flat.shape, bool)
    for e in range(config.experts):
        mine = np.flatnonzero(flat == e)
        if config.drop == "probability":
            mine = mine[np.argsort(-probabilities.reshape(-1)[mine], kind="stable")]
        kept[mine[:limit]] = True
    return kept.reshape(chosen.shape)


def expert_order(chosen, kept, experts):
    """Sort the kept choices by expert.  -> token of each row, row of each choice [n, k], counts"""
    flat, k = np.where(kept, chosen, experts).reshape(-1), chosen.shape[1]
    order = np.argsort(flat, kind="stable")[:kept.sum()]
    row = np.zeros(flat.size, int)
    row[order] = np.arange(len(order))
    return order // k, row.reshape(chosen.shape), count(chosen[kept], experts)


def balance_loss(p, counts, coefficient):
    """coefficient n E sum_i f_i P_i; the shares f of choices are constants.  [n, E], [E] -> []"""
    f = (counts / max(counts.sum(), 1)).astype(p.dtype)
    return (p * f).sum() * (coefficient * len(counts))


def z_loss(logits, coefficient):
    """Coefficient times the sum of squared log sum exp: keeps logits small.  [n, E] -> []"""
    top = logits.data.max(1, keepdims=True)
    lse = T.log(T.sum(T.exp(logits - top), 1, True)) + top
    return (lse * lse).sum() * coefficient


def balanced(bias, counts, rate=1e-3):
    """Raise the bias of experts with few tokens, lower that of those with many.  [E], [E] -> [E]"""
    return bias + rate * np.sign(counts.mean() - counts)


class Experts(Module):
    """E MLPs, stacked so that they can be cut; each works on its run of rows.  [m, D] -> [m, D]"""

    def __init__(self, name, experts, config, seed, dtype):
        D, H = config.width, config.hidden
        stds = {"fc1": 0.02, "fc2": residual_std(config)}
        for fc, (o, i) in {"fc1": (H, D), "fc2": (D, H)}.items():
            w, b = f"{name}.{fc}.weight", f"{name}.{fc}.bias"
            weight = Parameter(init(w, (experts, o, i), seed, stds[fc], dtype), w)
            setattr(self, fc, weight)
            setattr(self, fc + "_bias", Parameter(np.zeros((experts, o), dtype), b))

    def forward(self, rows, counts):
        runs = T.split(rows, [int(c) for c in counts])
        return T.concatenate([self.expert(e, run) for e, run in enumerate(runs)])

    def expert(self, e, run):
        """Run expert e; without rows too, so that its gradient is zeros and not missing."""
        hidden = F.gelu(F.linear(run, self.fc1[e], self.fc1_bias[e]))
        return F.linear(hidden, self.fc2[e], self.fc2_bias[e])


class MoE(Module):
    """Stand in for an MLP: route, run the experts, combine.  [B, T, D] -> [B, T, D]

    bias [E] shifts the choice and never a gate; set it to balanced(bias, counts).
    counts [E]: how many tokens chose each expert in the latest forward, before any drop.
    """

    # Capacity and balance count the tokens of one call: of a share of them, in silence, under dp.
    one_process = "a mixture of experts runs in one process: minidist has no expert parallelism yet"

    def __init__(self, name, routing, config, seed, dtype):
        self.routing = routing
        self.bias, self.counts = np.zeros(routing.experts), np.zeros(routing.experts, int)
        weight = name + ".router.weight"
        self.router = Parameter(init(weight, (routing.experts, config.width), seed, 0.02, dtype),
                                weight)
        self.experts = Experts(name + ".experts", routing.experts, config, seed, dtype)
        self.shared = MLP(name + ".shared", config, seed, dtype) if routing.shared else None

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen, gates, flat = self.route(flat)
        kept = keep(chosen, gates.data, self.routing)
        token, row, counts = expert_order(chosen, kept, self.routing.experts)
        out = self.experts(F.embedding(flat, token), counts)
        back = F.embedding(out, row, inside=kept)                       # [n, k, D]
        y = T.sum(back * T.cast(gates, x.dtype).reshape(*gates.shape, 1), 1).reshape(*x.shape)
        return y if self.shared is None else y + self.shared(x)

    def route(self, flat):
        """Choose experts and gates, in float32 or wider.  [n, D] -> [n, k], [n, k], [n, D]

        The rows that come back carry the auxiliary losses.
        """
        r, wide = self.routing, np.promote_types(flat.dtype, np.float32)
        logits = F.linear(T.cast(flat, wide), T.cast(self.router, wide))
        p = F.softmax(logits)
        chosen = choose(p.data + self.bias.astype(wide), r.top_k)
        self.counts = count(chosen, r.experts)
        if r.aux:
            loss = balance_loss(p, self.counts, r.aux)
            flat = F.add_auxiliary_loss(flat, loss, "balance")
        if r.z:
            flat = F.add_auxiliary_loss(flat, z_loss(logits, r.z), "z")
        ids = np.arange(len(chosen))[:, None] * r.experts + chosen
        gates = F.embedding(p.reshape(-1, 1), ids).reshape(*chosen.shape)
        return chosen, gates / T.sum(gates, 1, True) if r.top_k > 1 else gates, flat


def replace_mlps(model, routing, seed=0):
    """Give every block of a GPT, in one process, a mixture of experts in place of its MLP."""
    if getattr(model, "axes", None):
        raise BadInput(f"{MoE.one_process}, and this model is spread over "
                       f"{', '.join(sorted(model.axes))}")
    for i, block in enumerate(model.blocks):
        dtype = block.mlp.fc1.weight.dtype
        block.mlp = MoE(f"blocks.{i}.mlp", routing, model.config, seed, dtype)
    return model
