"""Estimate: how long a training step takes on how many cards, and what each of them holds.

    Job     a model, a batch, and how it is spread: tp, cp, pp in v chunks, dp, ep of it, ZeRO,
            recomputation
    Card    memory, FLOP/s, bandwidths of its memory, its node and the network, as on a data sheet

    seconds = (1 + bubble) (FLOPs / (e1 peak) + bytes moved / (e2 memory) + tp bytes / (e3 node)
              + cp bytes beyond what attention hides, ep bytes) + pipeline and dp bytes / network

e1, e2, e3 are the shares of a data sheet's figures that training reaches; they are fitted to every
second one of the published steps, and tried on the others: see minidist.published. Nothing else is
hidden behind anything: what overlaps is in the three shares.

Lesson: python -m lessons.plan
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

from minidist import cost


class Shares(NamedTuple):
    """What training reaches of a data sheet: of FLOP/s, of memory's and of a node's bandwidth."""
    products: float
    memory: float
    node: float


A100 = Shares(0.615, 1.206, 0.723)            # memory: fused kernels move less than layers keep
H100 = Shares(0.565, 1.075, 1.0)


@dataclass(frozen=True)
class Card:
    """A data sheet.  bytes, FLOP/s in 16 bits, bytes per second each way: memory, node, network"""
    name: str
    memory: float
    peak: float
    hbm: float
    node: float
    network: float
    per_node: int = 8           # cards on the fast link
    shares: Shares = A100
    fused: bool = False         # attention in tiles, gradients behind the backward: see Job
    shortest = 2048             # tokens of a row that are worth a rank of cp
    counted = False             # is this minidist itself?

    def seconds(self, job):
        return seconds(job, self, self.shares)

    def held(self, job):
        return held(job)

    def kept(self, job):
        """Bytes that a layer keeps of a micro-batch."""
        return cost.textbook_activations(job.sizes)

    def sent(self, job):
        return dict(tp=sent_in_layers(job), cp=sent_around(job), ep=sent_to_experts(job),
                    pp=sent_to_stages(job), dp=sent_to_replicas(job))


CARDS = {card.name: card for card in (
    Card("v100", 32e9, 125e12, 0.9e12, 150e9, 12.5e9),
    Card("a100", 80e9, 312e12, 2.0e12, 300e9, 25e9),
    Card("h100", 80e9, 989.4e12, 3.35e12, 450e9, 50e9, shares=H100, fused=True),
    Card("h200", 141e9, 989.4e12, 4.8e12, 450e9, 50e9, shares=H100, fused=True))}


@dataclass(frozen=True)
class Job:
    """A model and its batch, and how they are spread."""
    L: int                      # layers
    D: int                      # width
    H: int                      # heads
    V: int                      # vocabulary
    T: int                      # tokens in a row
    B: int                      # rows in a step
    count: float = 0            # parameters; 0: those of a GPT of these sizes
    tp: int = 1
    pp: int = 1
    dp: int = 1
    v: int = 1                  # chunks of the layers on each stage
    rows: int = 1               # in a micro-batch
    zero: int = 0
    sp: bool = False
    again: str | None = None    # what is recomputed: "blocks", "attention"
    cp: int = 1
    ep: int = 1                 # ranks, of those of dp and cp, that share the experts
    K: int = 0                  # key heads; 0: as many as heads
    wide: int = 0               # of all heads together; 0: the model's width
    experts: float = 0          # of the parameters: in experts that tokens are sent to
    active: float = 0           # parameters that a token meets; 0: all
    k: int = 0                  # experts that a token is sent to
    tiled: bool = False         # attention in tiles, which keeps and moves no T x T matrix
    hidden: bool = False        # gradients travel while the last micro-batch runs backward, and
                                # ZeRO's parameters while the first one runs forward

    def __str__(self):
        """Name the plan: 'dp=4 x tp=8, ZeRO 1, recompute attention, 2 rows at a time'"""
        axes = [f"{name}={getattr(self, name)}" for name in ("dp", "ep", "pp", "cp", "tp")
                if getattr(self, name) > 1]
        parts = [" x ".join(axes) or "one card"] + [f"{self.v} chunks"] * (self.v > 1)
        parts += [f"ZeRO {self.zero}"] * (self.zero > 0)
        parts += [f"recompute {self.again}"] * bool(self.again)
        return ", ".join([*parts, f"{self.rows} row{'s' * (self.rows > 1)} at a time"])

    @property
    def sizes(self):
        """As cost takes them, of one micro-batch."""
        return cost.Sizes(B=self.rows, T=self.T, D=self.D, H=self.H, K=self.K or None, V=self.V,
                          L=self.L, w=2)

    @property
    def parameters(self):
        return self.count or cost.gpt_parameters(self.sizes)

    @property
    def cards(self):
        return self.tp * self.cp * self.pp * self.dp

    @property
    def microbatches(self):
        return self.B // (self.dp * self.rows)

    @property
    def layers(self):
        """Layers of the longest stage."""
        return -(-self.L // self.pp)

    @property
    def tokens(self):
        """Tokens of a step that one card works on."""
        return self.B * self.T / self.dp / self.cp

    @property
    def mine(self):
        """Parameters that one card works with."""
        return (self.parameters - self.experts + self.experts / self.ep) / (self.tp * self.pp)

    @property
    def divided(self):
        """Parameters that one card is responsible for: those that replicas share, among them."""
        return self.parameters / self.cards


class Seconds(NamedTuple):
    """Where the time of a step goes."""
    products: float
    memory: float
    tp: float
    cp: float
    ep: float
    bubble: float
    pp: float
    dp: float

    @property
    def all(self):
        return sum(self)

    @property
    def working(self):
        """Without waiting: what all micro-batches take on a stage."""
        return sum(self[:5])


def model_flops(job):
    """FLOPs of the products of a step, none of them repeated: 6 per weight and token."""
    if not job.count:
        return cost.gpt_flops(replace(job.sizes, B=job.B))
    weights = (job.active or job.count) - job.V * job.D    # words are looked up, not multiplied
    return job.B * job.T * (6 * weights + 12 * job.L * (job.wide or job.D) * job.T)


def attention_flops(job):
    """FLOPs of queries times keys and weights times values, forward."""
    return 4 * job.B * job.T * job.L * (job.wide or job.D) * job.T


def flops(job):
    """FLOPs of the products of a step, those that are repeated included."""
    layers = model_flops(job) / 3 - 2 * job.B * job.T * job.V * job.D
    return model_flops(job) + {"blocks": layers, "attention": attention_flops(job)}.get(
        job.again, 0)


def moved(job):
    """Bytes that one card's memory moves in a step, beside those of products: what layers keep."""
    kept = 10 * job.D + (24 * job.D + 5 * job.H * job.T * (not job.tiled)) / job.tp
    return job.tokens * job.layers * kept * (4 if job.again == "blocks" else 3)


