"""CONTEXT PARALLELISM      How do p ranks attend over one sequence that none of them could hold?

  lifts   memory      activations / p: sequences as long as there are ranks; attention time / p
  costs   bandwidth   every block of keys goes around, three times; behind the work, if T is long
  code    minidist/cp.py, minidist/flash.py
  run     mpirun -n 4 python -m lessons.cp        or: python -m lessons.cp -n 4
"""
import time
from dataclasses import replace

import numpy as np

from lessons import kit, setting
from minidist import cost, cp, flash, step
from minidist.engine import functional
from minidist.engine.data import random_batch
from minidist.engine.tensor import Tensor

EXERCISE = [cp.forward, cp.backward]
POINTS = {"backward": 2}
ROWS, T = 2, 24                                            # 24 tokens: in 2p runs, p from 1 to 4


def relay(lesson):
    """A relay race of keys

    Queries stay at home. Keys and values are handed to the right, one rank in every step; each rank
    merges what it meets into (out, lse), as lessons.flash does with tiles. Whose keys are where:"""
    lesson.predict("4 ranks, one attention forward: how many blocks does each rank send?", 3,
                   "blocks", why="its own, and what it has received, but for the last",
                   mistakes={4: "the last block need not go home", 1: "its own only"})
    x, holds = np.array([lesson.comm.rank]), []
    for _ in range(lesson.comm.size):
        holds.append(f"k{x[0]}")
        x = cp.hop(x, lesson.comm)()
    lesson.rows([f"step {i}" for i in range(len(holds))], holds)
    lesson.say("""
        While a rank works on one block, the next one is on its way. Backward: the keys once more,
        with the final lse, and one step behind each block the gradient that it has gathered, which
        starts at its right neighbour, adds up, and ends at home.""")


def who_works(lesson):
    """Causal: who works while the others wait?

    In order, rank 0 has the first tokens, whose queries see few keys. In zigzag each rank has two
    runs of 2p, the r-th from the front and from the back. Pairs that a rank's queries see, of the
    keys of all ranks, as multiples of the fair share:"""
    lesson.predict("8 ranks, in order: how many times its fair share has the last rank?", 1.875, "",
                   why="15/64 of the pairs, where 1/8 is fair: (2p - 1)/p",
                   mistakes={8: "the others see some as well", 2: "nearly: (2p - 1)/p"})
    rows = []
    for name in ("ring", "zigzag"):
        for p in (2, 4):
            places = cp.METHODS[name](64 * p, p)
            seen = [sum(int((mine[:, None] >= keys).sum()) for keys in places) for mine in places]
            shares = [f"{p * n / sum(seen):.2f}" for n in seen]
            held = places[0] // 32
            rows.append([name, p, " ".join(map(str, np.unique(held))), *shares, *[""] * (4 - p)])
    lesson.table(["method", "p", "rank 0 holds runs", *(f"rank {r}" for r in range(4))], rows)
    lesson.say("""
        Everybody waits for the slowest in every step. In order that is (2p - 1)/p times the fair
        share: from two ranks on, nearly half of the machine idles.""")


def how_long(lesson):
    """How long must a sequence be for the messages to hide?

    A step of s = T/p queries and keys of D numbers: 4 s s D flops, and 2 s D numbers to receive. So
    work grows with s^2, the message with s, and from s = w/2 F/B on the message hides: F flops
    and B bytes per second, w bytes a number; causal in zigzag, half the work, from w F/B on."""
    lesson.table(["GPU: F = 990 Tflop/s, w = 2", "B", "s at least", "causal"],
                 [[name, f"{b} GB/s", f"{990e3 / b:,.0f}", f"{2 * 990e3 / b:,.0f}"]
                  for name, b in (("NVLink", 450), ("InfiniBand, one port", 50))])
    p, lengths = lesson.comm.size, (32, 128, 512)
    alone = [timed(lesson, s) for s in lengths]
    bandwidth = 2 * 2 * 128 * 16 * 4 / alone[1] if p > 1 else np.inf
    with lesson.comm.link(bandwidth=bandwidth):
        linked = [timed(lesson, s) for s in lengths]
    lesson.table(["here, s", "no wire to wait for", f"a link of {bandwidth / 1e6:.1f} MB/s",
                  "times"], [[s, kit.duration(a), kit.duration(b), f"{b / a:.2f}"]
                             for s, a, b in zip(lengths, alone, linked)])
    better = linked[2] / alone[2] < linked[0] / alone[0]
    lesson.fill("one rank has nothing to hide." if p == 1 else
                f"""The link was chosen so that s = 128 takes as long to send as to work on. In this
                run the longest blocks {'hide' if better else 'did not hide'} their messages better
                than the shortest.""")
    lesson.figure(draw, lengths, alone, linked)


