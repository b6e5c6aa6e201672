"""Estimate: how long a training step takes on how many cards, and what each of them holds.

    Job     a model, a batch, and how it is spread: tp, pp in v chunks, dp, ZeRO, recomputation
    Card    memory, FLOP/s, bandwidths of its memory, its node and the network

    seconds = (1 + bubble) (FLOPs / (e1 peak) + bytes moved / (e2 memory) + tp bytes / (e3 node))
              + pipeline and dp bytes / network

e1, e2, e3 are the shares of a data sheet's figures that training reaches; they are fitted to every
second one of the published runs, and tried on the others: `python -m minidist.plan --published`.
Nothing is hidden behind anything: what overlaps is in the three shares.

Lesson: python -m lessons.walls
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from minidist import cost


@dataclass(frozen=True)
class Card:
    """A data sheet.  bytes, FLOP/s in 16 bits, bytes per second each way: memory, node, network"""
    name: str
    memory: float
    peak: float
    hbm: float
    node: float
    network: float


CARDS = {card.name: card for card in (
    Card("v100", 32e9, 125e12, 0.9e12, 150e9, 12.5e9),
    Card("a100", 80e9, 312e12, 2.0e12, 300e9, 25e9),
    Card("h100", 80e9, 989.4e12, 3.35e12, 450e9, 50e9),
    Card("h200", 141e9, 989.4e12, 4.8e12, 450e9, 50e9))}


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

    @property
    def sizes(self):
        """As cost takes them, of one micro-batch."""
        return cost.Sizes(B=self.rows, T=self.T, D=self.D, H=self.H, V=self.V, L=self.L, w=2)

    @property
    def parameters(self):
        return self.count or cost.gpt_parameters(self.sizes)

    @property
    def cards(self):
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self):
        return self.B // (self.dp * self.rows)


class Seconds(NamedTuple):
    """Where the time of a step goes."""
    products: float
    memory: float
    tp: float
    bubble: float
    pp: float
    dp: float

    @property
    def all(self):
        return sum(self)


class Shares(NamedTuple):
    """What training reaches of a data sheet: of FLOP/s, of memory's and of a node's bandwidth."""
    products: float
    memory: float
    node: float


FITTED = Shares(0.615, 1.206, 0.723)          # memory: fused kernels move less than layers keep


def model_flops(job):
    """FLOPs of the products of a step, none of them repeated: 6 per weight and token."""
    if not job.count:
        return cost.gpt_flops(replace(job.sizes, B=job.B))
    weights = job.count - job.V * job.D                     # words are looked up, not multiplied
    return job.B * job.T * (6 * weights + 12 * job.L * job.D * job.T)


def flops(job):
    """FLOPs of the products of a step, those that are repeated included."""
    layers = job.L * (24 * job.D ** 2 + 4 * job.D * job.T)
    again = {"blocks": layers, "attention": 4 * job.L * job.D * job.T}.get(job.again, 0)
    return model_flops(job) + job.B * job.T * again


def moved(job):
    """Bytes that one card's memory moves in a step, beside those of products: what layers keep."""
    tokens = job.B * job.T / job.dp * job.L / job.pp
    kept = 10 * job.D + (24 * job.D + 5 * job.H * job.T) / job.tp
    return tokens * kept * (4 if job.again == "blocks" else 3)


def bubble(job):
    """Idle time of a pipeline over its working time, the ideal: not of the total."""
    return (job.pp - 1) / (job.v * job.microbatches)


def sent_in_layers(job):
    """Bytes that one card sends in its node: all_reduces of tp, six a layer with recomputation."""
    tokens = job.B * job.T / job.dp * job.L / job.pp
    return tokens * job.D * 2 * (6 if job.again == "blocks" else 4) * 2 * (job.tp - 1) / job.tp


def sent_to_stages(job):
    """Bytes that one card sends over the borders of its stages, activations and gradients."""
    return (job.pp > 1) * 2 * job.microbatches * job.v * job.rows * job.T * job.D * 2 / job.tp


