"""What each function of an exercise is asked where ranks meet gradients: dp, tp, sp.

Every rank knows what all ranks hold, so the right answers need no message; softmax and products are
textbook NumPy. Gradients that come in differ from rank to rank, are not 1, and must stay as they
are; so must inputs. What is kept for backward and what is sent is counted too.
"""
from types import SimpleNamespace

import numpy as np

from lessons import setting
from lessons.questions_arrays import moved, numbers
from minidist import buckets, dp, mappings, placement, sp, tp
from minidist.engine import functional, nn
from minidist.engine.data import Batch
from minidist.engine.tensor import Tensor, graph_bytes
from minidist.mesh import DeviceMesh


# ---- lessons.dp

DEALS = (([40, 40, 300, 10, 90, 5], None, 100, 50, [[0, 1], [2], [3, 4], [5]]),
         ([50, 100, 100], None, 100, 50, [[0], [1], [2]]),                # exactly at the limit
         ([49, 1, 99, 1], None, 100, 50, [[0, 1], [2, 3]]),
         ([60, 60, 60], None, 100, 200, [[0, 1], [2]]),                   # first is the larger
         ([30, 30, 30, 30, 90, 60], "abaabb", 70, 50, [[0, 2], [1, 4], [3], [5]]),
         ([10, 500, 10, 10, 10], "ababa", 100, 15, [[0, 2], [1], [3], [4]]),
         ([], None, 100, 50, []))


def of_dp(lesson):
    with lesson.asking() as ask:
        rows_of_each(lesson, ask)
        equal_starts(lesson, ask)
        for sizes, kinds, cap, first, right in DEALS:
            ask("assign", f"sizes {sizes}, kinds {kinds}, cap {cap}, first {first}")
            found = buckets.assign(sizes, kinds and list(kinds), cap, first)
            ask.right("buckets", [list(map(int, bucket)) for bucket in found], right)
        finished(lesson, ask)


