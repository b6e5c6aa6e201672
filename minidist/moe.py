"""Mixture of experts: each token goes through k of E MLPs, chosen by a router; one process.

    x [n,D] -> router -> chosen experts [n,k], gates [n,k]
            -> rows in expert order -> expert e on its run of rows -> back, times gate, sum over k

A token that an expert has no place for gets zero from it; the gates of the others stay as they are.
Auxiliary losses are sums over tokens, like the loss itself.
Capacity and balance count the tokens of one call: pieces of a batch count each for itself, so
dropless training without the balance loss is the one that does not depend on how it is cut.

Lesson: python -m lessons.moe
Papers: Lepikhin et al. 2020, "GShard"; Fedus et al. 2021, "Switch Transformers"
"""
import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from minidist import BadInput
from minidist.engine import functional, tensor
from minidist.engine.gpt import MLP, residual_std
from minidist.engine.nn import Module, Parameter, init
from minidist.engine.tensor import Tensor
from minidist.placement import lay


AUX, RATE = 1e-2, 1e-3           # the usual coefficient of the balance loss, and rate of the bias


@dataclass(frozen=True)
class MoEConfig:
    """Fix how tokens are routed.  capacity: a factor (None: dropless); drop: which go first."""
    experts: int
    top_k: int = 1
    capacity: float | None = None
    drop: str = "probability"
    aux: float = 0.0            # coefficient of the load-balancing loss
    bias: float = 0.0           # rate at which a bias evens out the choice, without any loss
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


    def sizes(self):
        """Name what cost.Sizes has to know."""
        return dict(E=self.experts, k=self.top_k, shared=self.shared, biased=self.bias > 0,
                    aux=self.aux > 0)


def asked(args):
    """Read the flags of flags.add_experts; without --balance, a bias balances."""
    rates = {"aux": dict(aux=AUX), "none": {}, "bias": dict(bias=RATE)}[args.balance or "bias"]
    return MoEConfig(args.experts, args.top_k or min(2, args.experts), args.capacity,
                     shared=bool(args.shared_expert), **rates)


def choose(scores, k):
    """Find the k largest of each row, ties to the lower index.  [n, E] -> [n, k]"""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def route(logits, bias, k):
    """Choose k experts for each token by probability plus bias; its gates are without the bias.

    [n, E], [E] or None -> chosen [n, k], gates [n, k], probabilities [n, E].  One gate is the
    probability itself, so that the router learns; several are scaled to add up to 1."""
    p = functional.softmax(logits)
    chosen = choose(p.data if bias is None else p.data + bias, k)
    ids = np.arange(len(chosen))[:, None] * p.shape[1] + chosen
    gates = functional.embedding(p.reshape(-1, 1), ids).reshape(*chosen.shape)
    return chosen, gates / tensor.sum(gates, 1, True) if k > 1 else gates, p


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
    """Sort the kept choices by expert.  [n, k], [n, k] -> token of each row [m], row of each choice
    [n, k], rows of each expert [E]"""
    flat, k = np.where(kept, chosen, experts).reshape(-1), chosen.shape[1]
    order = np.argsort(flat, kind="stable")[:kept.sum()]
    row = np.zeros(flat.size, int)
    row[order] = np.arange(len(order))
    return order // k, row.reshape(chosen.shape), count(chosen[kept], experts)


def picked(rows, row, kept):
    """Look up the rows of one choice of each token, zero where it was dropped.  [m, D] -> [n, D]"""
    if kept.all():
        return rows[row]
    found = np.zeros((len(row), rows.shape[1]), rows.dtype)
    found[kept] = rows[row[kept]]
    return found


def to_experts(x, token, row, kept):
    """Copy each token once for each expert that has a place for it.  [n, D] -> [m, D]"""
    def vjp(g):
        gx = picked(g, row[:, 0], kept[:, 0])
        for j in range(1, row.shape[1]):
            gx += picked(g, row[:, j], kept[:, j])
        return (gx,)
    return Tensor(x.data[token], (x,), vjp)


def to_tokens(out, gates, row, kept):
    """Add up what its experts made of each token, each times its gate.  [m, D], [n, k] -> [n, D]"""
    choices, rows, weights = range(row.shape[1]), out.data, gates.data.astype(out.dtype, copy=False)
    y = np.zeros((len(row), rows.shape[1]), rows.dtype)
    for j in choices:
        y += weights[:, j:j + 1] * picked(rows, row[:, j], kept[:, j])

    def vjp(g):
        of_out, of_gates = np.empty_like(rows), np.empty_like(gates.data)
        for j in choices:
            of_gates[:, j] = np.einsum("nd,nd->n", g, picked(rows, row[:, j], kept[:, j]))
            of_out[row[kept[:, j], j]] = (weights[:, j:j + 1] * g)[kept[:, j]]
        return of_out, of_gates
    return Tensor(y, (out, gates), vjp)


def balance_loss(p, counts, coefficient):
    """coefficient n E sum_i f_i P_i; the shares f of choices are constants.  [n, E], [E] -> []"""
    f = (counts / max(counts.sum(), 1)).astype(p.dtype)
    return (p * f).sum() * (coefficient * len(counts))


def z_loss(logits, coefficient):
    """Coefficient times the sum of squared log sum exp: keeps logits small.  [n, E] -> []"""
    top = logits.data.max(1, keepdims=True)
    lse = tensor.log(tensor.sum(tensor.exp(logits - top), 1, True)) + top
    return (lse * lse).sum() * coefficient


