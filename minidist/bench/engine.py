"""Bench of the engine: one training step on one thread, beside the same step in PyTorch.

The two take turns, so that a busy machine disturbs both alike; so does the machine's own best
float32 matrix product, which a step can approach but not beat.  Memory is measured in a process
of its own for each: how far the peak rises above what the imports took.

PyTorch's GPT is tests/twin.py, with the faster of its plain and its fused attention and its fused
AdamW; without PyTorch, or away from the tests, its columns stay empty.

Run:    python -m minidist.bench engine
Lesson: python -m lessons.step
"""
import multiprocessing
import platform
import statistics
import time
from typing import NamedTuple

import numpy as np

from minidist import cost, files, flags, flash
from minidist.engine import gpt
from minidist.engine.data import random_batch
from minidist.engine.optim import AdamW

VOCAB = 98                              # about as many characters as an English text has
BATCH = {"lesson": 64, "nano": 12, "mini": 8}
PEAK = 1024                             # the peak is that of a product of matrices of this size


class Row(NamedTuple):
    """One line of the table; PyTorch's columns are None without PyTorch."""
    preset: str
    batch: int
    step_ms: float
    gflops: float
    peak_share: float
    peak_mb: float | None
    torch_ms: float | None
    torch_mb: float | None
    ratio_to_torch: float | None
    memory_ratio: float | None
    tiled_ms: float                     # the same with attention in tiles
    tiled_mb: float | None


def parser():
    p = flags.Parser(prog="python -m minidist.bench engine",
                     description="Time one training step on one thread, beside PyTorch's.",
                     epilog="example: python -m minidist.bench engine --preset mini")
    p.add_argument("--preset", metavar="NAME", help="lesson, nano or mini (default: nano and mini)")
    p.add_argument("--rounds", type=flags.integer(1), metavar="N",
                   help="steps of each (default: 41 for small presets, 5 for mini)")
    p.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    return p


def main():
    """Measure and print; rank by rank makes no sense here, so one process only."""
    options = parser().parse_args()
    presets = [options.preset] if options.preset else ["nano", "mini"]
    for name in presets:
        gpt.preset(name, vocab=VOCAB)                       # refuses what it does not know
    files.ready(options.json)
    twin = None if options.no_torch else find_twin()
    print(header(twin))
    rows = []
    for name in presets:
        rows.append(measure(name, options.rounds or (5 if name == "mini" else 41), twin))
        print(line(rows[-1]))
    data = {"rows": [row._asdict() for row in rows]}
    return files.deliver(("data", options.json, files.numbers(data)))


def find_twin():
    """The module tests.twin with PyTorch on one thread, or None if either is not here."""
    try:
        import torch

        from tests import twin
    except ImportError:
        return None
    torch.set_num_threads(1)
    return twin


# ------------------------------------------------------------------------ what is measured

def our_step(preset, tiled=False):
    """Make a function that takes one step with minidist."""
    model, batch = start(preset)
    if tiled:
        flash.use(model)
    optimizer = AdamW(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step(1 / batch.count)
    return step


def torch_step(preset, fused):
    """Make a function that takes the same step with PyTorch."""
    model, batch = start(preset)
    twin = find_twin().Twin(model, fused)
    optimizer = twin.adamw(1e-3)

    def step():
        optimizer.zero_grad()
        (twin.loss(batch) / batch.count).backward()
        optimizer.step()
    return step


def start(preset):
    config = gpt.preset(preset, vocab=VOCAB)
    return gpt.GPT(config), random_batch(VOCAB, config.context, BATCH[preset], seed=0, step=0,
                                         ragged=False)


def product():
    """Make a function that multiplies two large matrices: the best this machine can do."""
    a, b = np.random.default_rng(0).standard_normal((2, PEAK, PEAK), np.float32)
    c = np.empty_like(a)
    return lambda: np.matmul(a, b, out=c)


def measure(preset, rounds, twin):
    """Time everything in turn, then weigh it.  -> Row"""
    flops = cost.gpt_flops(cost.Sizes.of(gpt.preset(preset, vocab=VOCAB), B=BATCH[preset]))
    work = {"ours": our_step(preset), "tiled": our_step(preset, True), "peak": product()}
    if twin:
        work |= {"plain": torch_step(preset, False), "fused": torch_step(preset, True)}
    ms = in_turn(work, rounds)
    gflops, peak = flops / ms["ours"] / 1e6, 2 * PEAK ** 3 / ms["peak"] / 1e6
    ours_mb = memory(our_step, preset)
    theirs, their_mb = (min((ms[k], memory(torch_step, preset, k == "fused"))
                            for k in ("plain", "fused")) if twin else (None, None))
    return Row(preset, BATCH[preset], ms["ours"], gflops, gflops / peak, ours_mb, theirs, their_mb,
               ratio(ms["ours"], theirs), ratio(ours_mb, their_mb), ms["tiled"],
               memory(our_step, preset, True))


def ratio(ours, theirs):
    return ours / theirs if ours and theirs else None


def in_turn(work, rounds, warm_up=1):
    """Call each function once per round.  -> {name: median milliseconds}"""
    times = {name: [] for name in work}
    for _ in range(warm_up + rounds):
        for name, call in work.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(series[warm_up:]) for name, series in times.items()}


def memory(make_step, *args):
    """MB by which three steps raise the peak of a fresh process; None where unknown (not Linux)."""
    if platform.system() != "Linux":
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(risen, (make_step, *args))


def risen(make_step, *args):
    """Run in the fresh process: what is its peak, less what it held before it began?"""
    if make_step is torch_step:
        find_twin()
    before = kilobytes("VmRSS")
    step = make_step(*args)
    for _ in range(3):
        step()
    return (kilobytes("VmHWM") - before) / 1e3


def kilobytes(field):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(row.split()[1]) for row in file if row.startswith(field + ":"))


# ------------------------------------------------------------------------ what is printed

def header(twin):
    reference = f"PyTorch {twin.torch.__version__}" if twin else "no PyTorch here"
    return (f"one training step, float32, AdamW, one thread; NumPy {np.__version__}, "
            f"{reference}; {platform.processor() or platform.machine()}\n"
            "GFLOP/s: matrix products alone, attention counted as full T x T; medians of steps "
            "taken in turn; tiled: attention as minidist.flash does it\n\n"
            f"{'preset':8} {'batch':>5} {'ms':>8} {'GFLOP/s':>8} {'of sgemm':>8} {'peak MB':>8} "
            f"{'PyTorch ms':>11} {'MB':>6} {'time':>6} {'memory':>7} {'tiled ms':>9} {'MB':>6}")


def line(row):
    def show(value, form):
        return "-" if value is None else format(value, form)
    return (f"{row.preset:8} {row.batch:5} {row.step_ms:8.1f} {row.gflops:8.1f} "
            f"{row.peak_share:8.0%} {show(row.peak_mb, '.0f'):>8} {show(row.torch_ms, '.1f'):>11} "
            f"{show(row.torch_mb, '.0f'):>6} {show(row.ratio_to_torch, '.2f'):>6} "
            f"{show(row.memory_ratio, '.2f'):>7} {row.tiled_ms:9.1f} "
            f"{show(row.tiled_mb, '.0f'):>6}")

