"""What the lesson on mixed precision counts: lost numbers, small steps, the scale over a run."""
from functools import partial

import numpy as np

from lessons import setting
from minidist import ledger, parallel, precision, verify
from minidist.engine import functional, nn, optim
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh
from minidist.placement import Shard, join
from minidist.precision import LossScale
from minidist.step import train_step

FORMS = "fp16", "bf16"
ROWS = 4
HALF = 2.0 ** -11                                           # half a step of fp16 at 1


# ---- what is lost

def losses():
    """Rows of the table of three losses."""
    def each(compute):
        found = [float(compute(lambda x, form=form: narrow(x, form))) for form in (*FORMS, None)]
        return [f"{x:.5g}" for x in found]

    return [["a gradient of 1e-8", *each(lambda to: to(1e-8))],
            ["10,000 ones, one by one", *each(ones)],
            ["300 x 300", *each(lambda to: to(to(300) * to(300)))]]


def narrow(x, form):
    """Round one number."""
    with np.errstate(over="ignore"):
        x = np.array(x, np.float32)
        return np.float32(precision.rounded(x, form) if form else x)


def ones(to, count=10_000):
    """Add ones one by one, and round each sum; it stays where one addition changes nothing."""
    total = np.float32(0)
    for _ in range(count):
        before, total = total, to(total + 1)
        if total == before:
            break
    return total


def gradients(tokens=2 ** 20):
    """What comes back to the embeddings, if the loss is a mean over so many tokens; in float32."""
    model, seen = small(np.float32), []

    def watch(forward, *args):
        y = forward(*args)
        return Tensor(y.data, (y,), lambda g: seen.append(g / tokens) or (g,))
    model.parts["embed"].wrap(watch)
    model(setting.words(ROWS)).backward()
    return seen[0][seen[0] != 0]


def vanished():
    """Count the gradients that fp16 turns to zero.  -> [(log2 S, share)]"""
    g = gradients()
    return [(bits, float(np.mean((g * 2.0 ** bits).astype(np.float16) == 0)))
            for bits in (0, 8)]


def draw(figure):
    """Show how large gradients are, and where fp16 ends."""
    g, axes = np.abs(gradients()), figure.subplots()
    for bits in 0, 8:
        axes.hist(np.log2(g * 2.0 ** bits), bins=80, alpha=0.6, label=f"S = 2^{bits}")
    for edge in -24, -14, 16:                               # smallest, smallest normal, largest
        axes.axvline(edge, color="black", linestyle=":")
    axes.set(xlabel="log2 of |gradient|; dotted: fp16's smallest, smallest normal, largest",
             yticks=[], title="a loss scale moves gradients into fp16's range")
    axes.legend()


# ---- masters

def steady(step, dtype=np.float16, form="fp16"):
    """One parameter at 1, and an optimizer that adds `step` to it each time.  -> p, optimizer"""
    p = nn.Parameter(np.ones(1, dtype), "w")
    optimizer = precision.attach(optim.SGD([p], lr=1.0), form)
    p.grad = np.full(1, -step, dtype)
    return p, optimizer


def by_small_steps(shown, step=2.0 ** -14):
    """Rows: after some steps, what master, copy and a parameter without a master have gained."""
    (p, optimizer), alone, rows = steady(step), np.float16(1), []
    for i in range(1, max(shown) + 1):
        optimizer.step()
        alone += np.float16(step)
        if i in shown:
            gains = optimizer.masters["w"][0] - 1, p.data[0] - 1, alone - 1
            rows.append([i, *(f"{float(x) * 2 ** 14:.0f} x 2^-14" if x else "0" for x in gains)])
    return rows


def small_updates():
    """Sixteen updates of 7/8 of half a step.  -> how far the copy is from 1 + 7 steps"""
    p, optimizer = steady(7 / 8 * HALF)
    for _ in range(16):
        optimizer.step()
    return abs(float(p.data[0]) - (1 + 7 * 2 * HALF))


# ---- the scale

def small(dtype=np.float64, layers=1):
    return setting.model(layers=layers, dtype=dtype)


def scales(steps=26):
    """Train in fp16 with a short window.  -> [(log2 S, was the step skipped?)]"""
    model = precision.use(small(np.float32), "fp16")
    optimizer = precision.attach(setting.ADAMW(model.parameters()), "fp16",
                                 LossScale(2.0 ** 15, window=4))
    found = [train_step(model, setting.words(2, t), optimizer) for t in range(steps)]
    return [(int(np.log2(step.scale)), bool(step.skipped)) for step in found]


def long_loss(tokens=20_000):
    """The loss of many tokens with equal logits.  -> relative error"""
    logits = Tensor(np.zeros((1, tokens, setting.VOCAB), np.float16))
    with np.errstate(over="ignore"):
        loss = precision.wide_loss(lambda *args: functional.cross_entropy(*args)[0], logits,
                                   np.zeros((1, tokens), int))
    return abs(float(loss.data) / (tokens * np.log(setting.VOCAB)) - 1)


