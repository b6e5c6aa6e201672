"""SEQUENCE PARALLELISM      TP has cut every matrix. What do all ranks still hold whole?

  lifts   memory      norms, dropout, residuals: 10 of the 34 s b h bytes that a layer keeps
  costs   bandwidth   nothing, or a quarter more, to keep no gathered input either
  code    minidist/sp.py, minidist/mappings.py
  before  lessons.tp  (a layer over several ranks)           next  lessons.cp
  run     mpirun -n 4 python -m lessons.sp        or: python -m lessons.sp -n 4
"""
from functools import cache

import numpy as np

from lessons import kit
from minidist import collectives, cost, ledger, mappings, placement, sp, step, tp, verify
from minidist.collectives import chosen
from minidist.engine import attention, gpt, optim, tensor
from minidist.engine.data import Corpus, default_text
from minidist.mesh import DeviceMesh
from minidist.ranks.buffers import PAGE

EXERCISE = [mappings.all_gather, mappings.reduce_scatter, sp.all_gather_linear]
ROWS, STEPS, CONTEXT = 6, 6, 24                              # 24 tokens: over 1, 2, 3 and 4 ranks
WAYS = {"one rank": "", "TP": "tp", "TP+SP, input kept": "keep", "TP+SP": "again"}


def main(lesson):
    p = lesson.comm.size
    lesson.part("What does TP leave whole?")
    lesson.say("""
        TP cuts what lies between a column cut and a row cut. Norms, dropout and residuals lie
        outside: every rank computes them for all T tokens, and keeps them for backward. But they
        look at one token at a time, so a rank may as well take T/p of them. What one block keeps:
        """)
    memory(lesson)
    one, cut, all_cut = map(kit.size, gpt3())
    lesson.say(f"""
        (bytes, of the arrays in its graph)  The papers count 16-bit numbers and masks of one byte;
        s tokens, b rows, width h, a heads; the last column is GPT-3 with s = 2048, b = 1, p = 8:
          one rank  s b h (34 + 5as/h)               {one} per layer
          TP        s b h (10 + 24/p + 5as/hp)       {cut}
          TP+SP     s b h (34 + 5as/h) / p           {all_cut}""")
    lesson.figure(draw, p)

    lesson.part("An all_reduce is two halves: where to put what needs no whole?")
    lesson.say("""
          tp  [B,T,D]   --- f ---> attention or MLP -- g ----> [B,T,D]    norm, dropout, +: T tokens
          sp  [B,T/p,D] -gather--> attention or MLP -scatter-> [B,T/p,D]  norm, dropout, +: T/p
        """)
    lesson.source(sp.enter)
    lesson.source(sp.leave)
    halves(lesson)

    lesson.part("What does it cost?")
    lesson.predict("Units of B T D (p-1)/p sent per layer and step, inputs kept?", 8, "",
                   why="TP's 4 all_reduces, in halves",
                   mistakes={4: "backward sends as much again", 16: "a half costs 1 unit, not 2"})
    lesson.predict("And if the gathered input is not kept, but gathered again?", 10, "",
                   why="for two weight gradients",
                   mistakes={12: "row-parallel layers have no gathered input", 16: "backward only"})
    price(lesson)

    lesson.part("The trap: whose gradient is whole?")
    lesson.say("""
        Under TP every rank sees all tokens, and a norm's gradient is the same everywhere. Now each
        sees its own: the gradient is a part, and the gradient rule has to sum it (not average it)
        over tp. So for all that is not cut: norms, row biases, positions. blocks.0.norm1.weight[0]:
        """)
    partial(lesson)

    lesson.part("Is it the same training?")
    same_training(lesson)
    lesson.part("Break it")
    lesson.break_it(unsummed)
    lesson.takeaway(
        "The same bytes on the wire as TP, and every activation / p; the price is one more sum.",
        field="Megatron-LM --sequence-parallel; PyTorch SequenceParallel; Korthikanti et al. 2022",
        tries=["which p makes TP alone hold less than half of what one rank does? And TP+SP?",
               "why does cp (lessons.cp) need no gather before the MLP?",
               "write the gathers: python -m lessons.sp --stub mine.py; then --mine mine.py"])


def prove(lesson):
    """Memory, traffic and training; again under every break, and with a reader's functions."""
    memory(lesson)
    price(lesson)
    same_training(lesson)


# ---- the setting

@cache
def corpus():
    return Corpus(default_text()[:20000], CONTEXT)


