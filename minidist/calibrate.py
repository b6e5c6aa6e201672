"""Calibrate: measure what this machine takes for what minidist.cost counts.

    products of a layer's shapes, few tokens and many       ->  flop, weight
    small GPTs, forward and backward, beside their products  ->  byte, layer, end
    norm and optimizer                                       ->  update
    all_reduces of 1 KB to 4 MB                              ->  message, wire

All ranks do the same at once, as they do in a training.

Run:    python -m minidist.plan --calibrate here.json
Lesson: python -m lessons.plan
"""
import json
import os
import subprocess
import sys
import time

import numpy as np

from minidist import BadInput, cost, ledger, parallel, placement
from minidist.collectives import all_reduce, chosen
from minidist.engine import gpt
from minidist.engine.data import Batch
from minidist.engine.optim import AdamW
from minidist.estimate import Job
from minidist.machine import Machine, work, written
from minidist.mesh import DeviceMesh
from minidist.published import not_negative
from minidist.ranks import environment, launch

TOKENS = [128, 256, 512, 1024, 2048]
PROBES = [(layers, width, context, rows) for width in (192, 384) for context, rows in (
    (128, 1), (256, 1), (256, 4), (256, 8)) for layers in (1, 2)]
LENGTHS = [1 << n for n in (8, 12, 14, 16, 18, 20)]              # numbers of 4 bytes
SECONDS = 0.7                                                    # for each measurement


def measure(ranks):
    """Start so many ranks, and let them measure.  -> Machine; BadInput"""
    argv = launch.command(ranks, [sys.executable, "-m", "minidist.calibrate"])
    done = subprocess.run(argv, text=True, stdout=subprocess.PIPE,
                          env={**environment.SETTINGS, **os.environ})
    if done.returncode:
        raise BadInput(f"the ranks that were to measure ended with status {done.returncode}; see "
                       "python -m minidist.doctor")
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def main():
    """Be one of the ranks that measure; rank 0 prints what was found."""
    world = parallel.running()
    found = look(world)
    if world.rank == 0:
        print(json.dumps(written(found)))


def look(world):
    """Measure, all ranks at once.  Collective  -> Machine"""
    flop, weight = fit(*zip(*(products(world, n) for n in TOKENS)))
    did, took = zip(*(passes(world, *probe) for probe in PROBES))
    known = np.array([flop * each.flops + weight * each.weights for each in did])
    byte, layer, end = fit([(each.kept, each.layers, each.ends) for each in did], took, known)
    message, wire = fit(*zip(*(exchange(world, n) for n in LENGTHS)))
    return Machine(world.size, ledger.memory() / world.size, flop, byte, weight, layer,
                   end, update(world), message, wire)


def told(machine):
    """Say what was found.  -> lines"""
    return [f"{machine.ranks} ranks at once, each with {machine.memory / 1e9:.1f} GB",
            f"products   {billions(machine.flop):8.1f} GFLOP/s",
            f"kept       {billions(machine.byte):8.1f} GB/s, what layers keep and backward reads",
            f"weights    {billions(machine.weight):8.1f} GB/s, those that a pass goes through",
            f"layer      {1e6 * machine.layer:8.0f} us, whatever its size",
            f"ends       {billions(machine.end):8.1f} GB/s, tokens in the embedding and the head",
            f"update     {1e9 * machine.update:8.2f} ns, norm and AdamW, of a parameter",
            f"message    {1e6 * machine.message:8.0f} us",
            f"wire       {billions(machine.wire):8.1f} GB/s"]


def billions(seconds):
    """How many billions a second, if one takes so long."""
    return 1e-9 / seconds if seconds else float("inf")


def fit(rows, times, known=0):
    """Find constants with which the relative errors are smallest.  -> [constant]

    known: the part of each time that is explained already."""
    times = np.array(times)
    return not_negative(np.array(rows) / times[:, None], 1 - known / times).tolist()


def clocked(world, run):
    """Let all ranks do the same at once, for a while.  -> least seconds, of the slowest rank

    Noise only adds; the first time warms up, and the next says how often."""
    laps, turns = [], 2
    while len(laps) < turns:
        world.barrier()
        start = time.perf_counter()
        run()
        laps.append(time.perf_counter() - start)
        if len(laps) == 2:
            slowest = float(all_reduce(np.array(laps[1:]), world, op="max")[0])
            turns += min(100, max(4, int(SECONDS / slowest)))
    return float(all_reduce(np.array([min(laps[1:])]), world, op="max")[0])


def products(world, tokens, width=384):
    """Measure the products of a linear layer, forward and backward.  -> FLOPs, bytes of weights"""
    w = np.ones((4 * width, width), np.float32)
    x, g = (np.ones((tokens, n), np.float32) for n in (width, 4 * width))

    def run():
        x @ w.T, g @ w, g.T @ x

    return (3 * 2 * tokens * w.size, w.nbytes), clocked(world, run)


def passes(world, layers, width, context, rows):
    """Measure forward and backward of a small GPT.  -> Work, seconds"""
    config = gpt.GPTConfig(vocab=64, context=context, width=width, heads=width // 64,
                           layers=layers)
    model = gpt.GPT(config, dtype=np.float32)
    batch = Batch.of(*np.arange(2 * rows * context).reshape(2, rows, context) % 64, step=0)

    def run():
        model.zero_grad()
        model(batch).backward()

    job = Job(layers, width, config.heads, 64, context, rows, rows=rows)
    return work(job), clocked(world, run)


def exchange(world, n):
    """Measure an all_reduce of n numbers.  -> messages and bytes, seconds"""
    x = np.ones(n, np.float32)
    took = clocked(world, lambda: all_reduce(x, world, out=x))
    return cost.Group(world.size, world.rank, chosen).all_reduce(n, 4)[1:], took


def update(world):
    """Measure norm and optimizer.  -> seconds per parameter"""
    model = gpt.GPT(gpt.GPTConfig(vocab=64, context=64, width=384, heads=6, layers=2),
                    dtype=np.float32)
    params, alone = model.parameters(), DeviceMesh(world.split(world.rank))
    for p in params:
        p.grad = np.ones_like(p.data)
    optimizer = AdamW(params, 1e-4)

    def run():
        placement.grad_norm(params, alone)
        optimizer.step(1.0)

    return clocked(world, run) / sum(p.size for p in params)


if __name__ == "__main__":
    launch.run(main)
