"""What the lessons on experts ask of the functions in moe and ep, and a layer worked out by hand.

The right answers are loops over tokens and finite differences: nothing here calls what it asks.
"""
import numpy as np

from minidist import ep, moe
from minidist.engine.gpt import GPTConfig
from minidist.engine.tensor import Tensor

CONFIG = GPTConfig(vocab=5, context=6, width=4, heads=2, layers=1)


def layer(seed=0, config=CONFIG, **routing):
    """A small mixture of experts without zeros."""
    made = moe.MoE("m", moe.MoEConfig(**{"experts": 3, "top_k": 2, **routing}), config, 0, float)
    rng = np.random.default_rng(seed)
    for p in made.parameters():
        p.data[...] = rng.standard_normal(p.shape) * 0.5
    return made


def softmax(z):
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def routed(z, bias, k):
    """Choose by hand, one token after the other.  -> chosen, gates, probabilities"""
    p = softmax(z)
    shifted = p if bias is None else p + bias
    chosen = np.array([sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in shifted],
                      int).reshape(len(z), k)
    gates = np.take_along_axis(p, chosen, 1)
    return chosen, gates / gates.sum(1, keepdims=True) if k > 1 else gates, p


def by_hand(m, x):
    """A layer by hand, one token and one expert at a time; the last ones are dropped.  [n, D]"""
    r, own, used = m.routing, m.experts, np.zeros(m.routing.experts, int)
    chosen, gates, _ = routed(x @ m.router.data.T, None if m.bias is None else m.bias.data, r.top_k)
    y, limit = np.zeros_like(x), np.inf if r.capacity is None else moe.places(len(x), r)
    for t, k in np.ndindex(chosen.shape):
        e = chosen[t, k]
        used[e] += 1
        if used[e] <= limit:
            h = own.fc1.data[e] @ x[t] + own.fc1_bias.data[e]
            h = h / (1 + np.exp(-np.sqrt(8 / np.pi) * (h + 0.044715 * h ** 3)))
            y[t] += gates[t, k] * (own.fc2.data[e] @ h + own.fc2_bias.data[e])
    return y


def slope(f, x, g):
    """The gradient of sum(g f(x)) by central differences.  -> as x"""
    found, h = np.zeros_like(x), 1e-6
    for i in np.ndindex(x.shape):
        kept, ends = x[i], []
        for x[i] in (kept + h, kept - h):
            ends.append((np.asarray(f(x)) * g).sum())
        x[i], found[i] = kept, (ends[0] - ends[1]) / (2 * h)
    return found


# ---- lessons.moe

def router(lesson):
    """Ask each function of the exercise of lessons.moe."""
    rng = np.random.default_rng(3)
    with lesson.asking() as ask:
        for n, E, k, biased in (5, 4, 1, False), (6, 3, 2, True), (0, 3, 1, False), (4, 5, 3, True):
            ask_route(ask, rng.standard_normal((n, E)), k,
                      rng.standard_normal(E) if biased else None)
        ask_route(ask, np.zeros((2, 4)), 2, None)                            # ties
        ask_balance(ask, rng)
        for n, E, k, share in (6, 4, 2, 0.6), (5, 3, 1, 1.0), (0, 2, 1, 1.0), (4, 6, 3, 0.0):
            chosen = np.array([rng.permutation(E)[:k] for _ in range(n)], int).reshape(n, k)
            ask_order(ask, chosen, rng.random((n, k)) < share, E)
            ask_tokens(ask, rng, chosen, rng.random((n, k)) < share)


def ask_route(ask, z, k, bias):
    ask("route", f"{list(z.shape)} logits, k = {k}, {'a' if bias is not None else 'no'} bias")
    x = Tensor(z.copy(), requires_grad=True)
    chosen, gates, p = moe.route(x, bias, k)
    right = routed(z, bias, k)
    for name, found, expected in zip(("chosen", "gates", "probabilities"),
                                     (chosen, gates.data, p.data), right):
        ask.right(name, found, expected, 1e-12)
    g = np.random.default_rng(k).standard_normal(right[1].shape)
    if len(z) and np.ptp(z):
        gates.backward(g)
        ask.right("gradient of the logits through the gates", x.grad,
                  slope(lambda z: routed(z, bias, k)[1], z.copy(), g), 1e-6)