def plain():
    """A small GPT with dropout, in float64."""
    config = gpt.preset("lesson", corpus().vocab, context=CONTEXT, dropout=0.1)
    return gpt.GPT(config, seed=0, dtype=np.float64)


def batch(t=0):
    return corpus().batch(ROWS, seed=0, step=t)


def over(model, mesh, way="again"):
    """Spread a plain model over a mesh in one of the WAYS."""
    if way == "tp":
        return tp.parallelize(model, mesh["tp"])
    if way:
        tp.parallelize(model, mesh["tp"], sp.enter, sp.leave)
        sp.parallelize(model, mesh["tp"], keep_input=way == "keep")
    return model


def over_kept(model, mesh):
    return over(model, mesh, "keep")


def mesh_of(lesson):
    return DeviceMesh(lesson.comm, tp=lesson.comm.size)


def sgd(params):
    return optim.SGD(params, lr=0.1)


# ---- memory

def memory(lesson):
    """Count what one block keeps, in every way."""
    mesh, rows = mesh_of(lesson), []
    for name, way in WAYS.items():
        model = over(plain(), mesh, way)
        mine = model.localize(batch())
        x = np.ones((ROWS, len(mine.stream), model.config.width))
        y = model.blocks[0](tensor.Tensor(x, requires_grad=True), mine)
        slack = 2 if way == "keep" else 0            # received arrays begin off a page's border
        rows.append((f"kept by a block, {name}",
                     "cost.tp_block_activations" + (" + 2 pages" if slack else ""),
                     sum(row.bytes for row in predicted(way, lesson.comm.size)) + slack * PAGE,
                     tensor.graph_bytes(y, exclude=ledger.known(model, mine))))
    lesson.ledger(*rows)


def predicted(way, p):
    """What one block keeps, by formula, operation by operation."""
    sizes = cost.Sizes.of(plain().config, B=ROWS, w=8, tile=attention.TILE, dropout=True)
    return cost.tp_block_activations(sizes, p if way else 1,
                                     sequence=way if way in ("keep", "again") else None)


def draw(figure, p):
    """One bar for each way, stacked by operation: what TP cuts below, what only SP cuts above."""
    from matplotlib import colormaps
    axes, bottom = figure.subplots(), np.zeros(len(WAYS))
    rows = predicted("", 1)
    heights = np.array([[row.bytes / 1e3 for row in predicted(way, p)] for way in WAYS.values()])
    inside = [cost.between_cuts(row) for row in rows]
    for i in sorted(range(len(rows)), key=lambda i: not inside[i]):
        if rows[i].bytes:
            color = colormaps["Blues" if inside[i] else "Oranges"](0.4 + 0.5 * i / len(rows))
            axes.bar(list(WAYS), heights[:, i], 0.6, bottom, color=color, edgecolor="white",
                     label=f"{rows[i].operation}: {rows[i].what}")
            bottom += heights[:, i]
    axes.set_ylabel(f"kB that one block keeps on one of {p} ranks")
    axes.set_title("blue: cut by TP; orange: whole under TP, cut by SP")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper right")


def gpt3(s=2048, h=12288, a=96, p=8):
    """Bytes per layer by the papers' formulas: one rank, TP, TP+SP."""
    map_of_scores = 5 * a * s / h
    return [s * h * factor for factor in (34 + map_of_scores, 10 + (24 + map_of_scores) / p,
                                          (34 + map_of_scores) / p)]


def halves(lesson):
    """Sum over ranks in one go, and in two halves."""
    p, rank = lesson.comm.size, lesson.comm.rank
    x = np.arange(CONTEXT, dtype=float).reshape(1, CONTEXT, 1) * 10.0 ** rank
    mine = sp.leave(tensor.Tensor(x), lesson.comm)
    whole = sp.enter(mine, lesson.comm)
    first = CONTEXT // p * rank
    lesson.rows(["holds tokens", "their sums"],
                [f"{first} to {first + mine.shape[1] - 1}",
                 f"{mine.data[0, 0, 0]:.0f} to {mine.data[0, -1, 0]:.0f}"])
    lesson.check("scatter, then gather, against one all_reduce",
                 kit.difference(whole.data, collectives.all_reduce(x, lesson.comm)))


# ---- price

