"""Bench train: tokens per second on 1, 2 and 4 ranks, of the same global batch.

    round 1:  1 rank   2 ranks   PyTorch, 2   4 ranks   PyTorch, 4        round 2: the same again
              |- each a job of its own: one step to warm up, then --steps that count -|

Jobs take turns, since machines are noisy: what is compared has seen the same machine. scaling is
tokens/s over those of one rank, so p is perfect, up to the number of cores. The opponent is
PyTorch's DistributedDataParallel over gloo (with --zero 2 or 3, its fully_shard, which frees
parameters after forward at stage 3), on the same GPT, batch and optimizer, one thread per
rank as well; it runs where PyTorch is installed and the repository's tests are at hand.

Run: python -m minidist.bench train --preset mini --batch 8
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np

from minidist import BadInput, flags, parallel
from minidist.engine import gpt
from minidist.engine.data import Corpus, default_text
from minidist.engine.optim import AdamW
from minidist.ranks import environment, launch
from minidist.step import train_step

OPPONENT = "tests.gloo"                                 # a module: PyTorch is no dependency of ours
PATIENCE = 600                                          # seconds for one job


def parser():
    p = flags.Parser(prog="python -m minidist.bench train", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.bench train --preset mini --batch 8")
    p.add_argument("--preset", default="mini", help="lesson, nano or mini (default mini)")
    p.add_argument("--batch", type=flags.integer(1), default=8, metavar="B",
                   help="sequences per step, over all ranks (default 8)")
    p.add_argument("--ranks", default="1,2,4", metavar="P,P", help="default 1,2,4")
    p.add_argument("--steps", type=flags.integer(1), default=3, metavar="N",
                   help="steps per job that count (default 3)")
    p.add_argument("--rounds", type=flags.integer(1), default=2, metavar="N",
                   help="how often each job gets its turn (default 2)")
    p.add_argument("--alone", action="store_true", help="leave PyTorch out")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    p.add_argument("--worker", action="store_true", help="be one rank of one job")
    parallel.add_flags(p)
    return p


# ------------------------------------------------------------------------------ one job

def work(args):
    """Be a rank of a job: take the steps; rank 0 prints their seconds."""
    mesh, config, batches = setting(args)
    model = parallel.spread(gpt.GPT(config), mesh, zero=args.zero)
    optimizer, laps = parallel.equip(AdamW(model.parameters(), 1e-4), model), []
    for batch in batches:
        start = time.perf_counter()
        train_step(model, batch, optimizer, mesh)
        laps.append(time.perf_counter() - start)
    if mesh.world.rank == 0:
        print(json.dumps(laps[1:]))


def setting(args):
    """What every job works on.  -> mesh, config, batches: one to warm up, then those that count"""
    mesh = parallel.make_mesh(args)
    corpus = Corpus(default_text(), gpt.sizes(args.preset)["context"])
    batches = [corpus.batch(args.batch, 0, step) for step in range(args.steps + 1)]
    return mesh, gpt.preset(args.preset, vocab=corpus.vocab), batches


def ours(args, ranks):
    """Run a job of ours.  -> seconds per step"""
    argv = [sys.executable, "-m", "minidist.bench.train", "--worker", *passed_on(args)]
    return finished([subprocess.Popen(argv if ranks == 1 else launch.command(ranks, argv),
                                      stdout=subprocess.PIPE, text=True,
                                      env={**environment.SETTINGS, **os.environ})])


def theirs(args, ranks):
    """Run a job of PyTorch's.  -> seconds per step"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", OPPONENT, *passed_on(args)]
    env = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
           "WORLD_SIZE": str(ranks)}
    return finished([subprocess.Popen(argv, stdout=subprocess.PIPE, text=True,
                                      env={**env, "RANK": str(rank)}) for rank in range(ranks)])


def passed_on(args):
    sizes = ["--preset", args.preset, "--batch", str(args.batch), "--steps", str(args.steps)]
    return sizes + (["--zero", str(args.zero)] if args.zero else [])


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
    if args.json:
        flags.writable(args.json)
    opponent = not args.alone and all(map(find_spec, ("torch", "tests", OPPONENT)))
    print(headline(args, opponent))
    laps = {}
    for _ in range(args.rounds):
        for ranks in counts:
            laps.setdefault((ranks, "ours"), []).extend(ours(args, ranks))
            if opponent and ranks > 1:
                laps.setdefault((ranks, "torch"), []).extend(theirs(args, ranks))
    rows = table(args, counts, laps)
    show(rows)
    if args.json:
        data = json.dumps({"preset": args.preset, "batch": args.batch, "rows": rows}, indent=1)
        flags.write(args.json, lambda file: file.write(data.encode()))
    return 0


def wanted(args):
    """Read --ranks; refuse what does not fit the batch."""
    try:
        counts = sorted({int(word) for word in args.ranks.split(",")})
    except ValueError:
        raise BadInput(f"--ranks {args.ranks}: give numbers of ranks, such as 1,2,4") from None
    if counts[0] < 1 or counts[-1] > args.batch:
        raise BadInput(f"--ranks {args.ranks}: each rank needs one of {args.batch} sequences; "
                       f"use 1 to {args.batch} ranks")
    gpt.preset(args.preset, vocab=1)
    return counts


def table(args, counts, laps):
    """Turn seconds per step into rows, medians over all rounds."""
    tokens = args.batch * gpt.sizes(args.preset)["context"]
    one = statistics.median(laps[counts[0], "ours"])
    rows = []
    for ranks in counts:
        mine, other = laps[ranks, "ours"], laps.get((ranks, "torch"))
        step = statistics.median(mine)
        torch_ms = 1e3 * statistics.median(other) if other else None
        rows.append({"ranks": ranks, "tokens_per_s": tokens / step,
                     "scaling": counts[0] * one / step, "step_ms": 1e3 * step,
                     "step_min_ms": 1e3 * min(mine), "step_max_ms": 1e3 * max(mine),
                     "torch_ms": torch_ms, "ratio_to_torch": torch_ms and 1e3 * step / torch_ms})
    return rows


def headline(args, opponent):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    other = "fully_shard" if (args.zero or 0) > 1 else "DDP"
    beside = (f"beside PyTorch {other} over gloo" if opponent else "nothing beside it" if args.alone
              else "nothing beside it: PyTorch or the repository's tests are not there")
    return (f"{args.preset}, float32, AdamW, {args.batch} sequences per step in every row\n"
            f"{cores} cores, one BLAS thread per rank, NumPy {np.__version__}; {beside}\n"
            f"medians of {args.rounds} x {args.steps} steps, in turns, after one to warm up\n")


def show(rows):
    """Print the rows."""
    print("ranks   tokens/s  scaling   step (ms)     min     max   PyTorch (ms)  ours / PyTorch's")
    for r in rows:
        torch = f"{r['torch_ms']:12.0f}  {r['ratio_to_torch']:16.2f}" if r["torch_ms"] else ""
        print(f"{r['ranks']:5} {r['tokens_per_s']:10,.0f} {r['scaling']:8.2f} {r['step_ms']:11.0f} "
              f"{r['step_min_ms']:7.0f} {r['step_max_ms']:7.0f}   {torch}".rstrip())


if __name__ == "__main__":
    launch.run(main)
