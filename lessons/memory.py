"""MEMORY      What fills a GPU during training, and how much of it is there twice?

  lifts   nothing     it counts what ZeRO, tp, pp, recompute and offload will cut or move
  costs   memory      so many bytes per parameter before the first token, whatever the batch
  code    minidist/ledger.py, minidist/cost/model.py
  run     mpirun -n 4 python -m lessons.memory        or: python -m lessons.memory -n 4
"""
import tracemalloc
import zlib

import numpy as np

from lessons import gpus, kit, pictures, questions, setting
from lessons.gpus import GPT3, GPU, ONE_B
from minidist import cost, ledger, step
from minidist.engine import graph, nn, optim
from minidist.engine.tensor import Tensor, graph_bytes
from minidist.ranks.comm import run_threads

EXERCISE = [ledger.held]
ROWS = 12                                             # shared by 1, 2, 3 or 4 ranks
BYTES = {"fp16": np.float16, "fp32": np.float32}      # bf16 is as large as fp16
RECIPES = [("float32", "fp32", "fp32", 0), ("mixed, fp16 gradients", "fp16", "fp16", 1),
           ("mixed, bf16 with fp32 gradients", "fp16", "fp32", 1)]


def bytes_per_parameter(lesson):
    """Bytes per parameter

    P are parameters, G gradients, O the optimizer's state, A activations. AdamW keeps two running
    means per parameter in fp32, and beside fp16 weights a master copy of them in fp32: an update
    is often smaller than the last digit of an fp16 weight."""
    lesson.predict("1B parameters, mixed precision, fp16: GB before the first token?", 16, "GB",
                   why="2 + 2 + 4 + 4 + 4", mistakes={2: "only the weights", 4: "no optimizer",
                                                      12: "only the optimizer's three"})
    lesson.table(["a million, from arrays", "P", "G", "O", "sum", "of 1B parameters"],
                 [made(*recipe) for recipe in RECIPES])


def made(name, weights, grads, master, n=10 ** 6):
    """Make the arrays of a recipe.  -> its row of the table"""
    P, G = (np.zeros(n, BYTES[kind]).nbytes for kind in (weights, grads))
    state = sum(np.zeros(n, np.float32).nbytes for _ in range(2 + master))
    total = (P + G + state) // n
    return name, P // n, G // n, state // n, total, kit.size(total * 1e9)


def the_article_corrected(lesson):
    """The article's sum, corrected

    A is 34 s b h + 5 a s^2 b bytes per layer (lessons.step): s tokens, b sequences, width h, a
    heads. The 1B model here: h = 2048, 20 layers, 16 heads. GPT-3: 12288, 96, 96."""
    lesson.predict("GPT-3, one sequence of 2048 tokens: GB of activations?", 275, "GB",
                   why="2.87 GB per layer", mistakes={2.87: "that is one layer of 96"})
    big = cost.gpt_parameters(GPT3)
    lesson.table(["", "the article", "counted"], [
        ("1B: P + G + O", "2 + 2 + 12 GB", "16 GB, before activations"),
        ("1B: with A, 4 to 8 GB", "16 to 20 GB", "20 to 24 GB, by its own A"),
        ("GPT-3: P + G + O", "about 3 TB", f"{kit.size(16 * big)}: {16 * big / GPU:.0f} H100s")])
    lesson.table(["GB on each GPU, each alone", "1B: P + G + O", "A", "GPT-3: P + G + O", "A"],
                 gpus.ledgers(ONE_B, GPT3))


def over_a_step(lesson):
    """Memory in the course of one step

    Forward grows A, part by part; backward frees A and fills G; the update needs P, G and O. The
    peak comes where forward ends. Twice the rows: twice the A, and nothing else."""
    (model, optimizer), runs = trained(), {}
    for rows in (ROWS, 2 * ROWS):
        runs[rows] = ledger.over_step(model, setting.words(rows, 1), optimizer)
    table = []
    for rows, events in runs.items():
        last = max(i for i, (phase, _) in enumerate(events) if phase == "forward")
        for name, (_, held) in (("forward ends", events[last]), ("backward ends", events[-1])):
            table.append([rows, name, *map(kit.size, held), kit.size(sum(held))])
    lesson.table(["rows", "when", "P", "G", "O", "A", "all"], table[:3])   # the last is as the 2nd
    lesson.figure(pictures.memory, {f"{rows} rows": events for rows, events in runs.items()})


def who_holds_what(lesson):
    """A group that shares the batch: who holds what?"""
    p, (held, prints) = lesson.comm.size, after_a_step(lesson.comm, "dp")
    ranks = lesson.collect([*map(kit.size, held), " ".join(prints)])
    alike = p > 1 and all(row == ranks[0] for row in ranks)
    lesson.table(["rank", "P parameters", "G gradients", "O AdamW's state", "A activations",
                  "P, G, O are"], [[f"0 to {p - 1}", *ranks[0]]] if alike else
                 [[str(r), *row] for r, row in enumerate(ranks)])
    copies = f"{p - 1} of {p} copies add nothing" if p > 1 else "more ranks would hold copies"
    lesson.fill(f"""
        P, G and O are the same bytes everywhere (see checksums): {copies}. A is shared: DP makes A
        fit, never the model. Four axes can be cut; then one of four ranks holds:""")
    one, *cuts = lesson.share(lambda: [four_axes(axis) for axis in ("", *AXES)])
    lesson.table(["cut into four", "P + G + O", "of it all", "A", "of it all"],
                 [(AXES[axis], kit.size(states), f"{states / one[0]:.0%}", kit.size(A),
                   f"{A / one[1]:.0%}") for axis, (states, A) in zip(AXES, cuts)])


