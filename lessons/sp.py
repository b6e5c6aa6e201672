"""SEQUENCE PARALLELISM      TP has cut every matrix. What do all ranks still hold whole?

  lifts   memory      norms, dropout, residuals: 10 of the 34 s b h bytes that a layer keeps
  costs   bandwidth   nothing, or a quarter more, to keep no gathered input either
  code    minidist/sp.py, minidist/mappings.py
  run     mpirun -n 4 python -m lessons.sp        or: python -m lessons.sp -n 4
"""
import numpy as np

from lessons import kit, questions_training, setting
from minidist import collectives, cost, ledger, mappings, placement, sp, verify
from minidist.engine import graph, tensor
from minidist.ranks.buffers import PAGE

EXERCISE = [mappings.all_gather, mappings.reduce_scatter, sp.all_gather_linear]
POINTS = {"all_gather_linear": 2}
ROWS, STEPS, CONTEXT = 6, 4, 24                              # 24 tokens: over 1, 2, 3 and 4 ranks
WAYS = {"one rank": "", "TP": "tp", "TP+SP, kept": "keep", "TP+SP": "again"}


def what_tp_leaves_whole(lesson):
    """What does TP leave whole?

    Norms, dropout and residuals, outside its cuts: every rank keeps them for all tokens. But they
    look at one token at a time: T/p would do. GPT-3, 16 bits, s = 2048 tokens, b = 1, p = 8:"""
    one, cut, all_cut = gpt3()
    lesson.predict("One rank keeps 2,869 MB per layer. And each of the eight, under TP?",
                   round(cut / 1e6), "MB", why="10 s b h stay whole",
                   mistakes={359: "that needs sequence parallelism"})
    lesson.predict("A million tokens: TB of attention weights in a layer of 96 heads?", 192,
                   "TB", why="2 a s^2 bytes",
                   mistakes={2: "that is one head", 96: "2 bytes per number"})
    lesson.table(["", "bytes of a layer", "GPT-3"], [
        ("one rank", "s b h (34 + 5as/h)", kit.size(one)),
        ("TP", "s b h (10 + 24/p + 5as/hp)", kit.size(cut)),
        ("TP+SP", "s b h (34 + 5as/h) / p", kit.size(all_cut))])
    lesson.say("Attention sees all tokens: its a s^2 takes tiles (flash) or a cut of its own (cp).")
    lesson.figure(draw, lesson.comm.size)


def gpt3(s=2048, h=12288, a=96, p=8):
    """Bytes per layer by the papers' formulas: one rank, TP, TP+SP."""
    weights = 5 * a * s / h
    return [s * h * factor for factor in (34 + weights, 10 + (24 + weights) / p,
                                          (34 + weights) / p)]


def two_halves(lesson):
    """An all_reduce is two halves: where to put what needs no whole?

      tp  [B,T,D]   --- f ---> attention or MLP -- g ----> [B,T,D]    norm, dropout, +: T tokens
      sp  [B,T/p,D] -gather--> attention or MLP -scatter-> [B,T/p,D]  norm, dropout, +: T/p"""
    lesson.source(sp.enter)
    lesson.source(sp.leave)
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


def whose_gradient_is_whole(lesson):
    """The trap: whose gradient is whole?

    Now each rank sees its own tokens: the gradient of norms, row biases, positions is a part, which
    the gradient rule has to sum, not average, over tp. blocks.0.norm1.weight[0]:"""
    ref = plain()
    ref(batch()).backward()
    right = ref.blocks[0].norm1.weight.grad
    before, after = gradient_of_norm(setting.mesh(lesson.comm, "tp"))
    lesson.rows(["its part", "after the sum", "one process"],
                [f"{g[0]:+.6f}" for g in (before, after, right)])
    lesson.check("the whole gradient, against one process", kit.difference(after, right), 1e-12)


def gradient_of_norm(mesh):
    """Run a backward.  -> blocks.0.norm1.weight's gradient before and after the gradient rule"""
    model = over(plain(), mesh)
    model(model.localize(batch())).backward()
    weight = model.blocks[0].norm1.weight
    before = weight.grad.copy()
    placement.finalize(model.parameters(), mesh, 1)
    return before, weight.grad