def price(lesson):
    """Count the calls of one layer, and all bytes of a step, both ways."""
    mesh, rank, p, rows = mesh_of(lesson), lesson.comm.rank, lesson.comm.size, []
    for way, units, gathers in (("keep", 8, 4), ("again", 10, 6)):
        model = over(plain(), mesh, way)
        mine, c = model.localize(batch()), model.config
        x = tensor.Tensor(np.ones((ROWS, len(mine.stream), c.width)), requires_grad=True)
        with lesson.comm.counting() as layer:
            model.blocks[0](x, mine).sum().backward()
        with lesson.comm.counting() as whole:
            model(mine).backward()
        calls = {name: layer.by_label[name].calls if name in layer.by_label else 0
                 for name in ("all_gather", "reduce_scatter")}
        predicted = cost.sp(cost.Sizes.of(model.config, B=ROWS, w=8),
                            cost.Group(p, rank, chosen), way == "keep")
        name = "input kept" if way == "keep" else "gathered again"
        rows += [(f"all_gathers per layer, {name}", f"{gathers}", gathers, calls["all_gather"]),
                 (f"reduce_scatters per layer, {name}", "4", 4, calls["reduce_scatter"]),
                 (f"bytes per rank and layer, {name}", f"{units} B T D (p-1)/p x 8",
                  units * ROWS * CONTEXT * 48 * (p - 1) // p * 8, layer.bytes),
                 (f"bytes per rank and step, {name}", "cost.sp",
                  sum(a.bytes for a in predicted), whole.bytes)]
    lesson.ledger(*rows)


# ---- gradients

def partial(lesson):
    """Show one norm's gradient on each rank, before and after the gradient rule."""
    mesh, ref = mesh_of(lesson), plain()
    ref(batch()).backward()
    model = over(plain(), mesh)
    model(model.localize(batch())).backward()
    weight = model.blocks[0].norm1.weight
    before = weight.grad[0]
    placement.finalize(model.parameters(), mesh, 1)
    lesson.rows(["its part", "after the sum"], [f"{before:+.6f}", f"{weight.grad[0]:+.6f}"])
    lesson.check(f"the whole gradient, {ref.blocks[0].norm1.weight.grad[0]:+.6f} in one process",
                 kit.difference(weight.grad, ref.blocks[0].norm1.weight.grad), 1e-12)


def same_training(lesson):
    """Train in one process and on the ranks; compare everything after every step."""
    mesh, batches = mesh_of(lesson), [batch(t) for t in range(STEPS)]
    alone = lesson.share(lambda: losses(plain(), batches))
    ours = losses(over(plain(), mesh), batches, mesh)
    ranks = "1 rank" if lesson.comm.size == 1 else f"{lesson.comm.size} ranks"
    lesson.table(["step", "one process", ranks],
                 [(t, f"{alone[t]:.6f}", f"{ours[t]:.6f}") for t in (0, STEPS // 2, STEPS - 1)])
    lesson.verdict(verify.train(plain, sgd, over, mesh, batches))
    lesson.say("and with the input kept")
    lesson.verdict(verify.train(plain, sgd, over_kept, mesh, batches[:2]))


def losses(model, batches, mesh=None):
    optimizer = sgd(model.parameters())
    return [step.train_step(model, each, optimizer, mesh).loss for each in batches]


# ---- breaks

@kit.breaks(sp, "parallelize")
def unsummed(model, comm, keep_input=False):
    """Nobody sums the gradients of the norms over tp: each rank steps by what its own tokens say.

    The replicas drift apart, slowly, and the loss flattens. Megatron-LM #1446 had it in the final
    norm alone, gpt-neox #1257 in all of them; its hooks were there, and never fired."""
    unsummed.original(model, comm, keep_input)
    for p in model.parameters():
        p.partial.clear()
    return model


@kit.breaks(placement, "add_up")
def averaged(p, comm):
    """The gradients of the norms are averaged over tp instead of summed.

    The replicas agree now, and every norm learns p times too slowly. AdamW would hide it, since a
    constant factor does not change its step. It was the first repair of gpt-neox (#1259)."""
    return averaged.original(p, comm) / comm.size


@kit.breaks(mappings, "all_gather")
def sliced(x, comm, dim, sizes=None):
    """The gather's backward cuts my piece out of my own gradient, instead of summing all ranks'.

    Shapes and loss are right. It is the backward of a gather whose result all ranks use alike;
    here each goes on with columns of its own (nanotron #46, Automodel #1260)."""
    y = collectives.all_gather(x.data, comm, dim)
    return tensor.Tensor(y, (x,), lambda g: (np.split(g, comm.size, dim)[comm.rank],))


if __name__ == "__main__":
    kit.run(main)
