"""Bench train: tokens per second on 1, 2 and 4 ranks, of the same global batch.

    round 1:  1 rank   2 ranks   PyTorch, 2   4 ranks   PyTorch, 4        round 2: the same again
              |- each a job of its own: one step to warm up, then --steps that count -|

Jobs take turns, since machines are noisy: what is compared has seen the same machine. scaling is
tokens/s over those of one rank, so p is perfect, up to the number of cores. The opponent is
PyTorch's DistributedDataParallel over gloo (with --zero 2 or 3, its fully_shard, which frees
parameters after forward at stage 3; with --pp, its pipelining), on the same GPT, batch and
optimizer, one thread per rank as well; it runs where PyTorch is installed, the repository's tests
are at hand, and PyTorch can do the same.

A pipeline of p stages and m micro-batches takes, at best, one rank's step / p x (m + p - 1) / m.

Run: python -m minidist.bench train --preset mini --batch 8
     python -m minidist.bench train --preset mini --batch 8 --pp 2
     python -m minidist.bench train --preset mini --batch 8 --experts 8 --ep 2 --ranks 1,2
"""
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np

from minidist import BadInput, files, flags, moe, parallel
from minidist.engine import gpt
from minidist.engine.data import Corpus, default_text
from minidist.engine.optim import AdamW
from minidist.ranks import environment, launch
from minidist.step import train_step

OPPONENT = "tests.gloo"                                 # a module: PyTorch is no dependency of ours
PATIENCE = 600                                          # seconds for one job
SPREAD = [*parallel.OFFERED, "zero", "sp", "cp_method", "schedule", "chunks", "ep", "compress",
          "compress_after"]                                                      # flags of jobs
LESS = ["recompute", "offload", "precision"]                                     # also of one rank
MODEL = ["preset", "attention", "experts", "top_k", "capacity", "balance", *LESS]


