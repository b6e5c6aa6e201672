"""MEMORY      What fills a GPU during training, and how much of it is there twice?

  lifts   nothing     it counts what ZeRO, tp, pp, recompute and offload will cut or move
  costs   memory      16 bytes per parameter before the first token, whatever the batch
  code    minidist/ledger.py, minidist/cost/model.py
  before  lessons.step  (what a step keeps)             next  lessons.collectives
  run     mpirun -n 4 python -m lessons.memory        or: python -m lessons.memory -n 4
"""
import tracemalloc
import zlib
from dataclasses import replace
from functools import partial

import numpy as np

from lessons import kit
from minidist import cost, dp, ledger, step
from minidist.engine import attention, graph, nn, optim
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT, preset
from minidist.mesh import DeviceMesh

EXERCISE = [ledger.held]
VOCAB, ROWS = 29, 12                                  # 12 rows: shared by 1, 2, 3 or 4 ranks
BYTES = {"fp16": np.float16, "fp32": np.float32}      # bf16 is as large as fp16
RECIPES = [("float32", "fp32", "fp32", 0), ("mixed, fp16 gradients", "fp16", "fp16", 1),
           ("mixed, bf16 with fp32 gradients", "fp16", "fp32", 1)]
GPT3 = replace(cost.GPT3, B=1)                        # one sequence
ONE_B = cost.Sizes(D=2048, L=20, T=2048, V=2048, H=16)        # 12 L D^2 = 1.0e9
GPU = 80e9                                            # an H100


