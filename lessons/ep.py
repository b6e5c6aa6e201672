"""EXPERT PARALLELISM      Which expert is on which rank, and how do tokens find it?

  lifts   memory      experts, their gradients and their optimizer state / p
  costs   bandwidth   four all_to_alls per layer and step; and all wait for the busiest rank
  code    minidist/ep.py, minidist/moe.py, minidist/mappings.py (all_to_all)
  run     mpirun -n 4 python -m lessons.ep         or: python -m lessons.ep -n 4
"""
import numpy as np

from lessons import kit, routed, setting
from minidist import cost, dp, ep, moe, placement
from minidist.collectives import all_gather
from minidist.engine.nn import Module
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh

EXERCISE = [ep.exchange_counts, ep.dispatch, ep.combine]
E, K, ROWS, TOKENS = 5, 2, 5, 12                      # 5 experts: they divide over no rank


def to_the_experts(lesson):
    """Tokens go to their experts

    Experts are large and tokens are small, so tokens travel. Rows are sorted by expert, so that
    those for one rank lie together; how many, the counts say, which go first."""
    model, _ = layer(lesson.comm)
    held, own = cost.chunks(E, lesson.comm.size), model.layer.experts.forward
    model.layer.experts.forward = lambda rows, counts: note(model, counts) or own(rows, counts)
    model(sample(lesson.comm.rank))
    mine = ep.sums(model.layer.counts, held)
    lesson.rows(["experts here", "its rows for each expert", "rows to each rank", "rows worked on"],
                [held[lesson.comm.rank], *(" ".join(map(str, n)) for n in (
                    model.layer.counts, mine)), int(np.sum(model.came))])
    lesson.say("""
        dispatch   all_to_all of rows; rows that came by rank are sorted by expert
        experts    each on one run of rows, of all ranks
        combine    sorted back, all_to_all; then gates, and the sum over k, at home""")


