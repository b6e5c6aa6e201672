"""TILED ATTENTION      How can softmax be taken before all its numbers are known?

  lifts   memory      the T x T weights of attention are never held: bytes grow with T, not T^2
  costs   compute     one matrix product of seven: backward makes the scores a second time
  code    minidist/flash.py
  run     python -m lessons.flash
"""
import numpy as np

from lessons import counted, kit
from minidist import flash
from minidist.engine import functional
from minidist.engine.graph import graph_bytes
from minidist.engine.tensor import Tensor

ALONE = True
EXERCISE = [flash.merge]
SCORES, VALUES = np.array([1.0, 3, 2, 5]), np.array([10.0, 20, 30, 40])


def by_hand(lesson):
    """A softmax in two halves, by hand

    One query, four keys: scores 1 3 | 2 5, values 10 20 | 30 40. Softmax needs the sum of all four
    exp(score). But two halves that know their own results, and the logs of their own sums (lse),
    know enough to put the whole together."""
    lesson.predict("The first half is done. Then 2 and 5 come: their share of the result?",
                   0.87, "", why="(e^2 + e^5) / (e + e^3 + e^2 + e^5)",
                   mistakes={0.5: "halves count by their weights, not by their keys",
                             0.7: "7 of 10 is the scores' share; weights are exp(score)"})
    rows, (out, lse) = [], flash.nothing(np.zeros((1, 1, 1)))
    for i in (slice(0, 2), slice(2, 4)):
        y, total = flash.block(np.ones((1, 1, 1)), flash.LOG2E * SCORES[None, i, None],
                               VALUES[None, i, None])
        flash.merge(out, lse, y, total)
        rows.append([str(SCORES[i]), f"{y.item():.4f}", f"{total.item():.4f}",
                     f"{out.item():.4f}", f"{lse.item():.4f}"])
    lesson.table(["scores", "out alone", "lse alone", "out merged", "lse merged"], rows)
    weights = np.exp(SCORES) / np.exp(SCORES).sum()
    lesson.say(f"""
        All four at once:  weights {np.round(weights, 4)},  out {weights @ VALUES:.4f}
        So keys may come in tiles, in any order, and only (out, lse) must be kept for a query.""")


def what_is_held(lesson):
    """T squared, or T?

    Plain attention keeps its weights for backward. In tiles, q, k, v, out and lse are enough:
    a weight is exp(score - lse), and the score is made again."""
    lesson.predict("T = 131,072 tokens, 32 heads, 16 bits: the weights of one layer, all T x T?",
                   1100, "GB", why="32 x 131,072^2 x 2 bytes; a layer's q, k, v, out are 4.3 GB",
                   mistakes={34: "times 32 heads", 550: "times 2 bytes"})
    lengths = (256, 512, 1024)
    held = [[bytes_held(fn, T) for fn in ATTENTIONS.values()] for T in lengths]
    lesson.table(["T", *ATTENTIONS, "plain / tiles"],
                 [[T, *map(kit.size, row), f"{row[0] / row[1]:.1f}"]
                  for T, row in zip(lengths, held)])
    lesson.say("""
        (counted in the graph: 2 heads, e = 16, causal, float64)
        Twice the T: nearly four times the bytes on the left, twice on the right.""")
    lesson.figure(draw, lengths, held)


def bytes_held(attention, T, H=2, e=16):
    """Bytes that the graph of one attention keeps for backward."""
    positions = np.arange(T)
    q, k, v = (Tensor(x.copy(), requires_grad=True) for x in numbers((1, H, T, e), 3))
    y = attention(q, k, v, positions=positions, key_positions=positions)
    return graph_bytes(y, exclude=[positions])


def numbers(shape, count):
    return np.random.default_rng(0).standard_normal((count, *shape))


def what_is_computed(lesson):
    """Less memory, more arithmetic

    Forward makes the same two products. Backward makes five instead of four: scores once more.
    Counted by arrays that watch what NumPy does, all keys visible to all queries:"""
    rows = []
    for name, attention in ATTENTIONS.items():
        there, back = flops(attention, 1, 2, 96, 16)
        rows.append([name, f"{there:,}", f"{back:,}", f"{(there + back) / FULL:.3f}"])
    lesson.table(["", "flops forward", "backward", "of plain"], rows)
    lesson.say("""
        On a GPU attention is limited by memory bandwidth, and the tiles stay in fast memory: there
        FlashAttention is 2 to 4 times faster than plain attention, more products or not.""")


FULL = 12 * 2 * 96 * 96 * 16                              # plain: six products of 2 H T T e


def flops(attention, B, H, T, e):
    """Flops of the matrix products of one attention.  -> (forward, backward)"""
    q, k, v, g = (x.view(counted.Counted) for x in numbers((B, H, T, e), 4))
    with counted.counting() as count:
        y = attention(*(Tensor(x, requires_grad=True) for x in (q, k, v)), causal=False)
        there = count.products
        y.node.vjp(g)
    return there, count.products - there