def main(lesson):
    lesson.part("Four kinds of memory, counted from the arrays that hold them")
    lesson.source(ledger.held)
    lesson.say("""
        graph_bytes follows the tape and counts every buffer once, however many views it has. Is
        anything missing? Python's own allocator knows nothing of tapes, and is asked as well:
        """)
    against_allocator(lesson)

    lesson.part("Bytes per parameter")
    lesson.say("P, G, O of a million parameters under AdamW, from arrays:\n")
    sums = recipes(lesson)
    lesson.say("""
        fp16 keeps a master copy of the weights in fp32: an update is often smaller than the last
        digit of a 16-bit weight. With m and v that makes the O of 12 bytes. Inference: 2 bytes.""")
    lesson.predict("1B parameters, mixed precision: GB before the first token?", sums[1], "GB",
                   why="2 + 2 + 4 + 4 + 4", mistakes={2: "only the weights", 4: "no optimizer",
                                                      12: "only the optimizer"})

    lesson.part("The article's sum, corrected")
    article(lesson, sums[1])

    lesson.part("Memory in the course of one step")
    lesson.say("""
        Forward grows A, part by part; backward frees A and fills G; the update needs P, G and O.
        The peak comes where forward ends. Twice the rows: twice the A, and nothing else.
        """)
    over_step(lesson)

    lesson.part("A group that shares the batch: who holds what?")
    redundancy(lesson)

    lesson.part("Is it right?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(views_count)
    lesson.takeaway(
        "P, G, O: 16 bytes per parameter, the same on every rank of DP. A: as the batch, shared.",
        field="model states and residual states (ZeRO); torch.cuda.memory_allocated",
        tries=["which recipe lets 1B parameters fit 16 GB, with room for activations?",
               "at which T is A of GPT-3 as large as its P + G + O, one sequence at a time?",
               "write held yourself: python -m lessons.memory --stub mine.py; then --mine mine.py"])


def prove(lesson):
    """Ledger against cost and allocator; rows double A only; copies against shares."""
    c, (model, optimizer) = preset("lesson", VOCAB), setting()
    P = 4 * cost.gpt_parameters(cost.Sizes.of(c))
    small, held = (held_after(model, optimizer, rows) for rows in (ROWS // 2, ROWS))
    lesson.ledger(("P, whatever the batch", "4 n", P, held.parameters),
                  ("G, whatever the batch", "P", P, held.gradients),
                  ("O, whatever the batch", "2 P", 2 * P, held.optimizer),
                  (f"A of {ROWS} rows", "cost.gpt_activations", activations(ROWS),
                   held.activations),
                  (f"A of {ROWS // 2} rows", "half, and 8 T / 2", activations(ROWS // 2),
                   small.activations),
                  *shared(lesson, held))
    against_allocator(lesson)


# ---- breaks

@kit.breaks(graph, "buffer")
def views_count(array):
    """A view counts as memory of its own, beside the array that it looks into.

    q, k and v look into one projection; a reshape is not a copy. Tools that add up tensors instead
    of buffers report far more than a GPU has."""
    return array


@kit.breaks(ledger, "held")
def one_moment(model, optimizer=None, *roots, batch=None):
    """Of AdamW's two moments only the first is counted: O looks half as large.

    Estimates that know "the optimizer state" as one copy of the weights are off by 4 bytes per
    parameter, a quarter of all that does not depend on the batch."""
    held = one_moment.original(model, optimizer, *roots, batch=batch)
    return held._replace(optimizer=held.optimizer // 2)


@kit.breaks(nn.Module, "parameters")
def tied_twice(module):
    """The embedding and the head share a matrix, and both are asked what they hold.

    P, and with it G and O, count it twice (in GPT-2 small that is 39M of 124M parameters)."""
    return [p for _, _, p in module.slots()]


# ---- the screens

def against_allocator(lesson):
    """Compare what the ledger says a forward keeps with what Python's allocator has given out."""
    kept, given = lesson.share(traced)
    lesson.check(f"A after forward: ledger {kit.size(kept)}, allocator {kit.size(given)}",
                 abs(kept / given - 1), 0.03)


def traced():
    """Trace one forward.  -> bytes by ledger, bytes by tracemalloc"""
    model, batch = setting()[0], random_batch(VOCAB, 16, 64, seed=0, step=0)
    model(batch)                                      # what is made once, and kept for ever
    tracemalloc.start()
    try:
        loss = model(batch)
        given = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return ledger.held(model, None, loss, batch=batch).activations, given


def recipes(lesson, n=10 ** 6):
    """Make the arrays of every recipe, print their sizes.  -> bytes per parameter of each"""
    rows, sums = [], []
    for name, weights, grads, master in RECIPES:
        P, G = (np.zeros(n, BYTES[kind]) for kind in (weights, grads))
        state = [np.zeros(n, np.float32) for _ in range(2 + master)]
        held = [P.nbytes, G.nbytes, sum(x.nbytes for x in state)]
        sums.append(sum(held) / n)
        rows.append([name, *(x // n for x in held), int(sums[-1]), kit.size(sums[-1] * 1e9)])
    lesson.table(["recipe", "P", "G", "O", "sum", "of 1B parameters"], rows)
    return sums


def article(lesson, per_parameter):
    """The four classes of 1B parameters and of GPT-3, beside what the article says."""
    big = cost.gpt_parameters(GPT3)
    kept = [c.L * cost.textbook_activations(c) for c in (ONE_B, GPT3)]
    model_states, gpus = per_parameter * 175e9, per_parameter * 175e9 / GPU
    sums = [f"{per_parameter + A:.0f} GB" for A in (4, 8)]
    lesson.table(["", "the article", "counted"], [
        ("1B: P + G + O", "2 + 2 + 12 GB", kit.size(per_parameter * 1e9)),
        ("1B: A", "4 to 8 GB", f"{kit.size(kept[0])} per sequence of {ONE_B.T} tokens"),
        ("1B: all", "16 to 20 GB", " to ".join(sums) + ", by its own A"),
        ("GPT-3: parameters", "175B", f"{big / 1e9:.1f}B"),
        ("GPT-3: P + G + O", "about 3 TB", kit.size(model_states)),
        ("GPT-3: A", "", f"{kit.size(kept[1])} per sequence of {GPT3.T} tokens")])
    lesson.say(f"""
        16 GB is the sum *before* activations: the article left them out of its total. A is
        34 s b h + 5 a s^2 b bytes per layer: one sequence costs {kept[1] / 350e9:.1f} of what the
        weights take, so nobody keeps it all (flash, recompute). P + G + O: {gpus:.0f} H100s.""")


def over_step(lesson):
    """Sample a step at two batch sizes, and show the turning points."""
    runs = {rows: lesson.share(partial(sampled, rows)) for rows in (ROWS, 2 * ROWS)}
    table = []
    for rows, events in runs.items():
        last = max(i for i, (phase, _) in enumerate(events) if phase == "forward")
        for name, (_, held) in (("forward ends", events[last]), ("backward ends", events[-1])):
            table.append([rows, name, *map(kit.size, held), kit.size(sum(held))])
    lesson.table(["rows", "when", "P", "G", "O", "A", "all"], table)
    lesson.figure(draw, runs)


def sampled(rows):
    """One step, counted after each part of the model and each gradient."""
    model, optimizer = setting()
    return ledger.over_step(model, random_batch(VOCAB, 16, rows, 0, 1, False), optimizer)


def redundancy(lesson):
    """A row of every rank; then how many bytes there are, and how many different ones."""
    p = lesson.comm.size
    held, prints = on_a_rank(lesson)
    lesson.rows(["P parameters", "G gradients", "O AdamW's state", "A activations", "P, G, O are"],
                [*map(kit.size, held), " ".join(prints)])
    once = held_after(*setting(), ROWS)
    everyone = np.array(lesson.collect(list(held))).sum(0)
    lesson.table(["", "one process", "all ranks", "of it copies"],
                 [(name, kit.size(one), kit.size(int(every)), f"{1 - one / every:.0%}")
                  for name, one, every in zip("PGOA", once, everyone)])
    copies = f"{p - 1} of {p} copies add nothing" if p > 1 else "more ranks would hold copies"
    lesson.say(f"""
        P, G and O are the same bytes everywhere (see their checksums): {copies}.
        A is cut, not copied. So DP makes A fit, never the model; ZeRO-1 shares O, ZeRO-2
        also G, ZeRO-3 also P: then 16/p bytes per parameter.""")


def shared(lesson, once):
    """Ledger rows: P, G, O in p equal copies; shares of A add up to that of one process."""
    p, (held, prints) = lesson.comm.size, on_a_rank(lesson)
    model_states, A = np.array(lesson.collect([sum(held[:3]), held.activations])).sum(0)
    distinct = [len(set(column)) for column in zip(*lesson.collect(prints))]
    return [("P + G + O, all ranks together", "p times one process",
             p * sum(once[:3]), model_states),
            ("different ones among the ranks", "1 P, 1 G, 1 O", 3, sum(distinct)),
            ("A, all ranks together", "one process + 8 (p-1) T",
             once.activations + 8 * (p - 1) * preset("lesson", VOCAB).context, A)]


# ---- the setting

def setting():
    """A small GPT in float32, whose optimizer has its state: one step is done."""
    model = GPT(preset("lesson", VOCAB))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    step.train_step(model, random_batch(VOCAB, 16, ROWS, 0, 0, ragged=False), optimizer)
    return model, optimizer


def held_after(model, optimizer, rows):
    """P, G and O after a step, and A after the next forward."""
    batch = random_batch(VOCAB, 16, rows, 0, 1, ragged=False)
    return ledger.held(model, optimizer, model(batch), batch=batch)


def activations(rows):
    return cost.gpt_activations(cost.Sizes.of(preset("lesson", VOCAB), B=rows, tile=attention.TILE))


def on_a_rank(lesson):
    """Take a DP step, and the next forward.  -> what this rank holds, checksums of P, G and O"""
    model, mesh = GPT(preset("lesson", VOCAB)), DeviceMesh(lesson.comm, dp=lesson.comm.size)
    dp.parallelize(model, mesh["dp"])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    batch = random_batch(VOCAB, 16, ROWS, 0, 0, ragged=False)
    step.train_step(model, batch, optimizer, mesh)
    mine, params = model.localize(batch), model.parameters()
    held = ledger.held(model, optimizer, model(mine), batch=mine)
    kinds = ([p.data for p in params], [p.grad for p in params],
             [x for p in params for x in optimizer.state[p.name]])
    return held, [f"{zlib.crc32(b''.join(x.tobytes() for x in kind)):08x}" for kind in kinds]


def draw(figure, runs):
    for axes, (rows, events) in zip(figure.subplots(1, len(runs), sharey=True), runs.items()):
        phases, held = zip(*events)
        params, grads, state, kept = np.array(held).T / 1e6
        axes.stackplot(range(len(held)), params, state, grads, kept, step="post", labels=[
            "P  parameters", "O  optimizer state", "G  gradients", "A  activations"])
        axes.axvline(phases.index("backward"), color="black", linewidth=0.8)
        axes.set(title=f"{rows} rows", xlabel="forward by parts | backward by gradients",
                 xlim=(0, len(held) - 1))
    figure.axes[0].set_ylabel("MB held")
    figure.axes[0].legend(loc="upper right")
    figure.suptitle("One step: P, G and O do not ask for the batch; A does")


if __name__ == "__main__":
    kit.run(main)
