"""TENSOR PARALLELISM      Can p ranks compute one layer that none of them could hold?

  lifts   memory      GPT-3's MLP: 12288 x 49152 x 2 bytes = 1.2 GB a matrix, 2 a layer, 96 layers
  costs   bandwidth   all_reduces of [B, T, D] in every layer, and nothing to hide them behind
  code    minidist/tp.py, minidist/mappings.py
  run     mpirun -n 4 python -m lessons.tp        or: python -m lessons.tp -n 4
"""
from functools import partial

import numpy as np

from lessons import clock, kit, pictures, questions_training, setting
from minidist import cost, mappings, placement, tp
from minidist.engine import functional, tensor
from minidist.ranks.comm import run_threads

EXERCISE = [mappings.copy_to, mappings.reduce_from, tp.vocab_parallel_cross_entropy]
POINTS = {"vocab_parallel_cross_entropy": 3}
ROWS, STEPS, WIDE = 6, 5, 96                  # WIDE: rows of the batch whose traffic is counted
over = partial(setting.cut, way="tp")
LINKS = {"NVLink, 450 GB/s": 450e9, "network, 50 GB/s": 50e9}
SLOWER = 5000                                        # than these, in software


def columns_then_rows(lesson):
    """Cut by columns, then by rows

    y = gelu(x W1) W2, and gelu looks at one hidden unit at a time. So give each rank *whole*
    hidden units: some columns of W1, the matching rows of W2; nobody needs anybody until the sum.
        x [B,T,D]         W1 [D,F]              W2 [F,D]
        +-------+     +---+---+---+---+        +-------+ 0
        |       |  x  | 0 | 1 | 2 | 3 |   x    +-------+ 1   = four partial y, one on each rank
        +-------+     +---+---+---+---+        +-------+ 2, 3"""
    x = tensor.Tensor(np.random.default_rng(0).standard_normal((2, 16, 48)))
    whole = setting.reader().blocks[0].mlp
    mlp = cut(lesson).blocks[0].mlp
    part = functional.linear(functional.gelu(mlp.fc1(x)), mlp.fc2.weight)
    y, ref = mlp(x), whole(x)
    w1, w2 = (str(list(layer.weight.shape[::-1])) for layer in (mlp.fc1, mlp.fc2))
    lesson.rows(["of W1", "of W2", "its y[0,0,0]", "after the sum"],
                [w1, w2, f"{part.data[0, 0, 0]:+.4f}", f"{y.data[0, 0, 0]:+.4f}"])
    lesson.check("y, against whole matrices", kit.difference(y.data, ref.data), 1e-13)
    stacked = np.concatenate(list(map(np.array, lesson.collect(mlp.fc2.weight.data.T.tolist()))))
    lesson.check("W2, against its pieces stacked (the article transposes them: a slip)",
                 kit.difference(stacked, whole.fc2.weight.data.T))


def why_f_and_g(lesson):
    """Why is the gradient of a sum no sum, and the gradient of a copy one?

    Two ranks, one number. Rank r holds a_r (2 and 3); both are given x = 5; y = a_0 x + a_1 x.
      back through the sum    dy/dy_r = 1          y moves as much as either part: send nothing
      back through the copy   dy/dx = a_0 + a_1    but rank 0 sees only its 2, rank 1 only its 3
    Megatron-LM calls them g (sum forward, nothing back) and f (nothing forward, sum back)."""
    seen, exact, slope = lesson.share(lambda: list(zip(*run_threads(2, scalar))))
    lesson.check("dy/dx, against the slope of y", abs(exact[0] - slope[0]), 1e-8,
                 note=f"{seen[0]:g} + {seen[1]:g} = {exact[0]:g}")


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


def who_holds_what(lesson):
    """Attention by heads, the vocabulary by words: who holds what?

    A head is to attention what a hidden unit is to the MLP. The vocabulary is cut by words, and the
    loss sends no logits, but three numbers per token: the largest, the sum of exponentials, the
    target's. Biases lie as their rows, or whole; norms whole; and the matrices:"""
    lesson.table(["parameter", "whole", "on a rank", "cut over"],
                 kit.fold(row for row in placement.audit(cut(lesson).parameters())
                          if "," in str(row[1])))


def inside_one_machine(lesson):
    """Why does it stay inside one machine?"""
    lesson.predict("GPT-3 (D 12288, 16 bits), 8 ranks: kB sent by each per token and layer?", 172,
                   "kB", why="4 all_reduces",
                   mistakes={86: "backward needs two as well", 43: "attention has one, too",
                             98: "an all_reduce sends its array nearly twice"})
    lesson.predict("At 400 Tflop/s: GB/s that send it in no more time than a layer computes?", 51,
                   "GB/s", why="3.4 us for 9 D^2 flops",
                   mistakes={152: "backward computes, too: 6 flops per parameter and token"})
    over_two_links(lesson)


def over_two_links(lesson):
    """Run the same step on two of the ranks over both links, and draw it."""
    pair = lesson.comm.split(0 if lesson.comm.rank < 2 else None, name="pair")
    found = lesson.collect([timed(pair, rate / SLOWER) for rate in LINKS.values()]
                           if pair else None)
    if lesson.comm.size < 2:
        return lesson.say("One rank sends nothing. Start two or more to see what the link does.")
    sent, runs = 2 * 5 * 2 * ROWS * 16 * 48 * 8 / 2, dict(zip(LINKS, found[0]))
    lesson.table([f"two ranks, links {SLOWER} times slower", "on the wire, by the model",
                  "step, measured", "of it with the wire"],
                 [(name, kit.duration(sent * SLOWER / LINKS[name]), kit.duration(took),
                   f"{sum(end - start for start, end in waits) / took:.0%}")
                  for name, (took, waits) in runs.items()])
    fast, slow = (took for took, _ in runs.values())
    lesson.fill(f"""
        The next product waits for the sum: all of this time is lost. Here the slow link took
        {slow / fast:.1f} times as long. Twice the width: twice the traffic, 4 times the work.""")
    lanes = {f"{name}, rank {r}": (took, [("tab:orange", "an all_reduce", waits)])
             for i, name in enumerate(LINKS) for r in (0, 1) for took, waits in [found[r][i]]}
    lesson.figure(pictures.timelines, lanes, "the next product waits for each all_reduce")