def timed(lesson, s):
    """Seconds of one step of a ring forward, slowest rank, shortest of three."""
    comm, laps = lesson.comm, []
    q = np.ones((2, s, 16), np.float32)
    sights = [flash.Sight(np.arange(s), np.arange(s), False)] * comm.size
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        cp.forward(q, np.ones((2, *q.shape), np.float32), comm, sights)
        laps.append((time.perf_counter() - start) / comm.size)
    return float(np.min(np.max(lesson.collect(laps), axis=0)))


def plain():
    return setting.model(context=T, kv_heads=4)


def spread(model, mesh):
    return cp.parallelize(model, mesh["cp"], "zigzag")


def prove(lesson):
    """Is it the same training, and what is sent?

    Against plain attention on one rank: zigzag, grouped heads. Then a training run, with targets
    that are not spread evenly over the tokens."""
    comm, mesh = lesson.comm, setting.mesh(lesson.comm, "cp")
    p, mine = comm.size, cp.zigzag(T, comm.size)[comm.rank]
    q, g = np.random.default_rng(0).standard_normal((2, ROWS, 4, T, 3))
    k, v = np.random.default_rng(1).standard_normal((2, ROWS, 2, T, 3))
    whole = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    functional.scaled_dot_product_attention(*whole).backward(g)
    part = [Tensor(x[:, :, mine], requires_grad=True) for x in (q, k, v)]
    sights = [flash.Sight(mine, keys, True, 2, 2) for keys in cp.zigzag(T, p)]
    with comm.counting() as there:
        y = cp.ring_attention(*part, mesh["cp"], sights)
    with comm.counting() as back:
        y.backward(g[:, :, mine])
    ref_y = functional.scaled_dot_product_attention(*whole).data
    lesson.check("out", kit.difference(y.data, ref_y[:, :, mine]), 1e-12)
    for name, ours, ref in zip(("queries", "keys", "values"), part, whole):
        lesson.check(f"gradient of {name}", kit.difference(ours.grad, ref.grad[:, :, mine]), 1e-12)
    batches = [random_batch(setting.VOCAB, T, ROWS, 0, t) for t in range(3)]
    lesson.check("positions follow the tokens", kit.difference(
        spread(plain(), mesh).localize(batches[0]).positions, mine))
    setting.same_training(lesson, plain, spread, mesh, batches)
    hops = cost.Group(p).p - 1
    lesson.ledger(("blocks sent forward", "p - 1", hops, there.messages),
                  ("backward: keys, and gradients", "2(p-1)", 2 * hops, back.messages),
                  ("bytes of all", "3(p-1) x 2 B K e T/p x w", None, there.bytes + back.bytes),
                  p=p, B=ROWS, K=2, e=3, T=T, w=8)


@kit.breaks(cp, "take_tokens", first="return")
def local_positions(batch, comm, method):
    """The tokens are dealt in zigzag, but their positions are counted through in order.

    Attention then hides the wrong keys. Megatron-LM is asked about this again and again."""
    mine = local_positions.original(batch, comm, method)
    t = len(mine.positions)
    return replace(mine, positions=np.arange(t * comm.rank, t * comm.rank + t))


@kit.breaks(cp, "backward", first="for step")
def stale_keys(q, g, kv, comm, sights):
    """Backward uses the first keys, a rank's own, in every step: nothing is handed on.

    Forward is right, the loss is right, and it falls: slowly, and nobody knows why."""
    gq, gkv = np.zeros_like(q[..., :-1]), np.zeros_like(kv)
    for step_ in range(comm.size):
        flash.attend_backward(q, g, *kv, sights[comm.rank - step_], gq, *gkv)
    return gq, gkv


@kit.breaks(cp, "backward", first="gq, gkv")
def not_home(q, g, kv, comm, sights):
    """The gradient of a block of keys stops one hop from home.

    Every rank then trains its neighbour's keys."""
    gq, gkv = not_home.original(q, g, kv, comm, sights)
    comm.shift(gkv, into=(came := np.empty_like(gkv)))
    return gq, came


@kit.breaks(step, "summed", first="return")
def count_per_rank(loss, count, mesh):
    """Each rank divides by the targets of its own tokens, times p: a mean of means.

    Right as long as targets are spread evenly; padding and prompts are not."""
    return count_per_rank.original(loss, count, mesh)[0], count * mesh.world.size


def draw(figure, lengths, alone, linked):
    axes = figure.subplots()
    axes.loglog(lengths, alone, "o-", label="attention alone")
    axes.loglog(lengths, linked, "o-", label="over the link")
    axes.set(xlabel="tokens per rank", ylabel="seconds per step", title="one step of the ring")
    axes.legend()


TAKEAWAY = "Long sequences pay for their own messages: work grows with T^2, what is sent with T."
FIELD = "Megatron-LM --context-parallel-size; ring-flash-attention; torch context_parallel"
TRY = ["with 8 key/value heads instead of 64, from which s on do the messages hide?",
       "which of the two runs of zigzag works in which step? draw it for p = 2"]
SCREENS = [relay, who_works, how_long, prove, local_positions]

if __name__ == "__main__":
    kit.run(SCREENS)