def move(counts, rate):
    """Raise the bias of experts with few tokens, lower that of those with many.  [E] -> [E]"""
    return rate * np.sign(counts.mean() - counts)


class Experts(Module):
    """E MLPs, stacked so that they can be cut; each works on its run of rows.  [m, D] -> [m, D]

    counts [E]: the length of each run.  columns: those of the result that my fc2_bias has.
    """

    def __init__(self, name, experts, config, seed, dtype):
        D, H = config.width, config.hidden
        stds = {"fc1": 0.02, "fc2": residual_std(config)}
        for fc, (o, i) in {"fc1": (H, D), "fc2": (D, H)}.items():
            w, b = f"{name}.{fc}.weight", f"{name}.{fc}.bias"
            weight = Parameter(init(w, (experts, o, i), seed, stds[fc], dtype), w)
            setattr(self, fc, weight)
            setattr(self, fc + "_bias", Parameter(np.zeros((experts, o), dtype), b))
        self.columns = slice(None)

    def forward(self, rows, counts):
        hidden = functional.gelu(functional.grouped_linear(rows, self.fc1, self.fc1_bias, counts))
        return functional.grouped_linear(hidden, self.fc2, self.fc2_bias, counts, self.columns)


class MoE(Module):
    """Stand in for an MLP: route, run the experts, combine.  [B, T, D] -> [B, T, D]

    counts [E]: how many tokens chose each expert in the latest forward, before any drop.
    bias [E], or None: shifts the choice and never a gate; `rebalance`, after a step, moves it.
    Three fields may be replaced from outside, for tokens and experts that are shared with others:
        total   counts of my tokens -> of all tokens of this call
        enter   what goes into the experts, and their gates, in
        leave   what comes out of them
    """

    # Over ranks that share out the tokens, balance needs everybody's counts: see ep.parallelize.
    all_tokens = True

    def __init__(self, name, routing, config, seed, dtype):
        self.routing, E = routing, routing.experts
        self.counts = np.zeros(E, int)
        self.seen = np.zeros(E, int)                        # since the bias was moved
        weight, wide = name + ".router.weight", np.promote_types(dtype, np.float32)
        self.router = Parameter(init(weight, (E, config.width), seed, 0.02, dtype), weight)
        self.bias = Parameter(np.zeros(E, wide), name + ".router.bias") if routing.bias else None
        if self.bias is not None:
            self.bias.requires_grad = False                 # a parameter, so that it is kept
        self.experts = Experts(name + ".experts", E, config, seed, dtype)
        self.shared = MLP(name + ".shared", config, seed, dtype) if routing.shared else None
        self.total = self.enter = self.leave = lambda x: x

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen, gates, flat = self.route(flat)
        kept = keep(chosen, gates.data, self.routing)
        token, row, counts = expert_order(chosen, kept, self.routing.experts)
        rows = to_experts(self.enter(flat), token, row, kept)
        y = to_tokens(self.experts(rows, counts), self.enter(gates), row, kept)
        y = self.leave(y).reshape(*x.shape)
        return y if self.shared is None else y + self.shared(x)

    def route(self, flat):
        """Choose experts and gates, in float32 or wider.  [n, D] -> [n, k], [n, k], [n, D]

        The rows that come back carry the auxiliary losses.
        """
        r, wide = self.routing, np.promote_types(flat.dtype, np.float32)
        logits = functional.linear(tensor.cast(flat, wide), tensor.cast(self.router, wide))
        bias = None if self.bias is None else self.bias.data
        chosen, gates, p = route(logits, bias, r.top_k)
        self.note(count(chosen, r.experts))
        if r.aux:
            loss = balance_loss(p, self.total(self.counts), r.aux)
            flat = functional.add_auxiliary_loss(flat, loss, "balance")
        if r.z:
            flat = functional.add_auxiliary_loss(flat, z_loss(logits, r.z), "z")
        return chosen, gates, flat

    def note(self, counts):
        """Remember who chose whom, for the bias not when a forward is repeated.  [E]"""
        self.counts = counts
        if tensor.is_grad_enabled() and not tensor.replaying():
            self.seen = self.seen + counts

    def rebalance(self):
        """Move the bias by what was seen since the last time.  Collective"""
        if self.bias is not None:
            counts, self.seen = self.total(self.seen), np.zeros_like(self.seen)
            self.bias.data += lay(self.bias, move(counts, self.routing.bias))


def replace_mlps(model, routing, seed=0):
    """Give every block of a GPT, not yet spread over ranks, a mixture of experts for its MLP."""
    if getattr(model, "axes", None):
        raise BadInput("the MLPs of a plain model can be replaced by experts, and this one is "
                       f"spread over {', '.join(sorted(model.axes))}: replace them first")
    for i, block in enumerate(model.blocks):
        dtype = block.mlp.fc1.weight.dtype
        block.mlp = MoE(f"blocks.{i}.mlp", routing, model.config, seed, dtype)
    model.after_step = [partial(rebalance, model)]
    return model


def mixtures(model):
    """List the mixtures of experts that this rank holds."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def rebalance(model):
    """Move the biases of all routers of a model, after a step."""
    for layer in mixtures(model):
        layer.rebalance()
