"""Bench of experts: one layer beside a dense MLP of the same FLOPs, alone and over ranks; losses.

A layer forward and backward, float32, one thread per rank. The dense MLP's hidden width is that of
the k experts that a token meets. All take turns, so that a busy machine disturbs them alike; a
ratio is the median of the ratios of the rounds.

With --losses N, nothing is timed: a dense GPT and one with experts, of the same FLOPs per token,
are trained on the default text for N steps each.

Run:    python -m minidist.bench moe -n 2
        python -m minidist.bench moe --losses 500
Lesson: python -m lessons.moe
"""
import statistics
from types import SimpleNamespace

import numpy as np

from minidist import cost, ep, files, flags, moe, train
from minidist.bench.attention import alone, together
from minidist.engine import gpt
from minidist.engine.nn import Module
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh
from minidist.progress import History, Progress
from minidist.ranks import comm, environment


def parser():
    p = flags.Parser(prog="python -m minidist.bench moe", description=__doc__.split("\n")[0],
                     epilog="example: python -m minidist.bench moe -n 2")
    p.add_argument("--preset", help="lesson, nano or mini (default: mini; for losses nano)")
    p.add_argument("--experts", type=flags.integer(1), default=8, metavar="E", help="default 8")
    p.add_argument("--top-k", type=flags.integer(1), metavar="K",
                   help="experts for each token (default 2; for losses 1)")
    p.add_argument("--batch", type=flags.integer(1), default=8, metavar="B",
                   help="sequences, over all ranks (default 8)")
    p.add_argument("--rounds", type=flags.integer(1), default=7, metavar="N",
                   help="measured, after one to warm up (default 7)")
    p.add_argument("--losses", type=flags.integer(1), metavar="N",
                   help="train for N steps rather than measure time")
    p.add_argument("--json", metavar="FILE", help="write the table as data")
    return p


def main():
    args = parser().parse_args()
    world = comm.world() if environment.launched() else comm.solo()
    args.top_k = args.top_k or (1 if args.losses else 2)
    args.preset = args.preset or ("nano" if args.losses else "mini")
    files.ready(args.json)
    rows = losses(args, world) if args.losses else times(args, world)
    if world.rank == 0:
        print("\n".join((loss_lines if args.losses else time_lines)(args, rows)))
        return files.deliver(("data", args.json, files.numbers({"rows": rows})))
    return 0


# ------------------------------------------------------------------------ time

class Layer(Module):
    """A model that is one layer."""

    def __init__(self, layer):
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def times(args, world):
    """Time dense and experts in turn, rank 0 alone, then experts over all ranks.  -> rows"""
    config = gpt.preset(args.preset, vocab=1)
    routing = moe.MoEConfig(args.experts, args.top_k, bias=moe.RATE)
    wide = SimpleNamespace(width=config.width, hidden=args.top_k * config.hidden,
                           layers=config.layers)
    x = np.random.default_rng(0).standard_normal((args.batch, config.context, config.width),
                                                 np.float32)
    layers = [gpt.MLP("dense", wide, 0, np.float32),
              *(moe.MoE("moe", routing, config, 0, np.float32) for _ in range(2))]
    mine = np.array_split(x, world.size)[world.rank]
    with DeviceMesh(world, dp=world.size, ep=world.size) as mesh:
        shared = ep.parallelize(Layer(layers[2]), mesh["ep"])
        works = [work(layers[0], x), work(layers[1], x), work(shared, mine)]
        laps = [[] for _ in works]
        for _ in range(args.rounds + 1):
            for series, one, way in zip(laps, works, (alone, alone, together)):
                series.append(way(world, one))
    names = "dense", f"{args.experts} experts", f"the same, ep={world.size}"
    return [row(name, series[1:], laps[0][1:], laps[1][1:])
            for name, series in zip(names, laps)][:3 if world.size > 1 else 2]


def work(layer, x):
    """Make a function that goes forward and backward once."""
    def once():
        for p in layer.parameters():
            p.grad = None
        layer(Tensor(x, requires_grad=True)).backward(x)
    return once


def row(name, laps, dense, one):
    """One line of the table: medians, and of rounds the ratios to dense and to one rank."""
    of = [statistics.median(a / b for a, b in zip(laps, other)) if any(other) else 0
          for other in (dense, one)]
    return dict(layer=name, ms=1e3 * statistics.median(laps), of_dense=of[0], of_one_rank=of[1])


def time_lines(args, rows):
    config = gpt.preset(args.preset, vocab=1)
    yield (f"one layer of {args.preset}, width {config.width}, {args.batch * config.context} "
           f"tokens, float32, {args.top_k} experts for each; one thread per rank;")
    yield f"medians of rounds taken in turn\n\n{'layer':20} {'ms':>8} {'of dense':>9} {'of one':>7}"
    for r in rows:
        yield f"{r['layer']:20} {r['ms']:8.1f} {r['of_dense']:9.2f} {r['of_one_rank']:7.2f}"


# ------------------------------------------------------------------------ losses

def losses(args, world):
    """Train a dense GPT and one with experts on the same batches.  -> rows"""
    given = ["--experts", str(args.experts), "--top-k", str(args.top_k)]
    return [trained(args, flags_, world) for flags_ in
            ([], [*given, "--balance", "bias"], [*given, "--balance", "aux"],
             [*given, "--balance", "none"])]


def trained(args, given, world):
    """Train one model.  -> row"""
    o = train.options(["--preset", args.preset, "--steps", str(args.losses), "--no-figure", *given])
    run, history = train.build(o), History()
    with Progress(o.steps, show=False) as progress:
        train.train(run, o, progress, history)
    sizes = train.sizes(o, run.config)
    layers = [layer.counts for layer in moe.mixtures(run.model)]
    return dict(model=f"experts, {o.balance}" if o.experts else "dense",
                parameters=cost.gpt_parameters(sizes), active=cost.active_parameters(sizes),
                flops=cost.gpt_flops(sizes) // sizes.N, val_steps=history.val_steps,
                val_losses=history.val_losses,
                busiest=max((float(n.max() / n.mean()) for n in layers), default=1.0))


def loss_lines(args, rows):
    steps = rows[0]["val_steps"]
    shown = [*steps[:-1:2], steps[-1]]
    yield (f"{args.preset}, {args.experts} experts, {args.top_k} for each token, {args.losses} "
           "steps on the default text: validation loss")
    yield (f"\n{'model':15} {'parameters':>11} {'FLOPs/token':>12} {'busiest':>8}"
           + "".join(f"{f'step {step}':>10}" for step in shown))
    for r in rows:
        found = dict(zip(r["val_steps"], r["val_losses"]))
        yield (f"{r['model']:15} {r['parameters']:11,} {r['flops']:12,} {r['busiest']:8.2f}"
               + "".join(f"{found[step]:10.3f}" for step in shown))