def parser():
    p = flags.Parser(prog="python -m minidist.bench train", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.bench train --preset mini --batch 8")
    p.add_argument("--preset", default="mini", help="lesson, nano or mini (default mini)")
    p.add_argument("--batch", type=flags.integer(1), default=8, metavar="B",
                   help="sequences per step, over all ranks (default 8)")
    p.add_argument("--ranks", metavar="P,P",
                   help="default 1,2,4; with --pp, --tp or --cp: 1 and as many as they need")
    p.add_argument("--microbatches", type=flags.integer(1), metavar="M",
                   help="pieces of a step (default 8 with --pp, else 1)")
    p.add_argument("--steps", type=flags.integer(1), default=3, metavar="N",
                   help="steps per job that count (default 3)")
    p.add_argument("--rounds", type=flags.integer(1), default=2, metavar="N",
                   help="how often each job gets its turn (default 2)")
    p.add_argument("--alone", action="store_true", help="leave PyTorch out")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    p.add_argument("--worker", action="store_true", help="be one rank of one job")
    flags.add_experts(p)
    parallel.add_flags(p)
    return p


# ------------------------------------------------------------------------------ one job

def work(args):
    """Be a rank of a job: take the steps; rank 0 prints their seconds."""
    mesh, (config, batches) = parallel.make_mesh(args), task(args)
    model = gpt.GPT(config)
    model = moe.replace_mlps(model, moe.asked(args)) if args.experts else model
    model = parallel.spread(model, mesh, args.sp, attention=args.attention,
                            method=args.cp_method, schedule=args.schedule, chunks=args.chunks,
                            zero=args.zero, recompute=args.recompute, precision=args.precision,
                            compress=args.compress, compress_after=args.compress_after)
    optimizer = parallel.equip(AdamW(model.parameters(), 1e-4), model, mesh, args.offload)
    laps = []
    for batch in batches:
        start = time.perf_counter()
        train_step(model, batch, optimizer, mesh, pieces(args))
        laps.append(time.perf_counter() - start)
    if mesh.world.rank == 0:
        print(json.dumps(laps[1:]))


def task(args):
    """What every job works on.  -> config, batches: one to warm up, then those that count"""
    corpus = Corpus(default_text(), gpt.sizes(args.preset)["context"])
    batches = [corpus.batch(args.batch, 0, step) for step in range(args.steps + 1)]
    return gpt.preset(args.preset, vocab=corpus.vocab), batches


def pieces(args):
    """How many micro-batches a step has."""
    return args.microbatches or (8 if (args.pp or 1) > 1 else 1)


def ours(args, ranks):
    """Run a job of ours.  -> seconds per step"""
    argv = [sys.executable, "-m", "minidist.bench.train", "--worker", *passed_on(args, ranks)]
    return finished([subprocess.Popen(argv if ranks == 1 else launch.command(ranks, argv),
                                      stdout=subprocess.PIPE, text=True,
                                      env={**environment.SETTINGS, **os.environ})])


def theirs(args, ranks):
    """Run a job of PyTorch's.  -> seconds per step"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", OPPONENT, *passed_on(args, ranks)]
    env = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
           "WORLD_SIZE": str(ranks)}
    return finished([subprocess.Popen(argv, stdout=subprocess.PIPE, text=True,
                                      env={**env, "RANK": str(rank)}) for rank in range(ranks)])


def passed_on(args, ranks):
    """Write down the flags of a job; one rank alone has nothing to spread."""
    names = [*MODEL, "batch", "steps"] + [*SPREAD, "microbatches"] * (ranks > 1)
    given = {name: getattr(args, name) for name in names}
    return [word for name, value in given.items() if value is not None
            for word in ("--" + name.replace("_", "-"), str(value))]


def finished(processes):
    """Wait for a job's processes; the first one prints the seconds of each step."""
    try:
        first = [process.communicate(timeout=PATIENCE)[0] for process in processes][0]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise BadInput(f"a job ended with status {[p.returncode for p in processes]}; it is "
                       f"{' '.join(processes[0].args)}")
    return json.loads(first.splitlines()[-1])


# ------------------------------------------------------------------------------ the table

def main():
    args = parser().parse_args()
    if args.worker:
        return work(args)
    if environment.launched():
        raise BadInput("bench train starts its own ranks; leave out -n and mpirun")
    counts = wanted(args)
    files.ready(args.json)
    opponent = not args.alone and bool(equal_of(args)) and all(
        map(find_spec, ("torch", "tests", OPPONENT)))
    print(headline(args, opponent))
    laps = {}
    for _ in range(args.rounds):
        for ranks in counts:
            laps.setdefault((ranks, "ours"), []).extend(ours(args, ranks))
            if opponent and ranks > 1:
                laps.setdefault((ranks, "torch"), []).extend(theirs(args, ranks))
    rows = table(args, counts, laps)
    show(rows)
    data = {"preset": args.preset, "batch": args.batch, "rows": rows}
    return files.deliver(("data", args.json, files.numbers(data)))


def wanted(args):
    """Read --ranks; refuse what does not fit the batch, or the other flags."""
    needed = math.prod(getattr(args, axis) or 1 for axis in parallel.OFFERED)
    args.ranks = args.ranks or ("1,2,4" if needed == 1 else f"1,{needed}")
    try:
        counts = sorted({int(word) for word in args.ranks.split(",")})
    except ValueError:
        raise BadInput(f"--ranks {args.ranks}: give numbers of ranks, such as 1,2,4") from None
    if counts[0] < 1 or counts[-1] > args.batch:
        raise BadInput(f"--ranks {args.ranks}: each rank needs one of {args.batch} sequences; "
                       f"use 1 to {args.batch} ranks")
    for ranks in counts[-1:] if needed == 1 else [n for n in counts if n > 1]:
        if math.prod(parallel.axis_sizes(args, ranks).values()) != ranks:
            raise BadInput(f"--ranks {args.ranks}: {ranks} ranks are no multiple of the {needed} "
                           "that the other flags ask for")
    if pieces(args) > args.batch:
        raise BadInput(f"{args.batch} sequences do not fill {pieces(args)} micro-batches; use "
                       f"--microbatches 1 to {args.batch}")
    gpt.preset(args.preset, vocab=1)
    return counts


def equal_of(args):
    """Name what of PyTorch does the same, if anything does."""
    if args.experts or any((getattr(args, axis) or 1) > 1 for axis in ("tp", "cp")) or any(
            getattr(args, name) for name in (*LESS, "compress")):
        return None
    if (args.pp or 1) > 1:
        alone = (args.dp or 1) == 1 and set(args.ranks.split(",")) <= {"1", str(args.pp)}
        return "pipelining" if alone and args.schedule in (None, "1f1b", "gpipe") else None
    return "fully_shard" if (args.zero or 0) > 1 else "DDP"


def table(args, counts, laps):
    """Turn seconds per step into rows, medians over all rounds."""
    tokens = args.batch * gpt.sizes(args.preset)["context"]
    one = statistics.median(laps[counts[0], "ours"])
    rows = []
    for ranks in counts:
        mine, other = laps[ranks, "ours"], laps.get((ranks, "torch"))
        step = statistics.median(mine)
        torch_ms = 1e3 * statistics.median(other) if other else None
        p, m = args.pp or 1, pieces(args)
        ideal = 1e3 * one / ranks * (m + p - 1) / m if ranks > 1 == counts[0] and p > 1 else None
        rows.append({"ranks": ranks, "tokens_per_s": tokens / step,
                     "scaling": one / step if counts[0] == 1 else None, "step_ms": 1e3 * step,
                     "step_min_ms": 1e3 * min(mine), "step_max_ms": 1e3 * max(mine),
                     "torch_ms": torch_ms, "ratio_to_torch": torch_ms and 1e3 * step / torch_ms,
                     "ideal_ms": ideal, "ratio_to_ideal": ideal and 1e3 * step / ideal})
    return rows


def headline(args, opponent):
    cores = environment.cores()
    other = equal_of(args)
    beside = (f"beside PyTorch {other} over gloo" if opponent else "nothing beside it" if args.alone
              else "nothing beside it: PyTorch or the repository's tests are not there" if other
              else "nothing beside it: PyTorch is not asked to do the same")
    return (f"{args.preset}, float32, AdamW, {args.batch} sequences per step in every row\n"
            f"{cores} cores, one BLAS thread per rank, NumPy {np.__version__}; {beside}\n"
            f"medians of {args.rounds} x {args.steps} steps, in turns, after one to warm up\n")


def show(rows):
    """Print the rows."""
    print("ranks   tokens/s  scaling   step (ms)     min     max   PyTorch (ms)  ours / PyTorch's")
    for r in rows:
        torch = f"{r['torch_ms']:12.0f}  {r['ratio_to_torch']:16.2f}" if r["torch_ms"] else ""
        scaling = "-" if r["scaling"] is None else f"{r['scaling']:.2f}"
        print(f"{r['ranks']:5} {r['tokens_per_s']:10,.0f} {scaling:>8} {r['step_ms']:11.0f} "
              f"{r['step_min_ms']:7.0f} {r['step_max_ms']:7.0f}   {torch}".rstrip())
    for r in rows:
        if r["ideal_ms"]:
            print(f"\n{r['ranks']} ranks, ideal {r['ideal_ms']:.0f} ms: a rank's share of one "
                  f"rank's step, and the bubble; ours / ideal {r['ratio_to_ideal']:.2f}")


if __name__ == "__main__":
    launch.run(main)
