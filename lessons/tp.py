"""TENSOR PARALLELISM      Can p ranks compute one layer that none of them could hold?

  lifts   memory      GPT-3's MLP: 12288 x 49152 x 2 bytes = 1.2 GB a matrix, 2 a layer, 96 layers
  costs   bandwidth   4 all_reduces of [B, T, D] per layer and step, and nothing to hide them behind
  code    minidist/tp.py, minidist/mappings.py
  before  lessons.dp  (every rank holds everything)          next  lessons.sp
  run     mpirun -n 4 python -m lessons.tp        or: python -m lessons.tp -n 4
"""
import re
import time
from functools import cache

import numpy as np

from lessons import kit
from minidist import cost, mappings, placement, step, tp, verify
from minidist.collectives import chosen
from minidist.engine import functional, gpt, optim, tensor
from minidist.engine.data import Corpus, default_text, random_batch
from minidist.mesh import DeviceMesh
from minidist.ranks import comm

EXERCISE = [mappings.copy_to, mappings.reduce_from, tp.vocab_parallel_cross_entropy]
ROWS, STEPS = 6, 8
WIDE = 96                                            # rows of the batch whose traffic is counted
FAST, SLOW = 900e6, 50e6                             # bytes per second: both 1000 times too slow


def main(lesson):
    lesson.part("Cut by columns, then by rows")
    lesson.say("""
        y = gelu(x W1) W2, and gelu looks at one hidden unit at a time. So give each rank *whole*
        hidden units: some columns of W1 and the matching rows of W2. Until the last sum, nobody
        needs anybody. On four ranks:

            x [B,T,D]         W1 [D,F]              W2 [F,D]
            +-------+     +---+---+---+---+        +-------+
            |       |     |   |   |   |   |        |   0   |
            |       |  x  | 0 | 1 | 2 | 3 |   x    |   1   |   = four partial y, one on each rank
            |       |     |   |   |   |   |        |   2   |
            +-------+     +---+---+---+---+        |   3   |
                                                   +-------+
        """)
    one_mlp(lesson)

    lesson.part("Why is the gradient of a sum no sum, and the gradient of a copy one?")
    lesson.say("""
        Two ranks, one number. Rank r holds a_r (2 and 3); both are given x = 5; y = a_0 x + a_1 x.

          back through the sum    dy/dy_r = 1          y moves as much as either part: send nothing
          back through the copy   dy/dx = a_0 + a_1    but rank 0 sees only its 2, rank 1 only its 3
        """)
    lesson.source(mappings.copy_to)
    lesson.source(mappings.reduce_from)
    seen, exact, slope = lesson.share(lambda: list(zip(*comm.run_threads(2, scalar))))
    lesson.say(f"dy/dx: the ranks see {seen[0]:g} and {seen[1]:g}; after f's all_reduce both have "
               f"{exact[0]:g}")
    lesson.check("against the slope of y", abs(exact[0] - slope[0]), 1e-8)

    lesson.part("Attention by heads, the vocabulary by words: who holds what?")
    lesson.say("""
        A head is to attention what a hidden unit is to the MLP: rows of q, k, v in, columns of proj
        out. The vocabulary is cut by words. A rank looks up its own, and zeros for the others: the
        sum is the embedding. The loss asks the others for three numbers per token, never for their
        logits: the largest one, the sum of exponentials, and the target's logit.
        """)
    lesson.table(["parameter", "whole", "on a rank", "cut over"], audit(cut(lesson)))

    lesson.part("What does it cost?")
    lesson.predict("all_reduces per layer and step?", 4, "",
                   why="attention and MLP, forward and backward",
                   mistakes={1: "one product, one direction", 2: "backward needs two as well"})
    p, B, T, D, float64 = lesson.comm.size, WIDE, 16, 48, 8
    one_all_reduce = 2 * (p - 1) / p * B * T * D * float64
    kB = 4 * one_all_reduce / 1000
    lesson.predict(f"sent per rank and layer (B {B}, T {T}, D {D}, float64)?", kB, "kB",
                   why="4 times 2 (p-1)/p of [B, T, D]",
                   mistakes={kB / 16: "x is [B, T, D]: you forgot its 16 tokens",
                             kB / 2: "an all_reduce sends its array nearly twice"})
    price(lesson)
    lesson.say("""
        The article counts one AllReduce per layer, that of the MLP; attention has a second, and
        backward two more. Twice the width: twice the traffic, four times the arithmetic.""")

    lesson.part("Why does it stay inside one machine?")
    two_links(lesson)

    lesson.part("Is it the same training?")
    same_training(lesson)

    lesson.part("Break it")
    lesson.break_it(half_f)
    lesson.takeaway(
        "TP buys memory with bandwidth, at the most expensive moment: put it on the fastest wire.",
        field="Megatron-LM ColumnParallelLinear / RowParallelLinear; PyTorch parallelize_module"
              "(ColwiseParallel, RowwiseParallel)",
        tries=["which of the numbers above change when F doubles?",
               "cut W1 by rows: where does a third sum become necessary, and why before gelu?",
               "write f, g and the loss: python -m lessons.tp --stub mine.py; then --mine mine.py"])