def prove(lesson):
    """What does it keep and send, and is it the same training?

    N = B T tokens, w bytes per number; received arrays are moved by up to a page of g bytes; a
    gather or a scatter sends u = w N D (p-1)/p; s bytes go into the loss's small sums."""
    questions_training.of_sp(lesson)
    p = lesson.comm.size
    s = cost.Sizes.of(plain().config, B=ROWS, w=8)
    rows = [*kept(lesson), *sent(lesson, "keep", 8, "kept"), *sent(lesson, "again", 10, "again")]
    small = 3 * setting.group(p, lesson.comm.rank).all_reduce(s.N, 8).bytes
    lesson.ledger(*rows, **setting.letters(s, "NTDHL", p=p, w=8, g=PAGE, s=small,
                                           u=s.N * s.D * (p - 1) // p * 8))
    mesh, batches = setting.mesh(lesson.comm, "tp"), [batch(t) for t in range(STEPS)]
    whole = lesson.collect(gradient_of_norm(mesh)[1].tolist())
    lesson.check("a norm's gradient is the same on all ranks", max(g != whole[0] for g in whole))
    setting.same_training(lesson, plain, over, mesh, batches)
    lesson.verdict(verify.train(plain, setting.SGD, over_kept, mesh, batches[:2]),
                   "the same training, input kept")


def kept(lesson):
    """Count what one block keeps, in every way.  -> ledger rows"""
    formulas = ["w N (18 D + 2 + 2 H T)", "w N (6 D + 2 + (12 D + 2 H T)/p)",
                "w N (2 D + (16 D + 2 + 2 H T)/p) + 2 g", "w N (18 D + 2 + 2 H T)/p"]
    for (name, way), formula in zip(WAYS.items(), formulas):
        model = setting.cut(plain(), setting.mesh(lesson.comm, "tp"), way)
        mine = model.localize(batch())
        x = np.ones((ROWS, len(mine.stream), model.config.width))
        y = model.blocks[0](tensor.Tensor(x, requires_grad=True), mine)
        sizes = [a for node in ledger.nodes(y) for a in graph.captured(node.vjp) if a.dtype == int]
        yield (f"block, {name}", formula, None,
               graph.graph_bytes(y, exclude=[*ledger.known(model, mine), *sizes]))


def sent(lesson, way, units, name):
    """Count the calls of one layer, and all bytes of a step, of one way.  -> ledger rows"""
    model = setting.cut(plain(), setting.mesh(lesson.comm, "tp"), way)
    mine = model.localize(batch())
    x = tensor.Tensor(np.ones((ROWS, len(mine.stream), 48)), requires_grad=True)
    with lesson.comm.counting() as layer:
        model.blocks[0](x, mine).sum().backward()
    with lesson.comm.counting() as whole:
        model(mine).backward()
    calls = [layer.by_label[label].calls if label in layer.by_label else 0
             for label in ("all_gather", "reduce_scatter")]
    price = cost.sp(cost.Sizes.of(model.config, B=ROWS, w=8),
                    setting.group(lesson.comm.size, lesson.comm.rank), way == "keep")
    return [(f"gathers of a layer, {name}", f"{units} - 4", None, calls[0]),
            *[(f"scatters of a layer, {name}", "4", None, calls[1])][:way == "keep"],
            (f"bytes of a rank and layer, {name}", f"{units} u", None, layer.bytes),
            (f"bytes of a rank and step, {name}", f"{units // 2} (2 L + 1) u + s",
             sum(price_way.bytes for price_way in price), whole.bytes)]


def plain():
    """The small GPT for real text, with dropout, over 24 tokens."""
    return setting.reader(CONTEXT)


def batch(t=0):
    return setting.text(ROWS, t, CONTEXT)


def over(model, mesh):
    return setting.cut(model, mesh, "again")


def over_kept(model, mesh):
    return setting.cut(model, mesh, "keep")


@kit.breaks(sp, "parallelize")
def unsummed(model, comm, keep_input=False):
    """Nobody sums the gradients of the norms over tp: each rank steps by what its own tokens say.

    Replicas drift apart, slowly. Megatron-LM #1446: in the final norm; gpt-neox #1257: in all."""
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


def draw(figure, p):
    """One bar for each way, stacked by operation: what TP cuts below, what only SP cuts above."""
    from matplotlib import colormaps
    axes, bottom = figure.subplots(), np.zeros(len(WAYS))
    s = cost.Sizes.of(plain().config, B=ROWS, w=8)
    rows = [cost.tp_block_activations(s, p if way else 1, way if way in ("keep", "again") else None)
            for way in WAYS.values()]
    inside = [cost.between_cuts(row) for row in rows[0]]
    for i in sorted(range(len(inside)), key=lambda i: not inside[i]):
        heights = np.array([way[i].bytes / 1e3 for way in rows])
        color = colormaps["Blues" if inside[i] else "Oranges"](0.4 + 0.5 * i / len(inside))
        axes.bar(list(WAYS), heights, 0.6, bottom, color=color, edgecolor="white",
                 label=f"{rows[0][i].operation}: {rows[0][i].what}" if rows[0][i].bytes else None)
        bottom += heights
    axes.set(ylabel=f"kB that one block keeps on one of {p} ranks",
             title="blue: cut by TP; orange: whole under TP, cut by SP")
    axes.legend(fontsize=8, reverse=True)


TAKEAWAY = "SP cuts what TP left whole: for TP's bytes if layers keep whole inputs, else 1/4 more."
FIELD = "Megatron-LM --sequence-parallel; PyTorch SequenceParallel; Korthikanti et al. 2022"
TRY = ["which p makes TP alone hold less than half of what one rank does? And TP+SP?"]
SCREENS = [what_tp_leaves_whole, two_halves, whose_gradient_is_whole, prove, unsummed]

if __name__ == "__main__":
    kit.run(SCREENS)
