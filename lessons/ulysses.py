"""DEEPSPEED-ULYSSES      Can attention see the whole sequence when each rank holds a part of it?

  lifts   memory      activations / p, with any attention inside, as it is on one rank
  costs   bandwidth   all_to_alls around every attention; and p must divide the heads
  code    minidist/ulysses.py, minidist/mappings.py
  run     mpirun -n 4 python -m lessons.ulysses    or: python -m lessons.ulysses -n 4
"""
from dataclasses import replace

import numpy as np

from lessons import kit, setting
from minidist import cost, cp, ulysses
from minidist.engine import functional
from minidist.engine.data import random_batch
from minidist.engine.tensor import Tensor

EXERCISE = [ulysses.to_heads, ulysses.to_tokens]
ROWS, T, H, E = 2, 24, 12, 3


def heads_for_tokens(lesson):
    """Heads for tokens

    Outside of attention a rank holds T/p tokens of all heads. Heads need nothing from each other:
    so one all_to_all makes it all T tokens of H/p heads, and another one goes back."""
    lesson.predict("q, k, v go in and one result comes out: how many all_to_alls in a training "
                   "step of a layer?", 8, why="one for each of the four, forward and backward",
                   mistakes={4: "backward takes as many", 2: "each of q, k, v and the result"})
    p, r = lesson.comm.size, lesson.comm.rank
    x = np.add.outer(100 * np.arange(H), np.arange(T))[None, :, T * r // p:T * (r + 1) // p, None]
    y = ulysses.to_heads(Tensor(x + 0.0), lesson.comm).data[0, :, :, 0]
    lesson.rows(["held before: heads, tokens", "and after"],
                [span(x[0, :, :, 0]), span(y)])
    z = ulysses.to_tokens(Tensor(y[None, :, :, None]), lesson.comm).data
    lesson.say(f"""
        (element: 100 x head + token)  There and back again, largest difference: """
               f"{np.abs(z - x).max():.0f}")


def span(x):
    """Which heads and tokens an array of 100 head + token holds."""
    heads, tokens = x[:, 0] // 100, x[0] % 100
    return f"{heads[0]:.0f}-{heads[-1]:.0f}, {tokens[0]:.0f}-{tokens[-1]:.0f}"


def volume(lesson):
    """Which sends less, Ulysses or the ring?

    Sent per rank and layer, forward, in numbers (B = 1; a width of D = H e; K = H):

        ring      (p-1) blocks of 2 D T/p            about 2 D T, however many ranks
        ulysses   4 arrays of D T/p, but for 1/p     about 4 D T/p: the more ranks, the less"""
    lesson.predict("64 heads, 64 key heads, 64 ranks: how many times as much does the ring send?",
                   32, "times", why="2(p-1)/p against 4(p-1)/p^2: p/2",
                   mistakes={64: "the ring sends 2 arrays around, Ulysses 4 across",
                             0.5: "each of the 4 arrays is cut in p pieces"})
    rows = []
    for K, p in ((64, 2), (64, 8), (64, 64), (8, 8), (8, 64), (1, 8)):
        sizes = cost.Sizes(T=65536, D=8192, H=64, K=K, V=1, L=1, w=2)
        ring, heads = (fn(sizes, cost.Group(p))[0].bytes for fn in (cost.cp, cost.ulysses))
        rows.append([K, p, kit.size(ring), kit.size(heads), f"{ring / heads:.2f}"])
    lesson.table(["key heads", "ranks", "ring sends", "Ulysses sends", "ring / Ulysses"], rows)
    lesson.say("""
        (T = 65,536, D = 8192, 64 heads, 16 bits, forward, one layer)
        Few key heads make the ring cheap: only keys and values travel. But its messages hide
        behind the work, those of an all_to_all do not.""")
    lesson.figure(draw)


def conditions(lesson):
    """What must divide?

    Ulysses needs p to divide the heads that a rank has: tensor parallelism takes its share first.
    Fewer key heads than ranks are sent to all who share them. The ring needs tokens only."""
    rows = []
    for H, K, tp in ((64, 64, 1), (64, 8, 1), (64, 8, 8), (40, 10, 1), (12, 2, 1)):
        h, k = H // tp, max(1, K // tp)
        fits = [n for n in range(1, h + 1) if h % n == 0 and (k % n == 0 or n % k == 0)]
        rows.append([H, K, tp, h, f"{k}", ", ".join(map(str, fits))])
    lesson.table(["heads", "key heads", "tp", "heads left", "key heads left", "p may be"], rows)
    lesson.say("""
        So in practice: Ulysses inside a node, up to the heads; a ring between nodes, for more.""")


def plain():
    return setting.model(context=T)


def spread(model, mesh):
    return cp.parallelize(model, mesh["cp"], "ulysses")


def prove(lesson):
    """Is it the same training, and what is sent?

    Each exchange against the other cut of the same array, forward and backward; then training."""
    comm, mesh = lesson.comm, setting.mesh(lesson.comm, "cp")
    p, r = comm.size, comm.rank
    x, g = np.random.default_rng(0).standard_normal((2, ROWS, H, T, E))
    cut = {name: [np.split(a, p, dim)[r] for a in (x, g)]
           for name, dim in (("heads", ulysses.HEADS), ("tokens", ulysses.TOKENS))}
    pairs = ("to_heads", "tokens", "heads"), ("to_tokens", "heads", "tokens")
    for name, before, after in pairs:
        a = Tensor(cut[before][0], requires_grad=True)
        y = getattr(ulysses, name)(a, comm)
        y.backward(cut[after][1])
        lesson.check(f"{name}: the other cut", kit.difference(y.data, cut[after][0]))
        lesson.check(f"{name}: its gradient", kit.difference(a.grad, cut[before][1]))
    model = spread(plain(), mesh)
    batch = model.localize(random_batch(setting.VOCAB, T, ROWS, 0, 0))
    q = [Tensor(np.split(a, p, ulysses.TOKENS)[r]) for a in
         np.random.default_rng(1).standard_normal((3, ROWS, H, T, E))]
    whole = [Tensor(a) for a in np.random.default_rng(1).standard_normal((3, ROWS, H, T, E))]
    with comm.counting() as counted:
        y = model.blocks[0].attn.core(*q, batch, model.blocks[0].attn)
    ref = functional.scaled_dot_product_attention(*whole).data
    lesson.check("attention", kit.difference(y.data, np.split(ref, p, ulysses.TOKENS)[r]), 1e-12)
    batches = [random_batch(setting.VOCAB, T, ROWS, 0, t) for t in range(3)]
    setting.same_training(lesson, plain, spread, mesh, batches)
    lesson.ledger(("messages, forward", "4(p-1)", None, counted.messages),
                  ("bytes", "4 B H e T/p (p-1)/p x w", None, counted.bytes),
                  p=p, B=ROWS, H=H, e=E, T=T, w=8)


@kit.breaks(ulysses, "to_heads")
def shuffled(x, comm):
    """Heads are cut, and the tokens that arrive are put together in the wrong order of ranks.

    Attention then takes the first tokens for the last: values of plausible size, and wrong."""
    y = shuffled.original(x, comm)
    order = np.roll(np.arange(y.shape[2]), y.shape[2] // comm.size)
    return Tensor(y.data[:, :, order], (y,), lambda g: (g[:, :, np.argsort(order)],))


@kit.breaks(ulysses, "to_tokens", first="y = ")
def no_way_back(x, comm):
    """The result goes back to tokens, its gradient does not go back to heads.

    As when the exchange is done outside of the tape: forward right, and every gradient wrong."""
    y = no_way_back.original(x, comm)
    return Tensor(y.data, (x,), lambda g: (g.reshape(x.shape),))


@kit.breaks(ulysses, "attend", first="batch")
def local_positions(q, k, v, batch, attn, comm, inner):
    """Attention sees all tokens, but their positions are counted from 0 on every rank.

    Keys of other ranks then look like early ones, and the causal mask hides the wrong half."""
    def counted_anew(q, k, v, batch, attn, **more):
        t = q.shape[2] // comm.size
        return inner(q, k, v, replace(batch, positions=np.arange(q.shape[2]) % t), attn,
                     **more)
    return local_positions.original(q, k, v, batch, attn, comm, counted_anew)


def draw(figure):
    axes, ranks = figure.subplots(), (2, 4, 8, 16, 32, 64)
    for K in (64, 8):
        for name, fn in ("ring", cost.cp), ("Ulysses", cost.ulysses):
            sent = [fn(cost.Sizes(T=65536, D=8192, H=64, K=K, V=1, L=1, w=2),
                       cost.Group(p))[0].bytes for p in ranks]
            axes.loglog(ranks, sent, "o-", label=f"{name}, {K} key heads")
    axes.set(xlabel="ranks", ylabel="bytes sent per rank, layer and forward",
             title="T = 65,536, D = 8192")
    axes.legend()


TAKEAWAY = "Exchange heads for tokens, and any attention works; as far as there are heads."
FIELD = "DeepSpeed sequence/layer.py DistributedAttention; torch's ulysses in context_parallel"
TRY = ["at which number of key heads do ring and Ulysses send the same, for p = 8?",
       "compose it with the ring: 16 ranks, 4 heads. Who exchanges what with whom?"]
SCREENS = [heads_for_tokens, volume, conditions, prove, no_way_back]

if __name__ == "__main__":
    kit.run(SCREENS)