def prove(lesson):
    """Counts and training; again under every break, and with a reader's functions."""
    price(lesson)
    same_training(lesson)


# ---- the setting

@cache
def corpus():
    return Corpus(default_text()[:20000], 16)


def plain():
    """A small GPT: 12 heads, a vocabulary that does not divide, dropout on, in float64."""
    config = gpt.preset("lesson", corpus().vocab, dropout=0.1)
    return gpt.GPT(config, seed=0, dtype=np.float64)


def cut(lesson):
    """The same GPT, over all ranks."""
    return over(plain(), DeviceMesh(lesson.comm, tp=lesson.comm.size))


def over(model, mesh):
    return tp.parallelize(model, mesh["tp"])


def sgd(params):
    return optim.SGD(params, lr=0.1)


def audit(model):
    """How every parameter lies, all norms and all layers folded."""
    rows = placement.audit(model.parameters())
    return kit.fold([(re.sub(r"norm\d?\.\w+$", "norm", name), *row) for name, *row in rows])


# ---- one layer

def one_mlp(lesson):
    """Compute one MLP whole and cut, and show what each rank holds and finds."""
    x = tensor.Tensor(np.random.default_rng(0).standard_normal((2, 16, 48)))
    ref = plain().blocks[0].mlp(x)
    mlp = cut(lesson).blocks[0].mlp
    part = functional.linear(functional.gelu(mlp.fc1(x)), mlp.fc2.weight)
    y = mlp(x)
    w1, w2 = (str(list(layer.weight.shape[::-1])) for layer in (mlp.fc1, mlp.fc2))
    lesson.rows(["of W1", "of W2", "its y[0,0,0]", "after the sum"],
                [w1, w2, f"{part.data[0, 0, 0]:+.4f}", f"{y.data[0, 0, 0]:+.4f}"])
    lesson.check(f"y, where whole matrices give {ref.data[0, 0, 0]:+.4f} there",
                 kit.difference(y.data, ref.data), 1e-13)


def scalar(two):
    """y = a_0 x + a_1 x on two ranks.  -> what I see of dy/dx, what copy_to makes of it, slope"""
    def y(x, copy=mappings.copy_to):
        return mappings.reduce_from(copy(x, two) * tensor.Tensor(np.array(two.rank + 2.0)), two)

    def slope_of(copy):
        x = tensor.Tensor(np.array(5.0), requires_grad=True)
        y(x, copy).backward()
        return x.grad.item()

    above, below = (y(tensor.Tensor(np.array(5 + h))).item() for h in (1e-3, -1e-3))
    return slope_of(lambda x, _: x), slope_of(mappings.copy_to), (above - below) / 2e-3


# ---- the price

def price(lesson):
    """Count one step, by layer and as a whole."""
    p, rank, model = lesson.comm.size, lesson.comm.rank, cut(lesson)
    c, batch = model.config, random_batch(model.config.vocab, 16, WIDE, seed=0, step=0)
    x = tensor.Tensor(np.ones((WIDE, c.context, c.width)), requires_grad=True)
    forward, backward, _ = counted(lesson.comm, lambda: model.blocks[0](x, batch).sum())
    there, back, loss = counted(lesson.comm, lambda: model(batch))
    outside = there.calls + back.calls - c.layers * (forward.calls + backward.calls)
    sizes, group = cost.Sizes.of(c, B=WIDE, w=8), cost.Group(p, rank, chosen)
    step_price = sum(way.bytes for way in cost.tp(sizes, group))
    held = sum(q.data.size for q in model.parameters())
    lesson.ledger(
        ("all_reduces per layer, forward", "2", 2, forward.calls),
        ("all_reduces per layer, backward", "2", 2, backward.calls),
        ("all_reduces in embedding, head, loss", "1 + 1 + 3", 5, outside),
        ("bytes sent per rank and layer", "8 B T D (p-1)/p x 8", 8 * x.size * (p - 1) // p * 8,
         forward.bytes + backward.bytes),
        ("bytes sent per rank and step", "cost.tp", step_price, there.bytes + back.bytes),
        (f"parameters held: {held / cost.gpt_parameters(sizes):.0%} of the model",
         "cost.tp_parameters", cost.tp_parameters(sizes, group), held))
    lesson.check("loss of random words, all of them, against one process",
                 kit.difference(loss.data, plain()(batch).data), 1e-13)


def counted(group, run):
    """Count what forward and backward send.  -> two counts, the loss"""
    with group.counting() as forward:
        loss = run()
    with group.counting() as backward:
        loss.backward()
    return forward, backward, loss


# ---- fast and slow

