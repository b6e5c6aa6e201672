"""EXCHANGE RATES      What does every technique buy, and what does it pay with?

  lifts   all three   memory, compute, bandwidth: each technique gives one of them for another
  costs   nothing     this is the table of what the lessons before have counted
  code    minidist/cost/, minidist/parallel.py
  run     python -m lessons.rates
"""
import math
from dataclasses import replace
from functools import cache

import numpy as np

from lessons import kit, owed, setting
from minidist import compress, cost, ledger, offload, parallel, recompute
from minidist.collectives import chosen
from minidist.cost import Layout
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.step import train_step

EXERCISE = [cost.zero_memory, cost.compressed]
ALONE = True
ROWS, AXES = 8, ("pp", "dp", "cp", "tp")
TRADES = {
    "dp": (dict(dp=4), "time for bandwidth"),
    "ZeRO 1": (dict(dp=4, zero=1), "O for nothing more"),
    "ZeRO 2": (dict(dp=4, zero=2), "G as well, for nothing more"),
    "ZeRO 3": (dict(dp=4, zero=3), "P as well, for half as much again"),
    "tp": (dict(tp=4), "P G O, some A for bandwidth in layers"),
    "tp + sp": (dict(tp=4, sequence="again"), "all A as well, for a quarter more"),
    "cp": (dict(cp=4), "A for keys going around"),
    "pp": (dict(pp=4, microbatches=4), "P G O for idle time"),
    "recompute blocks": (dict(recompute="blocks"), "A for compute"),
    "recompute attention": (dict(recompute="attention"), "T x T for little compute"),
    "offload": (dict(offload=4096), "O for the bandwidth of another link"),
    "fp16": (dict(dp=4, state=6, scaled=True), "half of A and of what is sent, for a loss scale")}


def on_a_small_one(lesson):
    """What was counted, on one small GPT?

    One rank's share of a step of the same batch: rank 0 of four, or the only one. Held against one
    process without anything; every number is also predicted, and equal."""
    lesson.predict("ZeRO 1, 2, 3 on four ranks: what does stage 3 hold of P + G + O?", 25, "%",
                   why="every class is cut in four", mistakes={37.5: "that is stage 2, fp32"})
    one, rows = counted("one process", Layout()), []
    for name, (axes, _) in TRADES.items():
        found = counted(name, Layout(**axes, chosen=chosen))
        rows.append([name, f"{states(found) / states(one):.0%}", f"{found['A'] / one['A']:.0%}",
                     kit.size(found["sent"]), kit.size(found["moved"]),
                     f"{computed(Layout(**axes)) / computed(Layout()):.2f}"])
    lesson.table(["technique", "P + G + O", "A", "sent", "moved", "FLOPs of a rank"], rows)


def on_a_large_one(lesson):
    """What would it be for GPT-3?

    By the same formulas: 175B parameters in fp16, 8 ranks, a micro-batch of one row on each."""
    lesson.predict("recomputing every block of GPT-3: how much more does a step compute?", 33, "%",
                   why="one more forward to a forward and a backward of two",
                   mistakes={100: "only the forward runs again", 50: "backward counts double"})
    rows = []
    for name, (axes, why) in list(TRADES.items())[:-1]:            # all of them are in fp16
        eight = {key: 8 if value == 4 else value for key, value in axes.items()}
        if "offload" in axes:
            eight["offload"] = 1 << 26                      # bytes of a chunk
        rows_of_it = 8 if "dp" in axes or "pp" in axes else 1
        step = cost.step(replace(cost.GPT3, B=rows_of_it), Layout(**{"state": 6, **eight}))
        alive = min(eight.get("pp", 1), eight.get("microbatches", 1))   # micro-batches at a time
        rows.append([name, kit.size(sum(step.held[:3])), kit.size(alive * step.held.activations),
                     kit.size(sum(price.bytes for price in step.sent.values())), why])
    lesson.table(["technique", "P + G + O", "A", "sent", "trades"], rows)


def the_rate(lesson):
    """At which rate?

    Bytes that travel, or FLOPs that are added, for each byte that is not held: GPT-3, 8 ranks."""
    plain, rows = cost.step(replace(cost.GPT3, B=1), Layout(state=6)), []
    for name in ("ZeRO 1", "ZeRO 3", "tp", "tp + sp", "cp", "recompute blocks",
                 "recompute attention"):
        axes = {key: 8 if value == 4 else value for key, value in TRADES[name][0].items()}
        step = cost.step(replace(cost.GPT3, B=axes.get("dp", 1)), Layout(**axes, state=6))
        saved = sum(plain.held) - sum(step.held)
        sent = sum(price.bytes for price in step.sent.values())
        again = cost.recomputed_flops(replace(cost.GPT3, B=1), axes["recompute"].replace(
            "sqrt", "blocks")) if "recompute" in axes else 0
        rows.append([name, kit.size(saved), f"{sent / saved:.2f}", f"{again / saved:,.0f}"])
    lesson.table(["technique", "saved", "bytes sent per byte", "FLOPs per byte"], rows)
    lesson.say("""
        Saved once, for the whole training; paid in every step. So what lies still (P, G, O) is
        bought with bytes that can hide, and A, which comes and goes, with compute.""")
    lesson.figure(draw)


def states(found):
    return found["P"] + found["G"] + found["O"]