ATTENTIONS = {"plain": functional.scaled_dot_product_attention, "tiles": flash.attention}


def prove(lesson):
    """Is it the same attention, and at what price?

    Against the plain one: values and all gradients, with grouped heads, at positions out of order,
    with scores of +-10,000; queries that see no key at all give 0, and no NaN."""
    somewhere = np.r_[40:60, 0:20, 90:100]
    keys = np.r_[10:50, 70:90, 120:130]
    values, gradients = compare(somewhere, keys)
    lesson.check("values as plain attention", values, 1e-12)
    lesson.check("gradients as plain attention", gradients, 1e-12)
    lesson.check("scores of 10,000", max(compare(np.arange(50), np.arange(70), 3e3)), 1e-10)
    blind = compare(np.arange(50), np.arange(50, 120))
    lesson.check("who sees no key gets 0", max(blind))
    one = [Tensor(np.reshape(x, (1, 1, -1, 1))) for x in ([-3e4, 0], [1.0, 0], [1.0, 100])]
    first = flash.attention(*one).data[0, 0, 0, 0]         # its own score is -30,000, the next 0
    lesson.check("a hidden key never wins", abs(first - 1))
    B, H, T, e, w = 1, 2, 300, 16, 8
    there, back = flops(flash.attention, B, H, 96, e)
    lesson.ledger(("bytes held", "B T H (4 e + 1) w", None, bytes_held(flash.attention, T)),
                  ("flops of products, and of the sum", "2 B H t t (2 e + 1)", None, there),
                  ("of backward, - lse and - dot in them", "2 B H t t (5 e + 2)", None, back),
                  B=B, T=T, H=H, e=e, w=w, t=96)


def compare(positions, key_positions, size=1.0):
    """Differences from plain attention: of the values, and the largest of the gradients."""
    q, g = size * numbers((2, 4, 50, 4), 1)[0], numbers((2, 4, 50, 4), 2)[1]
    k, v = numbers((2, 2, 70, 4), 2)
    results = []
    for attention in ATTENTIONS.values():
        x = [Tensor(a, requires_grad=True) for a in (q, k, v)]
        y = attention(*x, positions=positions, key_positions=key_positions)
        y.backward(g)
        results.append([y.data, *(a.grad for a in x)])
    differences = [kit.difference(ours, ref) for ref, ours in zip(*results)]
    return differences[0], float(np.max(differences[1:]))


@kit.breaks(flash, "merge", first="both")
def not_rescaled(out, lse, out_new, lse_new):
    """The old result keeps its full weight when new keys come.

    Right as long as one tile holds all keys: a test with short sequences never sees it."""
    both = np.logaddexp(lse, lse_new)
    share = np.exp(lse_new - np.maximum(both, np.finfo(both.dtype).min))
    np.copyto(out, out + share[..., None] * out_new)
    lse[...] = both


@kit.breaks(flash, "merge", first="with")
def naive_exp(out, lse, out_new, lse_new):
    """The weights of the halves are exp(lse), which overflows for scores above 709.

    ring-flash-attention merged like this at first: NaN, but only late in a training run."""
    with np.errstate(all="ignore"):
        share = np.exp(lse_new) / np.maximum(np.exp(lse) + np.exp(lse_new), 1e-300)
        lse[...] = np.log(np.exp(lse) + np.exp(lse_new))
    out += share[..., None] * (out_new - out)


@kit.breaks(flash.Sight, "hidden", first="return")
def finite_mask(self, i, j, dtype):
    """Hidden keys get a score of -10,000 instead of minus infinity.

    A hidden key wins as soon as the visible ones score lower; and who sees nothing sees all."""
    return np.where(np.repeat(i, self.share) < j[:, None], dtype.type(-1e4), dtype.type(0))


@kit.breaks(flash, "prepare", first="return")
def no_dot(q, g, out, lse):
    """Backward forgets that softmax's weights sum to 1: what g . out takes off is left on.

    The loss falls all the same, to another place."""
    lse = np.where(lse == -np.inf, np.inf, lse * lse.dtype.type(flash.LOG2E))
    return flash.with_column(q, -lse), flash.with_column(g, 0)


def draw(figure, lengths, held):
    axes = figure.subplots()
    for name, column in zip(ATTENTIONS, zip(*held)):
        axes.loglog(lengths, column, "o-", label=name)
    axes.set(xlabel="tokens", ylabel="bytes held for backward", title="one causal attention")
    axes.legend()


TAKEAWAY = "A softmax can be merged from parts: keep two numbers per query, not T weights."
FIELD = "FlashAttention; torch scaled_dot_product_attention; out and softmax_lse in its kernels"
TRY = ["which of the two tables changes when e doubles, and by how much?",
       "merge three halves in another order by hand: why can the order not matter?"]
SCREENS = [by_hand, what_is_held, what_is_computed, prove, naive_exp]

if __name__ == "__main__":
    kit.run(SCREENS)