def bubble(job):
    """Idle time of a pipeline over its working time, the ideal: not of the total."""
    return (job.pp - 1) / (job.v * job.microbatches)


def sent_in_layers(job):
    """Bytes that one card sends in its node: all_reduces of tp, six a layer with recomputation."""
    times = 6 if job.again == "blocks" else 4
    return job.tokens * job.layers * job.D * 2 * times * 2 * (job.tp - 1) / job.tp


def sent_around(job):
    """Bytes that one card sends around cp's ring: keys, values, and their gradients on the way."""
    times = 4 if job.again == "blocks" else 3
    return job.tokens * job.layers * job.sizes.kv / job.tp * 2 * times * (job.cp - 1)


def sent_to_experts(job):
    """Bytes that one card sends to experts and back: forward, backward, no layer without any."""
    return job.tokens * job.layers * job.k * job.D * 2 * 4 * (job.ep - 1) / job.ep


def sent_to_stages(job):
    """Bytes that one card sends over the borders of its stages, activations and gradients."""
    return (job.pp > 1) * 2 * job.v * job.tokens * job.D * 2 / job.tp


def sent_to_replicas(job):
    """Bytes that one card sends for dp: float32 gradients; parameters of 16 bits with ZeRO."""
    others = job.mine - job.divided
    if job.zero == 3:
        return others * job.microbatches * (2 + 2 + 4)
    return others * (2 * 4 if job.zero == 0 else 4 + 2) * (
        job.microbatches if job.zero == 2 else 1)


def seconds(job, card, shares):
    """Predict a step.  -> Seconds"""
    fast, longest = card.node * shares.node, job.layers * job.pp / job.L
    products = longest * flops(job) / job.cards / card.peak / shares.products
    memory = moved(job) / card.hbm / shares.memory
    tp = sent_in_layers(job) / fast
    hidden = 3 * longest * attention_flops(job) / job.cards / card.peak / shares.products
    cp = sent_around(job) / (fast if job.tp * job.cp <= card.per_node else card.network)
    ep = sent_to_experts(job) / (fast if job.tp * job.ep <= card.per_node else card.network)
    inside = [products, memory, tp, max(0, cp - hidden), ep]
    dp = sent_to_replicas(job) / card.network
    dp = max(0, dp - sum(inside) / job.microbatches) if job.hidden else dp
    return Seconds(*inside, bubble(job) * sum(inside), sent_to_stages(job) / card.network, dp)


def mfu(job, card, step):
    """The model's FLOPs over what the cards could do in that time."""
    return model_flops(job) / (job.cards * card.peak * step)


# === Memory of one card ===

class Held(NamedTuple):
    """Bytes of one card, by class."""
    P: float
    G: float
    O: float                                                                       # noqa: E741
    A: float

    @property
    def all(self):
        return sum(self)


def held(job, state=(2, 2, 12)):
    """What the fullest card holds at its peak: the first stage, or the only one."""
    mine, (p, g, o) = job.mine, state
    share = [job.divided / mine if job.zero >= stage else 1 for stage in (3, 2, 1)]
    layer = cost.textbook_activations(job.sizes, job.tp, job.sp,
                                      job.again or (job.tiled and "attention"))
    alive = min(job.pp, job.microbatches) * (1 + (job.pp - 1) / (job.pp * job.v) * (job.v > 1))
    layers = job.layers * layer * alive
    one = 34 * job.rows * job.T * job.D / job.tp if job.again == "blocks" else 0
    words = 4 * job.rows * job.T * job.V / job.tp * (job.pp == 1)
    gathered = 2 * mine / job.L * (job.zero == 3)
    return Held(share[0] * p * mine + gathered, share[1] * g * mine, share[2] * o * mine,
                (layers + one + words) / job.cp)
