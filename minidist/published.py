"""Published: steps that others have measured, and how far the estimate is off.

    RUNS["a100"], RUNS["h100"]  ->  fit(every second run)  ->  three shares  ->  tried on the others

N   Narayanan et al. 2021, table 1; micro-batches and chunks from the script that was released.
    The paper prints a rate: with recomputation, over all cards
K   Korthikanti et al. 2022, table 5: everything recomputed; then attention, with sp
S   Smith et al. 2022: Megatron-Turing NLG 530B
M   Megatron-LM's page on H100: 48 replicas of GPTs, rows of 4096, at a rate without recomputation.
    Rows of a micro-batch and chunks are not printed: one row, and as many chunks as stages allow
L   Grattafiori et al. 2024, table 4: Llama 3 405B, rates; the last run has 16 ranks of cp

Run:    python -m minidist.plan --published
Lesson: python -m lessons.plan
"""
import statistics
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minidist.estimate import CARDS, Job, Shares, bubble, flops, model_flops, seconds


class Run(NamedTuple):
    """A step that somebody has measured."""
    source: str
    job: Job
    seconds: float


def _megatron(H, D, L, tp, pp, cards, B, rows, v, tflops):
    job = Job(L, D, H, 51200, 2048, B, tp=tp, pp=pp, dp=cards // (tp * pp), v=v, rows=rows,
              again="blocks")
    return Run("Narayanan 2021", job, flops(job) / (cards * tflops * 1e12))


def _korthikanti(H, D, L, pp, v, B, rows, full, selective):
    job = Job(L, D, H, 51200, 2048, B, tp=8, pp=pp, v=v, rows=rows, again="blocks")
    return [Run("Korthikanti 2022", job, full),
            Run("Korthikanti 2022", replace(job, sp=True, again="attention"), selective)]


def _on_h100(D, L, tp, pp, B, tflops):
    v = max(n for n in range(1, 9) if pp > 1 and L // pp % n == 0 or n == 1)
    job = Job(L, D, D // 128, 131072, 4096, B, tp=tp, pp=pp, dp=48, v=v, zero=1, sp=tp > 1,
              rows=B // 48 if pp == 1 else 1, tiled=True, hidden=True)
    job = replace(job, count=job.parameters + job.V * D)            # words and head are apart
    return Run("Megatron-LM", job, model_flops(job) / (job.cards * tflops * 1e12))


def _llama(dp, cp, T, B, tflops):
    job = Job(126, 16384, 128, 128256, T, B, count=405.85e9, K=8, tp=8, cp=cp, pp=16, dp=dp,
              v=8, zero=1, sp=True, tiled=True, hidden=True)
    return Run("Llama 3", job, model_flops(job) / (job.cards * tflops * 1e12))


RUNS = {"a100": [_megatron(*row) for row in (
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), (32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    (32, 4096, 36, 4, 1, 128, 512, 16, 1, 142), (48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138), (80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148), (128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163))]}
RUNS["a100"] += [run for row in (
    (64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10), (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83), (160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49))
    for run in _korthikanti(*row)]
RUNS["a100"] += [Run("Smith 2022", Job(105, 20480, 128, 51200, 2048, 1920, tp=8, pp=35,
                                       dp=cards // 280, again="blocks"), step)
                 for cards, step in ((2240, 60.1), (2800, 50.2), (3360, 44.4))]
RUNS["h100"] = [_on_h100(*row) for row in (
    (2048, 24, 1, 1, 192, 408.8), (4096, 30, 2, 1, 192, 465.9), (6144, 32, 4, 1, 192, 489.1),
    (7168, 48, 8, 1, 192, 459.6), (8192, 84, 8, 2, 384, 419.7), (10240, 92, 8, 4, 768, 420.5),
    (12288, 96, 8, 6, 1152, 432.8), (16384, 96, 8, 8, 1536, 474.4),
    (18432, 112, 8, 16, 3072, 459.9))]
RUNS["h100"] += [_llama(*row) for row in (
    (64, 1, 8192, 64 * 32, 430), (128, 1, 8192, 128 * 16, 400), (8, 16, 131072, 8 * 16, 380))]


def fit(runs, card):
    """Find the three shares with which the relative errors are smallest.  -> Shares

    A node's link carries no more than its data sheet says, though products hide some of it."""
    rows, rest = [], []
    for _, job, took in runs:
        ideal = seconds(job, card, Shares(1, 1, 1))
        working = [*ideal[:3], ideal.cp + ideal.ep]
        *row, others = ((1 + bubble(job)) * part / took for part in working)
        rows.append(row)
        rest.append(1 - others - (ideal.pp + ideal.dp) / took)
    rows, rest = np.array(rows), np.array(rest)
    found = not_negative(rows, rest)
    if found[2] < 1:
        found = np.append(not_negative(rows[:, :2], rest - rows[:, 2]), 1)
    return Shares(*(1 / found).tolist())


def not_negative(matrix, target):
    """Least squares; constants that would be negative are zero."""
    constants, free = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while free:
        found = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if (found >= 0).all():
            constants[free] = found
            break
        free.pop(int(np.argmin(found)))
    return constants


def lines(name):
    """The estimate beside published steps, fitted to every second one.  -> lines"""
    card, runs, shown = CARDS[name], RUNS[name], []
    fitted = fit(runs[::2], card)
    errors = [seconds(run.job, card, fitted).all / run.seconds - 1 for run in runs]
    for i, (run, error) in enumerate(zip(runs, errors)):
        shown.append(f"{run.source:17} {run.job.parameters / 1e9:7,.1f}e9 {run.job.cards:5} cards  "
                     f"{run.seconds:7.2f} s  {run.seconds * (1 + error):7.2f} s  {error:+6.1%}  "
                     f"{'tried' if i % 2 else 'fitted'}")
    tried = [abs(error) for error in errors[1::2]]
    return ["source             parameters   cards   measured  estimated   error", *shown,
            f"tried: median {statistics.median(tried):.1%}, worst {max(tried):.1%}; shares of an "
            f"{name.upper()}'s figures: {', '.join(f'{x:.3f}' for x in fitted)}"]