# ---- on ranks

def spread(mesh, dtype, make=setting.ADAMW):
    """A small GPT in fp16 over dp or tp.  -> model, optimizer"""
    model = parallel.spread(small(dtype), mesh, precision="fp16")
    optimizer = parallel.equip(make(model.parameters()), model)
    optimizer.loss_scale = LossScale(8.0, window=2)
    return model, optimizer


def skip(comm):
    """Put an infinity into the gradient of a piece that the last rank of tp alone holds.

    -> how far anything has moved"""
    mesh = setting.mesh(comm, "tp")
    model, optimizer = spread(mesh, np.float32)
    params, at = model.parameters(), [0]

    def plant(p):
        if at[0] == 1 and comm.rank == comm.size - 1:
            p.grad[...] = np.inf
    model.blocks[0].mlp.fc1.weight.hooks.insert(0, plant)

    def held():
        return [x.copy() for p in params for x in (p.data, *optimizer.kept(p))]

    states = []
    for at[0] in range(2):
        train_step(model, setting.words(ROWS, at[0]), optimizer, mesh)
        states.append(held())
    moved = max(float(np.abs(a - b).max()) for a, b in zip(*states, strict=True))
    return moved + abs(optimizer.t - 1)


def apart(lesson):
    """Gradients of real fp16 on the ranks and in one process.  -> relative difference"""
    def after(mesh):
        model, optimizer = spread(mesh, np.float32, make=setting.SGD)
        train_step(model, setting.words(ROWS, ragged=True), optimizer, mesh)
        return [np.float64(join(p, p.grad)) for p in model.parameters()]

    ours = after(setting.mesh(lesson.comm, "dp"))
    alone = after(DeviceMesh(lesson.comm.split(lesson.comm.rank, name="alone")))
    largest = max(np.abs(g).max() for g in alone)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, alone)) / largest


def counted(lesson):
    """Take a step, then a backward.  -> bytes held, bytes of it that all ranks send, parameters"""
    mesh = setting.mesh(lesson.comm, "dp")
    model, optimizer = spread(mesh, np.float32)
    train_step(model, setting.words(ROWS), optimizer, mesh)
    held = ledger.held(model, optimizer)
    model.zero_grad()
    if mesh["dp"].size > 1:
        model.algorithm = "ring"                            # whose bytes the formula counts
    with lesson.comm.counting() as sent:
        model(model.localize(setting.words(ROWS, 1))).backward()
    return held, sum(lesson.collect(sent.bytes)), len(model.parameters())


def same(mesh, steps=3):
    """Train in float64, with rounded parameters, masters and S.  -> Verdict"""
    model, ours = spread(mesh, np.float64)
    twin = verify.Twin(lambda: precision.use(small(), "fp16"), with_scale, mesh)
    for t in range(steps):
        batch = setting.words(ROWS, t, ragged=True)
        twin.check(train_step(model, batch, ours, mesh, max_norm=0.5), model, ours, batch, 0.5)
    return twin.verdict


def with_scale(params):
    return precision.attach(setting.ADAMW(params), "fp16", LossScale(8.0, window=2))


# ---- the functions of the exercise, asked one by one

# A float32 as its upper and its lower 16 bits -> the bfloat16
BITS = [(0x3F80, 0x0000, 0x3F80), (0x3F80, 0x7FFF, 0x3F80), (0x3F80, 0x8000, 0x3F80),
        (0x3F80, 0x8001, 0x3F81), (0x3F81, 0x7FFF, 0x3F81), (0x3F81, 0x8000, 0x3F82),
        (0xBF81, 0x8000, 0xBF82), (0x3FFF, 0x8000, 0x4000), (0x0000, 0x8001, 0x0001),
        (0x0001, 0x8000, 0x0002), (0x7F7F, 0x8000, 0x7F80), (0xFF7F, 0xFFFF, 0xFF80),
        (0x7F80, 0x0000, 0x7F80), (0xFF80, 0x0000, 0xFF80), (0x8000, 0x0000, 0x8000)]

# What happens, then the value, the clean steps and what is left of the hysteresis, from 16, 0, 2
TABLE = [("clean", 16, 1, 2), ("overflow", 16, 0, 1), ("clean", 16, 1, 1), ("overflow", 8, 0, 0),
         ("overflow", 4, 0, -1), ("clean", 4, 1, -1), ("clean", 4, 2, -1), ("clean", 8, 0, 2),
         ("overflow", 8, 0, 1), ("clean", 8, 1, 1), ("clean", 8, 2, 1), ("clean", 16, 0, 2),
         ("overflow", 16, 0, 1), ("overflow", 8, 0, 0), ("overflow", 4, 0, -1),
         ("overflow", 2, 0, -2), ("overflow", 2, 0, -3)]