def four_exchanges(lesson):
    """Four exchanges

    Forward a row goes there and back; backward its gradient takes both ways again. k rows of D
    numbers for each of my n tokens, of which (p-1)/p leave this rank, if the router deals evenly:
    4 k n D (p-1)/p numbers sent per layer and step."""
    lesson.predict("D = 7168, k = 8, n = 4096 tokens on each of 64 ranks, 16 bits: sent per rank, "
                   "layer and step", 1.85, "GB", why="4 x 8 x 4096 x 7168 x 2 bytes x 63/64",
                   mistakes={0.925: "backward sends as much again",
                             0.231: "each token goes to 8 experts"})
    rows = []
    for k, p in (1, 2), (1, 8), (2, 2), (2, 8), (8, 8), (8, 64):
        sizes, group = cost.Sizes(T=4096, D=7168, H=1, V=1, L=1, w=2), cost.Group(p)
        shared, even = [n // p * k for n in [4096] * p], [E] * p
        over_ep = sum(price.bytes for price in cost.ep(shared, shared, even, sizes, group))
        over_tp = 2 * group.all_reduce(p * sizes.N * sizes.D, sizes.w).bytes
        rows.append([k, p, kit.size(over_ep), kit.size(over_tp), f"{over_ep / over_tp:.2f}"])
    lesson.table(["k", "ranks", "over ep: sent", "over tp: sent", "ep / tp"], rows)
    lesson.say("""
        Beside it the same MLPs cut over tp: p ranks work on all p n tokens together and sum twice,
        4 p n D (p-1)/p. So ep sends k/p of that: it wins as long as a token needs fewer experts
        than there are ranks. But tp is always balanced.""")


def the_busiest_rank(lesson):
    """All wait for the busiest

    The all_to_all back starts when the last rank is done. So a layer takes as long as the rank
    with most rows, and the even share is what it could take."""
    lesson.predict("256 ranks with an expert each, k = 1, a tenth of all tokens choose the same: "
                   "how many times as long as evenly dealt?", 25.6, "times",
                   why="a tenth of all on one rank, which should have 1/256",
                   mistakes={10: "an even share is 1/256, not 1/100"})
    rng, rows, found = np.random.default_rng(0), [], {}
    for name, skew in ("even", 0.0), ("skewed", 0.5), ("crowded", 1.5):
        p = routed.softmax(rng.gumbel(size=(4096, 8)) + skew * np.arange(8)[::-1])
        counts = moe.count(moe.choose(p, 1), 8)
        limit = moe.places(4096, moe.MoEConfig(8, 1, capacity=1.25))
        found[name], kept = counts, np.minimum(counts, limit)
        rows.append([name, f"{counts.max() / 512:.2f}", f"{kept.max() / 512:.2f}",
                     f"{100 * (1 - kept.sum() / 4096):.0f} %"])
    lesson.table(["router, 8 experts on 8 ranks", "dropless: busiest / even", "capacity 1.25",
                  "then dropped"], rows)
    lesson.say("""
        Capacity bounds the wait and drops tokens; dropless keeps all of them and waits. A router
        that is kept in balance (lessons.moe) needs neither.""")
    lesson.figure(draw, found)


def prove(lesson):
    """Is it the same training, and what does it cost?

    Each function alone; a layer; then training, dropless. Its second batch has one row: the other
    ranks have no tokens, and work for it."""
    routed.exchanged(lesson)
    comm, p = lesson.comm, lesson.comm.size
    model, forward = one_layer(lesson)
    held = cost.chunks(E, p)
    there = ep.sums(model.layer.counts, held)
    back = all_gather(np.array(there)[None], comm)[:, comm.rank].tolist()
    away = [sum(rows) - rows[comm.rank] for rows in (there, back)]
    batches = [setting.words(n, t, ragged=True) for t, n in enumerate((ROWS, 1))]
    setting.same_training(lesson, gpt, spread, DeviceMesh(comm, dp=p, ep=p), batches)
    lesson.ledger(("experts held", "E_r", None, len(model.layer.experts.fc1.data)),
                  ("bytes, forward", "8 (D (s+c)+E-E_r)", None, forward),
                  E_r=held[comm.rank], D=4, s=away[0], c=away[1], E=E)
    lesson.say("   s rows sent away, c rows that came; E - E_r counts of 8 bytes go first")


@kit.breaks(ep, "share")
def times_ep(experts, comm):
    """Gradients of experts are ep times too large: averaged over fewer ranks than they have seen.

    The loss falls all the same, and AdamW hides it altogether (DeepSpeed, MegaBlocks)."""
    times_ep.original(experts, comm)
    for own in experts.parameters():
        own.register_post_accumulate_grad_hook(
            lambda p: np.multiply(p.grad, comm.size, out=p.grad))


@kit.breaks(ep, "exchange_counts")
def backwards(counts, comm, held):
    """A rank sends its counts in another order of experts than its rows.

    The sums are right, so every message fits; rows are worked on by the wrong expert."""
    return backwards.original(counts, comm, held)[:, ::-1]


@kit.breaks(ep, "combine")
def unsorted(y, counts, came, comm, held):
    """Rows are sent back in the order of experts in which they were worked on.

    Each rank gets as many rows as it is owed, and not its own."""
    sizes = came.sum(1).tolist(), ep.sums(counts, held)
    return ep.all_to_all(y, comm, 0, 0, *sizes)


@kit.breaks(ep, "travel", first="if rows")
def stays_away(forward, rows, counts, comm, held):
    """A rank that has no rows to send takes no part in the exchange.

    The others wait for it for ever: a rank without tokens is normal, and hangs the job."""
    if rows.shape[0] == 0:
        return rows
    return stays_away.original(forward, rows, counts, comm, held)


class Layer(Module):
    """A model that is one mixture of experts, the same on all ranks."""

    def __init__(self):
        self.localizers = []
        self.layer = routed.layer(experts=E, top_k=K)

    def forward(self, x):
        return self.layer(x)


def layer(comm):
    """Spread it.  -> model, mesh"""
    mesh = DeviceMesh(comm, dp=comm.size, ep=comm.size)
    return dp.parallelize(ep.parallelize(Layer(), mesh["ep"]), mesh["dp"]), mesh


def one_layer(lesson):
    """Hold a layer over all ranks to the same layer on one.  -> model, bytes of its forward"""
    (model, mesh), alone, rank = layer(lesson.comm), Layer(), lesson.comm.rank
    with lesson.comm.counting() as counted:
        y = model(sample(rank))
    forward = counted.bytes
    y_full = alone(Tensor(np.concatenate([sample(r).data for r in range(lesson.comm.size)])))
    for result in y, y_full:
        result.backward(np.ones(result.shape))
    placement.finalize(model.parameters(), mesh, 1)
    lesson.check("its tokens, through all experts",
                 kit.difference(y.data, y_full.data[rank:rank + 1]), 1e-12)
    grads = {q.name: q.grad for q in alone.parameters()}
    for kind in "router", "experts":
        lesson.check(f"gradients of the {kind}", max(
            kit.difference(placement.join(q, q.grad), grads[q.name])
            for q in model.parameters() if kind in q.name), 1e-12)
    return model, forward


def note(model, counts):
    model.came = counts


def sample(rank):
    """The tokens of a rank.  [1, TOKENS, 4]"""
    return Tensor(np.random.default_rng(rank).standard_normal((1, TOKENS, 4)))


def gpt():
    return moe.replace_mlps(setting.model(layers=2), moe.MoEConfig(E, K, bias=0.01))


def spread(model, mesh):
    return dp.DistributedDataParallel(ep.parallelize(model, mesh["ep"]), mesh["dp"])


def draw(figure, found):
    """Rows of each rank, for routers of different skew."""
    for axes, (name, counts) in zip(figure.subplots(1, len(found), sharey=True), found.items()):
        axes.bar(range(len(counts)), counts)
        axes.axhline(counts.sum() / len(counts), color="black", label="even share")
        axes.axhline(1.25 * counts.sum() / len(counts), color="red", linestyle="--",
                     label="capacity 1.25")
        axes.set(title=name, xlabel="rank", ylabel="rows")
    axes.legend()


TAKEAWAY = "Send the token to the expert: k rows each way, and the busiest rank sets the pace."
FIELD = "Megatron-Core expert parallelism, DeepSpeed-MoE, GShard; DeepEP's dispatch and combine"
TRY = ["k = 8 of 256 experts on 64 ranks: why is one copy of a token per *rank* enough?"]
SCREENS = [to_the_experts, four_exchanges, the_busiest_rank, prove, times_ep]

if __name__ == "__main__":
    kit.run(SCREENS)