def sent_to_replicas(job):
    """Bytes that one card sends for dp: float32 gradients; parameters of 16 bits with ZeRO."""
    mine, share = job.parameters / (job.tp * job.pp), (job.dp - 1) / job.dp
    if job.zero == 3:
        return share * mine * job.microbatches * (2 + 2 + 4)
    return share * mine * (2 * 4 if job.zero == 0 else 4 + 2) * (
        job.microbatches if job.zero == 2 else 1)


def seconds(job, card, shares=FITTED):
    """Predict a step.  -> Seconds"""
    products = flops(job) / job.cards / card.peak / shares.products
    memory = moved(job) / card.hbm / shares.memory
    tp = sent_in_layers(job) / card.node / shares.node
    return Seconds(products, memory, tp, bubble(job) * (products + memory + tp),
                   sent_to_stages(job) / card.network, sent_to_replicas(job) / card.network)


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
    mine, (p, g, o) = job.parameters / (job.tp * job.pp), state
    share = [1 / job.dp if job.zero >= stage else 1 for stage in (3, 2, 1)]
    layer = cost.textbook_activations(job.sizes, job.tp, job.sp, job.again)
    alive = min(job.pp, job.microbatches) * (1 + (job.pp - 1) / (job.pp * job.v) * (job.v > 1))
    layers = job.L / job.pp * layer * alive
    one = 34 * job.rows * job.T * job.D / job.tp if job.again == "blocks" else 0
    words = 4 * job.rows * job.T * job.V / job.tp * (job.pp == 1)
    gathered = 2 * mine / job.L * (job.zero == 3)
    return Held(share[0] * p * mine + gathered, share[1] * g * mine, share[2] * o * mine,
                layers + one + words)


# === Published runs, all on A100 with 80 GB ===

class Run(NamedTuple):
    """A step that somebody has measured."""
    source: str
    job: Job
    seconds: float


def _megatron(H, D, L, tp, pp, cards, B, rows, v, tflops):
    """Narayanan et al. 2021, table 1; micro-batches and chunks from the script that was released.

    The paper prints a rate: with recomputation, over all cards."""
    job = Job(L, D, H, 51200, 2048, B, tp=tp, pp=pp, dp=cards // (tp * pp), v=v, rows=rows,
              again="blocks")
    return Run("Narayanan 2021", job, flops(job) / (cards * tflops * 1e12))


def _korthikanti(H, D, L, pp, v, B, rows, full, selective):
    """Korthikanti et al. 2022, table 5: everything recomputed; then attention, with sp."""
    job = Job(L, D, H, 51200, 2048, B, tp=8, pp=pp, v=v, rows=rows, again="blocks")
    return [Run("Korthikanti 2022", job, full),
            Run("Korthikanti 2022", replace(job, sp=True, again="attention"), selective)]


RUNS = [_megatron(*row) for row in (
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), (32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    (32, 4096, 36, 4, 1, 128, 512, 16, 1, 142), (48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138), (80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148), (128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163))]
RUNS += [run for row in (
    (64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10), (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83), (160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49))
    for run in _korthikanti(*row)]
RUNS += [Run("Smith 2022", Job(105, 20480, 128, 51200, 2048, 1920, tp=8, pp=35, dp=cards // 280,
                               again="blocks"), step)
         for cards, step in ((2240, 60.1), (2800, 50.2), (3360, 44.4))]


def fit(runs, card=CARDS["a100"]):
    """Find the three shares with which the relative errors are smallest.  -> Shares"""
    rows, rest = [], []
    for _, job, took in runs:
        ideal = seconds(job, card, Shares(1, 1, 1))
        rows.append([(1 + bubble(job)) * part / took for part in ideal[:3]])
        rest.append(1 - (ideal.pp + ideal.dp) / took)
    return Shares(*(1 / np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]).tolist())