def rows_of_each(lesson, ask):
    """Every row on one rank, as evenly as possible, with all that belongs to it."""
    p = lesson.comm.size
    for rows in 2 * p + 1, p, 1:
        model = SimpleNamespace(localizers=[lambda batch: batch])
        tokens = np.arange(6 * rows).reshape(rows, 6)
        ask("share_rows", f"a batch of {rows} rows on {p} ranks")
        dp.share_rows(model, lesson.comm)
        ask.right("localizers: what was there, and one more", len(model.localizers), 2)
        mine = model.localizers[-1](Batch.of(tokens, -tokens, step=3))
        for name, found, sign in ("tokens", mine.tokens, 1), ("targets", mine.targets, -1):
            ask.right(f"{name} of my rows", found, sign * tokens[mine.rows])
        everyone = lesson.collect(mine.rows.tolist())
        ask.right("rows of all ranks", sorted(sum(everyone, [])), list(range(rows)))
        ask.right("the most rows", max(map(len, everyone)), -(-rows // p))
        ask.right("step", mine.step, 3)
    ask("share_rows", "a batch without targets")
    ask.right("tokens", model.localizers[-1](Batch.of(tokens)).tokens, tokens)


def equal_starts(lesson, ask):
    """Rank 0's values on all ranks, in place, each sent once."""
    p, r = lesson.comm.size, lesson.comm.rank
    params = [nn.Parameter(x[r].copy(), name) for name, x in zip("abc", start_values(p))]
    params[2].requires_grad = False
    held = [param.data for param in params]
    ask("start_equal", "a float64 matrix, a float32 vector and a frozen parameter")
    with lesson.comm.recording() as events:
        dp.start_equal(SimpleNamespace(parameters=lambda: params), lesson.comm)
    for param, array, right in zip(params, held, start_values(p)):
        ask.right(f"{param.name}, from rank 0", param.data, right[0])
        ask.right(f"{param.name}, written in place", array, right[0])
    sent = sum(n for _, n in [moved(events)[0]])
    ask.right("bytes sent by all ranks", sum(lesson.collect(sent)),
              (p - 1) * sum(array.nbytes for array in held))


def start_values(p):
    return (numbers(p, (3, 4), np.float64, 1), numbers(p, 5, np.float32, 2),
            numbers(p, (2, 2), np.float64, 3))


def finished(lesson, ask):
    """Gradients to be summed over an axis, or not; that all ranks have, rank 0, or nobody."""
    comm, p, r = lesson.comm, lesson.comm.size, lesson.comm.rank
    for axis, other in ("dp", "tp"), ("tp", "dp"), ("pp", "dp"):
        mesh, xs = DeviceMesh(comm, **{axis: p}), numbers(p, (2, 3), np.float64)
        flat, total, first = placement.Flat((2, 3), mesh[axis]), sum(xs), None if r else xs[0]
        cases = {"of everybody": (xs[r], {axis}, total), "of rank 0": (first, {axis}, xs[0]),
                 "of nobody": (None, {axis}, None), "complete": (xs[r], set(), xs[r]),
                 "partial over another axis": (xs[r], {other}, xs[r]),
                 "cut": (xs[r], {axis}, flat.pad(total)[r]), "tied": (first, {axis}, xs[0])}
        params = [with_gradient(*case[:2], name) for name, case in cases.items()]
        params[5].sliced[axis] = flat
        params[6].placements[axis] = placement.Held(tuple(range(p)), mesh[axis])
        ask("finalize", f"gradients {', '.join(cases)}; {axis}={p}, count 10")
        with comm.recording() as events:
            placement.finalize(params, mesh, 10)
        for param, (_, _, right) in zip(params, cases.values()):
            ask.right(f"gradient {param.name}", param.grad, right if right is None else right / 10,
                      1e-15)
        group = setting.group(p, r)
        sums = 3 * group.all_reduce(6, 8).bytes + group.reduce_scatter([flat.size] * p, 8).bytes
        flags = group.all_reduce(3, 4).bytes + 2 * group.all_reduce(1, 4).bytes
        sent, needed = np.sum(lesson.collect([moved(events)[0][1], sums + flags]), axis=0)
        ask.right("bytes beyond four sums and five flags", max(0, sent - needed), 0)
    if p == 4:
        on_a_square(lesson, ask)


def with_gradient(grad, partial, name):
    param = nn.Parameter(np.zeros((2, 3)), name)
    param.grad = None if grad is None else grad.copy()
    param.partial.update(partial)
    return param


def on_a_square(lesson, ask):
    """Sums over rows, columns and all of dp=2 x tp=2."""
    mesh, xs, r = DeviceMesh(lesson.comm, dp=2, tp=2), numbers(4, (2, 3), float), lesson.comm.rank
    over = {("dp",): [r, r ^ 2], ("tp",): [r, r ^ 1], ("dp", "tp"): range(4)}
    params = [with_gradient(xs[r], axes, " and ".join(axes)) for axes in over]
    ask("finalize", "gradients over dp, tp, and both; dp=2, tp=2, count 10")
    placement.finalize(params, mesh, 10)
    for param, ranks in zip(params, over.values()):
        ask.right(f"gradient over {param.name}", param.grad, sum(xs[i] for i in ranks) / 10, 1e-15)


# ---- lessons.tp

def of_tp(lesson):
    r, p = lesson.comm.rank, lesson.comm.size
    with lesson.asking() as ask:
        for kind in np.float64, np.float32:
            xs, gs = numbers(p, (2, 3), kind), numbers(p, (2, 3), kind, 1)
            ask("copy_to", f"[2, 3] {xs[0].dtype}")
            between(lesson, ask, mappings.copy_to, xs[0], gs[r], xs[0], sum(gs), (0, 1))
            ask("reduce_from", f"[2, 3] {xs[0].dtype}")
            between(lesson, ask, mappings.reduce_from, xs[r], gs[r], sum(xs), gs[r], (1, 0))
        for words, kind, given in ([2] * p, np.float64, False), ([3, 0, 1, 2][:p], float, True), (
                [1, 4, 2, 2][:p], np.float32, True):
            loss(lesson, ask, words, np.dtype(kind), given)


def between(lesson, ask, function, given, g, right, gradient, calls, *where, bound=0.0):
    """Ask an operation between ranks for its value, its gradient, and its calls each way."""
    x, seed = Tensor(given.copy(), requires_grad=True), g.copy()
    with lesson.comm.counting() as forward:
        y = function(x, lesson.comm, *where)
    ask.right("y", y.data, right, bound)
    with lesson.comm.counting() as backward:
        y.backward(seed)
    ask.right("gradient of x", x.grad, gradient, bound)
    ask.right("x, which stays as it was", x.data, given)
    ask.right("g, which is not yours to change", seed, g)
    if lesson.comm.size > 1:
        ask.right("collectives called forward, backward", (forward.calls, backward.calls), calls)


def loss(lesson, ask, words, kind, given):
    """Cross entropy over pieces of a vocabulary, of large logits; some targets do not count."""
    comm, r, rng = lesson.comm, lesson.comm.rank, np.random.default_rng(0)
    full = (1000 + 4 * rng.standard_normal((2, 4, sum(words)))).astype(kind)
    targets = rng.integers(0, sum(words), (2, 4))
    targets[0, 1], targets[1, 2:] = functional.IGNORE, functional.IGNORE
    full[1, 2] = np.nan
    piece = np.split(full, np.cumsum(words)[:-1], -1)[r]
    logits = Tensor(piece.copy(), requires_grad=True)
    ask("vocab_parallel_cross_entropy", f"{kind} logits of {words} words by rank"
        + ("" if given else ", sizes not given"))
    with comm.counting() as forward:
        y = tp.vocab_parallel_cross_entropy(logits, targets, comm, *[words] * given)
    right, gradient = cross_entropy(full.astype(float), targets)
    bound = 1e-4 if kind == np.float32 else 1e-12
    ask.right("loss", y.item(), right, bound)
    ask.right("bytes kept beyond one array like the logits, targets and flags",
              max(0, graph_bytes(y, exclude=[targets]) - piece.nbytes - 4 * targets.nbytes), 0)
    with comm.counting() as backward:
        y.backward(np.full((), 3, y.dtype))
    ask.right("gradient, for g = 3", logits.grad,
              3 * np.split(gradient, np.cumsum(words)[:-1], -1)[r].astype(kind), bound)
    ask.right("logits, which stay as they were", np.nan_to_num(logits.data), np.nan_to_num(piece))
    if comm.size > 1:
        ask.right("collectives called forward, backward", (forward.calls, backward.calls), (3, 0))


def cross_entropy(logits, targets):
    """Sum -log softmax at the targets that count, one by one.  -> loss, gradient"""
    total, gradient = 0.0, np.zeros_like(logits)
    for at in zip(*np.nonzero(targets != functional.IGNORE)):
        e = np.exp(logits[at] - logits[at].max())
        total -= np.log(e[targets[at]] / e.sum())
        gradient[at] = e / e.sum()
        gradient[at][targets[at]] -= 1
    return total, gradient


# ---- lessons.sp

def of_sp(lesson):
    p = lesson.comm.size
    with lesson.asking() as ask:
        for dim, kind, sizes in (0, np.float64, ()), (1, np.float32, ()), (
                1, np.float64, ([3, 1, 0, 2][:p],)):
            gather_and_scatter(lesson, ask, dim, kind, sizes)
        for kind, bias in (np.float64, True), (np.float32, False):
            linear(lesson, ask, kind, bias)


def gather_and_scatter(lesson, ask, dim, kind, sizes):
    """Each is the other's gradient.  sizes: () if they are not given"""
    p, r, what = lesson.comm.size, lesson.comm.rank, f"dim {dim}, {np.dtype(kind)}, sizes "
    lengths = sizes[0] if sizes else [2] * p
    xs, gs = (numbers(p, shape(dim, sum(lengths)), kind, seed) for seed in (0, 1))
    ask("all_gather", what + str(sizes and lengths or f"not given, {lengths}"))
    between(lesson, ask, mappings.all_gather, pieces(xs[0], lengths, dim)[r], gs[r],
            xs[0], pieces(sum(gs), lengths, dim)[r], (1, 1), dim, *sizes)
    lengths = sizes[0] if sizes else [len(x) for x in np.array_split(np.arange(3 * p + 1), p)]
    xs, gs = (numbers(p, shape(dim, sum(lengths)), kind, seed) for seed in (0, 1))
    ask("reduce_scatter", what + str(sizes and lengths or f"not given, {lengths}"))
    between(lesson, ask, mappings.reduce_scatter, xs[r], pieces(gs[0], lengths, dim)[r],
            pieces(sum(xs), lengths, dim)[r], gs[0], (1, 1), dim, *sizes)


def shape(dim, n):
    return (n, 3) if dim == 0 else (3, n)


def pieces(x, lengths, dim):
    return np.split(x, np.cumsum(lengths)[:-1], dim)


def linear(lesson, ask, kind, bias):
    """Products with textbook NumPy.  w changes before backward, as it does under ZeRO-3"""
    comm, p, r = lesson.comm, lesson.comm.size, lesson.comm.rank
    x_full, weight, row = (numbers(1, size, kind)[0] for size in ((2, 3 * p, 4), (5, 4), 5))
    gs = numbers(p, (2, 3 * p, 5), kind, 1)
    x, w, b = (Tensor(a.copy(), requires_grad=True)
               for a in (np.split(x_full, p, 1)[r], weight, row))
    ask("all_gather_linear", f"[2, 3, 4] {x.dtype}, b {'given' if bias else 'None'}")
    with comm.counting() as forward:
        y = sp.all_gather_linear(x, w, b if bias else None, comm)
    ask.right("y", y.data, x_full @ weight.T + row * kind(bias))
    ask.right("bytes kept", graph_bytes(y, exclude=[w, b]), x.data.nbytes)
    w.data = w.data * 2
    with comm.counting() as backward:
        y.backward(gs[r].copy())
    ask.right("gradient of x, of the w.data of that moment", x.grad,
              np.split(sum(gs) @ (weight * 2), p, 1)[r])
    ask.right("gradient of w", w.grad, np.einsum("btf,btd->fd", gs[r], x_full))
    ask.right("gradient of b", b.grad, gs[r].sum((0, 1)) if bias else None)
    if p > 1:
        ask.right("collectives called forward, backward", (forward.calls, backward.calls), (1, 2))
