"""Trial: plans for the machine at hand, and the steps that they really take.

    plans  ->  the fastest of each (dp, tp, cp, pp, ZeRO)  ->  jobs, in turns  ->  their times

Jobs take turns, since machines are noisy, and noise only adds: the least time counts. Each is one
of `python -m minidist.bench train`.

Run:    python -m minidist.plan --preset mini --batch 8 --card here.json --try
Lesson: python -m lessons.plan
"""
import json
import os
import subprocess
import sys

from minidist import BadInput
from minidist.ranks import environment, launch

MOST, ROUNDS, STEPS = 10, 3, 3


def chosen(plans):
    """Choose the fastest of each way to spread, nothing recomputed.  [(Seconds, Job)], sorted"""
    kinds = {}
    for took, job in plans:
        if job.again is None:
            kinds.setdefault((job.tp, job.cp, job.pp, job.zero), (took, job))
    return list(kinds.values())[:MOST]


def run(job, preset):
    """Train so, for some steps.  -> [seconds of a step]; BadInput"""
    argv = [sys.executable, "-m", "minidist.bench.train", "--worker", "--preset", preset,
            "--batch", job.B, "--steps", STEPS, "--microbatches", job.microbatches]
    for axis in ("dp", "tp", "cp", "pp"):
        argv += [f"--{axis}", getattr(job, axis)]
    argv += ["--sp"] * job.sp + ["--zero", job.zero] * (job.zero > 0)
    argv += ["--recompute", job.again] * bool(job.again)
    argv = [str(word) for word in argv]
    done = subprocess.run(argv if job.cards == 1 else launch.command(job.cards, argv), text=True,
                          stdout=subprocess.PIPE, env={**environment.SETTINGS, **os.environ})
    if done.returncode:
        raise BadInput(f"a job ended with status {done.returncode}; it is {' '.join(argv)}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(plans, preset):
    """Run what was planned, in turns.  -> lines"""
    some = chosen(plans)
    laps = [[] for _ in some]
    for _ in range(ROUNDS):
        for mine, (_, job) in zip(laps, some):
            mine += run(job, preset)
    took = [min(mine) for mine in laps]
    lines = ["", f"predicted  measured  off by   the least of {ROUNDS} x {STEPS} steps, in turns"]
    lines += [f"{1e3 * found.all:6.0f} ms {1e3 * real:6.0f} ms {found.all / real - 1:+7.1%}   "
              f"{job}" for (found, job), real in zip(some, took)]
    return [*lines, f"what was ranked first takes {took[0] / min(took):.2f} of the fastest's time"]