AXES = {"dp": "the batch (dp)", "tp": "inside each layer (tp)", "pp": "the layers: one block (pp)",
        "again": "the sequence as well (tp + sp)"}


def four_axes(axis):
    """Train a step with one axis cut into four.  -> bytes of P + G + O, of A, on rank 0"""
    def rank(comm):
        model, batch = setting.model(dtype=np.float32), setting.words(ROWS)
        if axis == "pp":
            block, x = model.blocks[0], np.ones((ROWS, setting.CONTEXT, 48), np.float32)
            y = block(Tensor(x, requires_grad=True), batch)
            return (4 * sum(p.data.nbytes for p in block.parameters()),
                    graph_bytes(y, exclude=ledger.known(block, batch)))
        held, _ = after_a_step(comm, axis)
        return sum(held[:3]), held.activations
    return run_threads(4 if axis else 1, rank)[0]


def prove(lesson):
    """Is it right?

    Ledger against formula: N tokens in 12 rows, n of them with a target, 4 bytes per number. And
    Python's own allocator, which knows nothing of tapes, is asked what a forward has taken."""
    questions.memory(lesson)
    model, optimizer = trained()
    s = cost.Sizes.of(model.config, B=ROWS)
    P, A, p = 4 * cost.gpt_parameters(s), cost.gpt_activations(s), lesson.comm.size
    small, held = (ledger.held(model, optimizer, model(batch), batch=batch)
                   for batch in (setting.words(ROWS // 2, 1), setting.words(ROWS, 1)))
    mine, prints = after_a_step(lesson.comm, "dp")
    states, shares = np.array(lesson.collect([sum(mine[:3]), mine.activations])).sum(0)
    lesson.ledger(("P  parameters", "4 (12 L D^2 + 13 L D + (V+T+2) D)", P, held.parameters),
                  ("G  gradients", "P", P, held.gradients),
                  ("O  AdamW's state", "2 P", 2 * P, held.optimizer),
                  ("A  activations", "4 N (L (16 D+2+H T) + 2 D+3+V) + 8 (2 n+T)", A,
                   held.activations),
                  ("A of half the rows", "(A + 8 T) / 2", None, small.activations),
                  ("P + G + O of all ranks", "p (P + G + O)", 4 * p * P, states),
                  ("A of all ranks", "A + 8 (p-1) T", None, shares),
                  ("different P, G, O", "3", None,
                   sum(len(set(column)) for column in zip(*lesson.collect(prints)))),
                  **setting.letters(s, "NTDHLV", n=s.N, p=p))
    kept, given = lesson.share(traced)
    lesson.check("A, against the allocator", abs(kept / given - 1), 0.03,
                 note=f"{kit.size(kept)}, {kit.size(given)}")


@kit.breaks(graph, "buffer")
def views_count(array):
    """A view counts as memory of its own, beside the array that it looks into.

    q, k and v look into one projection. Tools that add up tensors report more than a GPU has."""
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


def trained():
    """A small GPT in float32, whose optimizer has its state: one step is done."""
    model = setting.model(dtype=np.float32)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    step.train_step(model, setting.words(ROWS), optimizer)
    return model, optimizer


def traced():
    """Trace one forward.  -> bytes by ledger, bytes by tracemalloc"""
    model, batch = trained()[0], setting.words(64)
    model(batch)                                      # what is made once, and kept for ever
    tracemalloc.start()
    try:
        loss = model(batch)
        given = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return ledger.held(model, None, loss, batch=batch).activations, given


def after_a_step(comm, way):
    """Cut, take a step, and the next forward.  -> what this rank holds, checksums of P, G and O"""
    mesh = setting.mesh(comm, "dp" if way == "dp" else "tp")
    model = setting.cut(setting.model(dtype=np.float32), mesh, way)
    optimizer, batch = setting.ADAMW(model.parameters()), setting.words(ROWS)
    step.train_step(model, batch, optimizer, mesh)
    mine, params = model.localize(batch), model.parameters()
    held = ledger.held(model, optimizer, model(mine), batch=mine)
    kinds = ([p.data for p in params], [p.grad for p in params],
             [x for p in params for x in optimizer.state[p.name]])
    return held, [f"{zlib.crc32(b''.join(x.tobytes() for x in kind)):08x}" for kind in kinds]


TAKEAWAY = "P, G, O: 16 bytes per parameter, the same on every rank of DP. A: as the batch, shared."
FIELD = "model states and residual states (ZeRO); torch.cuda.memory_allocated"
TRY = ["at which T is A of GPT-3 as large as its P + G + O, one sequence at a time?"]
SCREENS = [bytes_per_parameter, the_article_corrected, over_a_step, who_holds_what, prove,
           views_count]

if __name__ == "__main__":
    kit.run(SCREENS)