def ask_balance(ask, rng):
    for counts, coefficient in ([4, 4, 4], 0.01), ([9, 0, 3], 0.5), ([0, 0, 0], 1.0):
        ask("balance_loss", f"counts {counts}, coefficient {coefficient}")
        z = rng.random((sum(counts) // 2, 3))
        p, f = Tensor(z, requires_grad=True), np.array(counts) / max(sum(counts), 1)
        loss = moe.balance_loss(p, np.array(counts), coefficient)
        ask.right("loss", float(loss.data), coefficient * 3 * float((z @ f).sum()), 1e-12)
        loss.backward()
        ask.right("gradient of the probabilities", p.grad,
                  np.tile(coefficient * 3 * f, (len(z), 1)), 1e-12)


def ask_order(ask, chosen, kept, E):
    n, k = chosen.shape
    ask("expert_order", f"{n} tokens, {k} of {E} experts each, {int(kept.sum())} choices kept")
    token, row, counts = moe.expert_order(chosen, kept, E)
    places = [(chosen[t, j], t, j) for t, j in np.ndindex(n, k) if kept[t, j]]
    ask.right("rows of each expert", counts, np.bincount([e for e, _, _ in places], minlength=E))
    ask.right("number of rows", len(token), len(places))
    runs = np.repeat(np.arange(E), counts)
    own = [(int(runs[row[t, j]]), int(token[row[t, j]])) if row[t, j] < len(token) else None
           for _, t, j in places]
    ask.right("expert and token of the row of each choice", own,
              [(int(e), t) for e, t, _ in places])
    ask.right("number of different rows", len({int(row[t, j]) for _, t, j in places}), len(places))


def ask_tokens(ask, rng, chosen, kept):
    n, k = chosen.shape
    ask("to_tokens", f"{n} tokens, {k} experts each, {int(kept.sum())} choices kept")
    row = np.zeros((n, k), int)
    row[kept] = rng.permutation(int(kept.sum()))
    out, gates = rng.standard_normal((int(kept.sum()), 3)), rng.random((n, k)) + 0.1
    x, w = Tensor(out, requires_grad=True), Tensor(gates, requires_grad=True)

    def total(out, gates):
        y = np.zeros((n, 3))
        for t, j in zip(*np.nonzero(kept)):
            y[t] += gates[t, j] * out[row[t, j]]
        return y
    y = moe.to_tokens(x, w, row, kept)
    ask.right("sum for each token", y.data, total(out, gates), 1e-12)
    g = rng.standard_normal((n, 3))
    y.backward(g)
    ask.right("gradient of the rows", x.grad,
              slope(lambda out: total(out, gates), out.copy(), g), 1e-6)
    ask.right("gradient of the gates", w.grad,
              slope(lambda gates: total(out, gates), gates.copy(), g), 1e-6)


# ---- lessons.ep

def exchanged(lesson):
    """Ask each function of the exercise of lessons.ep, with rows that say whose they are."""
    comm, p = lesson.comm, lesson.comm.size
    with lesson.asking() as ask:
        for seed, most in (0, 4), (1, 1), (2, 9):
            held = [1 + (seed + r) % 2 for r in range(p)]
            every = [drawn(seed, r, sum(held), most) for r in range(p)]
            ask_exchange(ask, comm, held, every, [rows(r, every[r]) for r in range(p)])


def drawn(seed, rank, experts, most):
    """How many rows a rank has for each expert; some have none."""
    return np.random.default_rng([seed, rank]).integers(0, most, experts) * (rank != seed)


def rows(rank, counts):
    """Rows [rank, expert, which] in the order of their experts."""
    found = [(rank, e, i) for e, n in enumerate(counts) for i in range(n)]
    return np.array(found, float).reshape(-1, 3)


def ask_exchange(ask, comm, held, every, sent):
    r, first = comm.rank, sum(held[:comm.rank])
    own = range(first, first + held[r])
    what = f"experts {held} by rank, rows of rank {r}: {every[r].tolist()}"
    ask("exchange_counts", what)
    came = ep.exchange_counts(every[r], comm, held)
    right = np.array([[counts[e] for e in own] for counts in every])
    ask.right("rows from each rank for each of my experts", np.asarray(came), right)

    ask("dispatch", what)
    x = Tensor(sent[r].copy(), requires_grad=True)
    y, counts = ep.dispatch(x, every[r], right, comm, held)
    expected = np.concatenate([part[part[:, 1] == e] for e in own for part in sent])
    ask.right("rows that came", y.data, expected)
    ask.right("rows of each of my experts", np.asarray(counts), right.sum(0))
    y.backward(2 * y.data + 1)
    ask.right("gradient of the rows", x.grad, 2 * sent[r] + 1)

    ask("combine", what)
    x = Tensor(expected, requires_grad=True)
    y = ep.combine(x, every[r], right, comm, held)
    ask.right("rows that came back", y.data, sent[r])
    y.backward(3 * sent[r] + 2)
    ask.right("gradient of what my experts made", x.grad, 3 * expected + 2)