@cache
def counted(name, layout):
    """Take a step on thread ranks, and count what rank 0 holds, sends and moves."""
    ranks = math.prod(getattr(layout, axis) for axis in AXES)
    return run_threads(ranks, one_rank, layout)[0]


def one_rank(world, layout):
    mesh = DeviceMesh(world, **{axis: getattr(layout, axis) for axis in AXES})
    model = parallel.spread(setting.model(dtype=np.float32), mesh, layout.sequence,
                            zero=layout.zero, recompute=layout.recompute,
                            precision="fp16" if layout.scaled else None)
    optimizer = parallel.equip(setting.ADAMW(model.parameters()), model)
    batch = setting.words(ROWS)
    if layout.offload:
        offload.attach(optimizer, model, offload.Host, world, layout.offload)
        train_step(model, batch, optimizer, mesh)           # the first one puts the state there
    before = moved(optimizer, layout)
    with world.counting() as count:
        train_step(model, batch, optimizer, mesh, layout.microbatches)
    held, passed = ledger.held(model, optimizer), moved(optimizer, layout) - before
    model.zero_grad()
    first = model.localize(batch).split(layout.microbatches)[0]
    A = ledger.held(model, None, model(first), batch=first).activations
    return dict(P=held.parameters, G=held.gradients, O=held.optimizer, A=A, sent=count.bytes,
                moved=passed)


def moved(optimizer, layout):
    """Bytes that have been read from, and written to, where the optimizer's state lies."""
    account = optimizer.offload.account() if layout.offload else {}
    return account.get("read", 0) + account.get("written", 0)


def predicted(layout):
    """The same by formula.  A: what forward has kept when it ends, of one micro-batch."""
    sizes, step = small(layout), cost.step(small(layout), layout)
    A = {"blocks": cost.recomputed_activations(sizes, 1)[0],
         "attention": cost.selective_activations(sizes)}.get(
             layout.recompute, step.held.activations)
    return dict(P=step.held.parameters, G=step.held.gradients, O=step.held.optimizer, A=A,
                sent=sum(price.bytes for price in step.sent.values()),
                moved=step.moved.read + step.moved.written)


def computed(layout):
    """FLOPs of rank 0's products, by formula."""
    return cost.step(small(layout), layout).flops


def small(layout):
    """The small GPT as cost takes it, in float32 or fp16; losses are summed in float32."""
    return cost.Sizes.of(setting.model().config, B=ROWS, w=2 if layout.scaled else 4, loss=4)


def prove(lesson):
    """Is every number the formula's?

    ZeRO's table as its paper prints it; what compressed gradients send, against cost.compressed;
    and all that was counted above, against cost.step."""
    errors = [abs(cost.zero_memory(7.5e9, 64, stage) / 1e9 - printed)
              for stage, printed in enumerate((120, 31.4, 16.6, 1.88))]
    lesson.check("ZeRO's paper, table 1", max(errors), 0.05)
    errors = []
    for form in ("fp16", "1bit", "topk:0.1", "powersgd:2"):
        name, _, number = form.partition(":")
        errors += [abs(sent - cost.compressed(name, owed.SHAPES, cost.Group(p, rank, chosen), 8,
                                              float(number or 0)).bytes)
                   for p in (1, 2, 3) for rank, sent in enumerate(run_threads(p, sends, form))]
    lesson.check("bytes of compressed gradients", max(errors))
    for name, (axes, _) in TRADES.items():
        layout = Layout(**axes, chosen=chosen)
        found, wanted = counted(name, layout), predicted(layout)
        lesson.check(name, kit.difference(np.array([*found.values()], float),
                                          np.array([*wanted.values()], float)))


def sends(comm, form):
    with comm.counting() as count:
        compress.make(form)(owed.gradients(comm.rank, 0), comm)
    return count.bytes


@kit.breaks(parallel, "replicas")
def stage_two(model, mesh, options):
    """Stage 3 of ZeRO is asked for, and stage 2 is what runs.

    The losses are the same by design, a third of the bytes is not sent, P is held four times."""
    return stage_two.original(model, mesh, dict(options, zero=min(options["zero"], 2)))


@kit.breaks(recompute, "selective")
def nothing_again(model):
    """--recompute attention changes nothing: the T x T weights stay.

    Nobody notices from the losses, which are the same by design; the ledger does."""
    return model


def draw(figure):
    axes = figure.subplots()
    for name, (spread, _) in TRADES.items():
        found = counted(name, Layout(**spread, chosen=chosen))
        one = counted("one process", Layout())
        axes.plot(found["sent"] + found["moved"], (states(found) + found["A"])
                  / (states(one) + one["A"]), "o")
        axes.annotate(name, (found["sent"] + found["moved"], (states(found) + found["A"])
                             / (states(one) + one["A"])), fontsize=7)
    axes.set(xlabel="bytes sent or moved, a rank and step", ylabel="held, of one process",
             title="the small GPT: memory against bandwidth")


TAKEAWAY = "No technique is free. Know what you have most of, and pay with that."
FIELD = "the article's closing table; ZeRO's and Megatron's papers, each for its own rows"
TRY = ["a link of 10 GB/s and a card of 100 Tflop/s: at which A is recomputation cheaper than cp?",
       "which two rows together hold the least, and what do they send?"]
SCREENS = [on_a_small_one, on_a_large_one, the_rate, prove, stage_two]

if __name__ == "__main__":
    kit.run(SCREENS)
