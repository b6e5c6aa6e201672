"""Machine: what a step of minidist takes, and holds, on the computer that it runs on.

    seconds = flop x FLOPs + byte x bytes kept and read + weight x bytes of weights, each pass
              + layer x layers, each pass + end x bytes of tokens where words enter and leave
              + update x parameters                                      what ranks compute
              + message x messages + wire x bytes sent                   what they exchange

The eight constants are measured, see minidist.calibrate; all that they are multiplied by is counted
by minidist.cost, which is held to every byte.  So is what a rank holds.

Run:    python -m minidist.plan --calibrate here.json
Lesson: python -m lessons.plan
"""
import json
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from minidist import BadInput, cost
from minidist.collectives import chosen
from minidist.estimate import Held, Seconds


@dataclass(frozen=True)
class Machine:
    """What its ranks take, in seconds, all of them at work at the same time."""
    ranks: int                  # that were at work
    memory: float               # bytes, of each of them
    flop: float                 # of a product
    byte: float                 # that a layer keeps and backward reads
    weight: float               # byte of the weights that a pass goes through
    layer: float                # whatever its size: Python, NumPy
    end: float                  # byte of the tokens, in the embedding and in the head
    update: float               # parameter: norm, optimizer
    message: float
    wire: float                 # byte that is sent

    name = "this machine"
    per_node = 1 << 20          # ranks on one link
    shortest = 1                # tokens of a row for each rank of cp
    counted, fused = True, False

    @property
    def peak(self):
        return 1 / self.flop if self.flop else float("inf")

    def seconds(self, job):
        return seconds(job, self)

    def held(self, job):
        return held(job)

    def kept(self, job):
        """Bytes that a layer keeps of a micro-batch."""
        return sum(kept.bytes for kept in cost.block_activations(sizes(job)))

    def sent(self, job):
        return {axes: price.bytes for axes, price in steps(job)[0].sent.items()}


def read(path):
    """Read what --calibrate has written.  -> Machine; BadInput"""
    try:
        with open(path, encoding="utf-8") as file:
            return Machine(**json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is nothing that --calibrate has written ({error}); use one of the "
                       "cards, or python -m minidist.plan --calibrate FILE first") from None


def written(machine):
    return asdict(machine)


# === What is counted ===

def layout(job):
    """Spread a job as minidist does, with 1F1B and zigzag."""
    return cost.Layout(pp=job.pp, dp=job.dp, cp=job.cp, tp=job.tp, zero=job.zero,
                       sequence="again" if job.sp else None, microbatches=job.microbatches,
                       recompute=job.again, chosen=chosen)


def sizes(job):
    """As cost takes them: the whole model, the global batch, float32."""
    return replace(job.sizes, B=job.B, w=4)


def steps(job):
    """A step of the first rank of each stage.  -> what cost.step says, of each"""
    return [cost.step(sizes(job), layout(job), pp=stage) for stage in range(job.pp)]


def held(job):
    """What the fullest rank holds at its peak, as minidist.ledger counts it.  -> Held"""
    return max((Held(*step.held[:3], step.held.activations * min(job.pp - stage, job.microbatches))
                for stage, step in enumerate(steps(job))), key=lambda held: held.all)


class Work(NamedTuple):
    """What a rank computes in a step."""
    flops: float
    kept: float                 # bytes, all micro-batches together
    weights: float              # bytes, once for every pass
    layers: float               # once for every pass
    ends: float                 # bytes of tokens that are looked up, and that become scores
    updated: float              # parameters


def work(job, stage=0, step=None):
    """Count what a rank of this stage computes.  step: what cost.step says of it.  -> Work

    A pass that is repeated goes through layers, and what they keep, four times instead of three."""
    step = step or steps(job)[stage]
    plain = cost.step(sizes(job), replace(layout(job), recompute=None, zero=0), pp=stage).held
    passes = job.microbatches * (4 / 3 if job.again == "blocks" else 1)
    tokens = 4 * job.tokens * job.D
    return Work(step.flops, plain.activations * passes, plain.parameters * passes,
                cost.chunks(job.L, job.pp)[stage] * passes,
                tokens * (stage == 0) + tokens * (stage == job.pp - 1), step.held.optimizer / 8)


def seconds(job, machine):
    """Predict a step.  -> Seconds"""
    found = []
    for stage, step in enumerate(steps(job)):
        did = work(job, stage, step)
        products = machine.flop * did.flops
        memory = (machine.byte * did.kept + machine.weight * did.weights
                  + machine.layer * did.layers + machine.end * did.ends)
        sent = {"tp": 0, "cp": 0, "pp": 0, "dp": 0}
        for axes, price in step.sent.items():
            axis = "dp" if "dp" in axes else "pp" if "pp" in axes else axes.split("-")[0]
            sent[axis] += machine.message * price.messages + machine.wire * price.bytes
        found.append((products, memory, sent, machine.update * did.updated))
    products, memory, sent, update = max(found, key=lambda each: each[0] + each[1])
    inside = [products, memory, sent["tp"], sent["cp"], 0]
    bubble = (job.pp - 1) / job.microbatches * sum(inside)
    return Seconds(*inside[:1], memory + update, *inside[2:], bubble, sent["pp"], sent["dp"])