def timed(pair, bandwidth):
    """Run a step over a link.  -> seconds, and when it was with the wire"""
    model, batch = tp.parallelize(setting.reader(), pair), setting.text(ROWS)
    with pair.link(bandwidth=bandwidth):
        took, waits = clock.fastest(pair, lambda: model(batch).backward())
    return took, [(start, end) for _, start, end in waits]


def prove(lesson):
    """What does it cost, and is it the same training?

    The article counts one all_reduce per layer. N = B T tokens; the loss's three sums send s."""
    questions_training.of_tp(lesson)
    rows, letters, loss = price(lesson)
    lesson.ledger(*rows, **letters)
    model, batch = cut(lesson), setting.words(WIDE, vocab=setting.reader().config.vocab)
    lesson.check("loss of random words, all of them, against one process",
                 kit.difference(loss.data, setting.reader()(batch).data), 1e-13)
    lesson.check("initial values, gathered, against one process",
                 max(kit.difference(placement.join(p, p.data), q.data)
                     for p, q in zip(model.parameters(), setting.reader().parameters())))
    setting.same_training(lesson, setting.reader, over, setting.mesh(lesson.comm, "tp"),
                          [setting.text(ROWS, t) for t in range(STEPS)])


def price(lesson):
    """Count one step, by layer and as a whole.  -> ledger rows, letters, loss"""
    p, rank, model = lesson.comm.size, lesson.comm.rank, cut(lesson)
    c, batch = model.config, setting.words(WIDE, vocab=model.config.vocab)
    x = tensor.Tensor(np.ones((WIDE, c.context, c.width)), requires_grad=True)
    forward, backward, _ = counted(lesson.comm, lambda: model.blocks[0](x, batch).sum())
    there, back, loss = counted(lesson.comm, lambda: model(batch))
    sizes, group = cost.Sizes.of(c, B=WIDE, w=8), setting.group(p, rank)
    held = lesson.collect(sum(q.data.size for q in model.parameters()))
    rows = [("all_reduces per layer, forward", "2", None, forward.calls),
            ("all_reduces per layer, backward", "2", None, backward.calls),
            ("the others: embedding, head, loss", "1 + 1 + 3", None, there.calls + back.calls
             - c.layers * (forward.calls + backward.calls)),
            ("bytes of a rank and layer", "4 x 2(p-1)/p x 8 N D", None,
             forward.bytes + backward.bytes),
            ("bytes of a rank and step", "(4 L + 2) 2(p-1)/p x 8 N D + s",
             sum(way.bytes for way in cost.tp(sizes, group)), there.bytes + back.bytes),
            ("parameters of all ranks", "D (V+L (12 D+7) + p (T+6 L+2))", None, sum(held))]
    small = 3 * group.all_reduce(sizes.N, 8).bytes
    return rows, setting.letters(sizes, "NTDLV", p=p, s=small), loss


def counted(group, run):
    """Count what forward and backward send.  -> two counts, the loss"""
    with group.counting() as forward:
        loss = run()
    with group.counting() as backward:
        loss.backward()
    return forward, backward, loss


def cut(lesson):
    """The small GPT for real text, over all ranks."""
    return over(setting.reader(), setting.mesh(lesson.comm, "tp"))


@kit.breaks(mappings, "copy_to")
def half_f(x, comm):
    """f copies forward, as it should, and forgets its all_reduce backward.

    Before an f, a gradient is only what one rank saw. Would you have noticed? (Automodel #1260)"""
    return tensor.Tensor(x.data, (x,), lambda g: (g,))


@kit.breaks(tp.RowParallelLinear, "forward")
def bias(self, x):
    """The row bias is added on every rank, before the sum: it counts p times.

    Biases start at zero, so the first step is right; the second is not (slapo #10)."""
    return self.leave(functional.linear(x, self.weight, self.bias), self.comm)


@kit.breaks(placement.Shard, "cut")
def seed(self, x):
    """Every rank draws its piece from the same seed, instead of cutting the one whole.

    p copies of a narrower model pose as one (OLMo-core #307)."""
    piece = seed.original(self, x)
    return np.random.default_rng(0).standard_normal(piece.shape) * x.std()


@kit.breaks(tp, "localize")
def vocab(ids, sizes, rank):
    """Each rank takes its last word for the next rank's first: nobody looks it up.

    If they are rare, no run on text will tell; random words do (Megatron-LM #1754)."""
    mine = ids - sum(sizes[:rank])
    return mine, (mine >= 0) & (mine < sizes[rank] - 1)


TAKEAWAY = "TP buys memory with bandwidth, when nothing hides it: put it on the fastest wire."
FIELD = "Megatron-LM Column- and RowParallelLinear; PyTorch ColwiseParallel, RowwiseParallel"
TRY = ["cut W1 by rows: where does a third sum become necessary, and why before gelu?"]
SCREENS = [columns_then_rows, why_f_and_g, who_holds_what, inside_one_machine, prove, bias]

if __name__ == "__main__":
    kit.run(SCREENS)