def ask(lesson):
    with lesson.asking() as asking:
        ask_rounding(asking)
        ask_scale(asking)
        ask_update(asking, lesson.comm)


def ask_rounding(ask):
    upper, lower, expected = np.array(BITS, np.uint32).T
    for part in slice(0, 7), slice(7, 15), slice(None, None, 2):
        x = (upper[part] << 16 | lower[part]).view(np.float32)
        ask("to_bfloat16", f"{x.size} numbers, {x[0]:.9g} first")
        found = precision.to_bfloat16(x.copy())
        ask.right("dtype", str(found.dtype), "float32")
        ask.right("bits", np.asarray(found).view(np.uint32) >> 16, expected[part])
        ask.right("lower bits", np.asarray(found).view(np.uint32) & 0xFFFF, 0 * expected[part])
    for bits in 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF:
        ask("to_bfloat16", f"a NaN of bits {bits:x}")
        found = precision.to_bfloat16(np.array([[bits]], np.uint32).view(np.float32))
        ask.right("is it NaN?", np.isnan(found), np.array([[True]]))
    x = np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3)
    ask("to_bfloat16", "a transposed array")
    ask.right("y", precision.to_bfloat16(x.T), np.float32([
        [-3, 0.6015625], [-1.796875, 1.796875], [-0.6015625, 3]]))


def ask_scale(ask):
    scale, events = LossScale(16.0, window=3, minimum=2.0), []
    for event, *expected in TABLE:
        events.append(event)
        ask("moved", f"{', '.join(events[-3:])} (event {len(events)})")
        scale = precision.moved(scale, event == "overflow")
        ask.right("value, clean, left", [scale.value, scale.clean, scale.left], expected)
        scale = LossScale(16.0, 3, 2, 2.0)._replace(value=float(expected[0]), clean=expected[1],
                                                    left=expected[2])


# S, window, sums of gradients, targets, max_norm -> norm of the mean, what is subtracted, S after
UPDATES = [(1024.0, 9, [3, 4], 1, 10, 5, [3, 4], 1024),
           (1024.0, 9, [3, 4], 1, 1, 5, [0.6, 0.8], 1024),
           (4.0, 1, [6, 8], 2, None, 5, [3, 4], 8),
           (256.0, 9, [2.0 ** -20, 0], 64, None, 2.0 ** -26, [2.0 ** -26, 0], 256)]


def ask_update(ask, comm):
    """Each rank has its share of the sum; the last one, at the end, an infinity or a NaN."""
    mesh, last = setting.mesh(comm, "dp"), comm.rank == comm.size - 1
    for S, window, total, count, max_norm, norm, moves, after in UPDATES:
        p, optimizer = waiting(LossScale(S, window), np.array(total) * S / comm.size)
        ask("update", f"sums {total} times S = {S:g}, {count} targets, max_norm {max_norm}")
        found = precision.update(optimizer, [p], mesh, count, max_norm)
        ask.right("norm", found, float(norm), 1e-3)
        ask.right("masters", optimizer.masters["w"], -np.float32(moves), 1e-3)
        ask.right("S, t", [optimizer.loss_scale.value, optimizer.t], [after, 1])
    for bad, pieces in (np.inf, False), (np.nan, False), (np.inf, True):
        p, optimizer = waiting(LossScale(8.0, left=1), np.array([bad if last else 1, 1]))
        if pieces:
            p.partial, p.placements["dp"] = set(), shard(mesh["dp"])
        ask("update", f"{bad} on the last rank, which {'alone' * pieces or 'with others'} holds it")
        found = precision.update(optimizer, [p], mesh, 1, 1.0)
        ask.right("is the norm infinite?", bool(found == np.inf), True)
        ask.right("masters", optimizer.masters["w"], np.zeros(2, np.float32))
        ask.right("S, t", [optimizer.loss_scale.value, optimizer.t], [4, 0])
    ask("update", "an infinity at S = 1, its minimum")
    p, optimizer = waiting(LossScale(1.0, left=1), np.array([np.inf if last else 1, 1]))
    ask.right("error", raised(partial(precision.update, optimizer, [p], mesh, 1, 1.0)),
              "FloatingPointError")


def waiting(scale, gradient):
    """A parameter that waits for its update.  -> p, optimizer"""
    p = nn.Parameter(np.zeros(2, np.float16), "w")
    p.partial = {"dp"}
    optimizer = precision.attach(optim.SGD([p], lr=1.0), "fp16", scale)
    p.grad = gradient.astype(np.float16)
    return p, optimizer


def shard(comm):
    """Say that each rank holds two numbers of 2 p."""
    return Shard(0, np.split(np.arange(2 * comm.size), comm.size), comm)


def raised(call):
    """Name the error that a call raises."""
    try:
        call()
    except FloatingPointError as error:
        return type(error).__name__
    return "none"