def two_links(lesson):
    """Time one step over each link, on two of the ranks, and draw both."""
    pair = lesson.comm.split(0 if lesson.comm.rank < 2 else None, name="pair")
    if pair is None:
        time.sleep(0.5)                              # a rank that waits awake takes a core
    found = lesson.collect([timed(pair, bandwidth) for bandwidth in (FAST, SLOW)] if pair else None)
    if lesson.comm.size < 2:
        return lesson.say("One rank sends nothing. Start two or more to see what the link does.")
    lesson.say("""
        The same step on two ranks, over software links that are 1000 times slower than real ones:
        """)
    rows = [[name, kit.duration(took), f"{sum(end - start for start, end in waits) / took:.0%}"]
            for name, (took, waits) in zip(("NVLink, 900 GB/s", "network, 50 GB/s"), found[0])]
    lesson.table(["link", "forward and backward", "of it with the wire"], rows)
    lesson.say("""
        The next product waits for the sum, so all of this time is lost, where DP's all_reduce hides
        behind backward. GPT-3 on 8 GPUs (400 TFLOP/s each) computes 3.4 us per token and layer, and
        sends 172 kB: 0.2 us over NVLink, 3.4 us over the network.""")
    lesson.figure(draw, found[:2])


def timed(pair, bandwidth):
    """Run three steps over a link; of the fastest: seconds, and when it was with the wire."""
    model, found = tp.parallelize(plain(), pair), []
    batch = random_batch(model.config.vocab, 16, ROWS, seed=0, step=0)
    with pair.link(bandwidth=bandwidth):
        for _ in range(3):
            pair.barrier()
            start = time.perf_counter()
            with pair.recording() as events:
                model(batch).backward()
            waits = [(e.start - start, e.end - start) for e in events if e.kind == "recv"]
            found.append((time.perf_counter() - start, waits))
    return min(found)


def draw(figure, runs):
    """Two timelines on one axis: for each link, what two ranks do."""
    axes = figure.subplots()
    lanes = [(f"{link}\nrank {r}", runs[r][i])
             for i, link in enumerate(("fast link", "slow link")) for r in (0, 1)]
    for y, (_, (took, waits)) in enumerate(lanes):
        axes.broken_barh([(0, took * 1e3)], (y - 0.4, 0.8), color="tab:blue")
        axes.broken_barh([(start * 1e3, (end - start) * 1e3) for start, end in waits],
                         (y - 0.4, 0.8), color="tab:orange")
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step, forward and backward")
    axes.set_title("blue: computing; orange: an all_reduce, which the next product waits for")


# ---- the proof

def same_training(lesson):
    """Train in one process and on the ranks; compare everything after every step."""
    model, mesh = cut(lesson), DeviceMesh(lesson.comm, tp=lesson.comm.size)
    batches = [corpus().batch(ROWS, seed=0, step=t) for t in range(STEPS)]
    lesson.check("initial values, gathered, against one process",
                 max(kit.difference(placement.join(p, p.data), q.data)
                     for p, q in zip(model.parameters(), plain().parameters())))
    alone, ours = lesson.share(lambda: losses(plain(), batches)), losses(model, batches, mesh)
    ranks = "1 rank" if lesson.comm.size == 1 else f"{lesson.comm.size} ranks"
    lesson.table(["step", "one process", ranks],
                 [(t, f"{alone[t]:.6f}", f"{ours[t]:.6f}") for t in (0, STEPS // 2, STEPS - 1)])
    lesson.verdict(verify.train(plain, sgd, over, mesh, batches))


def losses(model, batches, mesh=None):
    optimizer = sgd(model.parameters())
    return [step.train_step(model, batch, optimizer, mesh).loss for batch in batches]


# ---- breaks

@kit.breaks(mappings, "copy_to")
def half_f(x, comm):
    """f copies forward, as it should, and forgets its all_reduce backward.

    What lies behind an f gets its right gradient, what lies before it only what one rank saw. The
    loss falls all the same. Would you have noticed? (Automodel #1260: 1.6, where 1.4 is right)"""
    return tensor.Tensor(x.data, (x,), lambda g: (g,))


@kit.breaks(tp.RowParallelLinear, "forward")
def bias(self, x):
    """The row bias is added on every rank, before the sum: it counts p times.

    Biases start at zero, so the first step is right, loss and gradients and all; the second is not
    (text-generation-inference #1036, slapo #10)."""
    return self.leave(functional.linear(x, self.weight, self.bias), self.comm)


@kit.breaks(placement.Shard, "cut")
def seed(self, x):
    """Every rank draws its piece from the same seed, instead of cutting the one whole.

    All shards are the same: p copies of a narrower model that pretend to be one (OLMo #307)."""
    piece = seed.original(self, x)
    return np.random.default_rng(0).standard_normal(piece.shape) * x.std()


@kit.breaks(tp, "localize")
def vocab(ids, sizes, rank):
    """Each rank takes its last word for the next rank's first: nobody looks it up.

    Off by one at the end of a range: p words have no row and never a target. If they are rare, no
    training run on text will tell; random words do (Megatron-LM #1754, ColossalAI #6167)."""
    mine = ids - sum(sizes[:rank])
    return mine, (mine >= 0) & (mine < sizes[rank] - 1)


if __name__ == "__main__":
    kit.run(main)
