"""ONE TRAINING STEP      What does one step compute, and what must it keep until it is done?

  lifts   nothing     this is the load that all later lessons cut, move or recompute
  costs   all three   compute: 6 flops per parameter and token; memory: P + G + O + A; bandwidth
  code    minidist/engine/: tensor, graph, tape, functional, optim; minidist/ledger.py
  before  lessons.walls  (the three walls)                  next  lessons.memory
  run     python -m lessons.step        (one rank is enough: all would do the same)
"""
import time
from copy import deepcopy
from dataclasses import replace

import numpy as np

from lessons import kit
from minidist import cost, ledger, step
from minidist.engine import attention, functional, nn, optim, tensor
from minidist.engine.data import Corpus, default_text
from minidist.engine.gpt import GPT, preset

EXERCISE = [functional.layer_norm, functional.gelu]
ALONE = True
ROWS, LR, BETAS, EPS, DECAY = 6, 1e-3, (0.9, 0.95), 1e-8, 0.1
VIEWS = "reshape", "getitem", "transpose"


def main(lesson):
    model, batch, optimizer = setting()
    c, N = model.config, batch.tokens.size

    lesson.part("Forward writes a tape")
    lesson.say(f"""
        loss = model(batch);  loss.backward();  optimizer.step()    ({N} tokens, {c.layers} blocks)

        The first line computes, and notes how to come back. One whole operation of the engine:""")
    lesson.source(tensor.exp)
    lesson.say("""
        The lambda turns a gradient of y into a gradient of x. As long as it lives, y lives.
        All the operations of one forward (without views), and the bytes they keep for backward:
        """)
    parts = tape_by_part(model, batch)
    lesson.table(["part", "keeps", "operations"], kit.fold(
        [(name, kit.size(sum(kept for _, kept in rows)), listed(rows)) for name, rows in parts]))

    lesson.part("What is kept, operation by operation")
    counted = [kept for name, kept in parts[1][1] if name not in (*VIEWS, "add")]
    block = cost.block_activations(sizes(model))
    lesson.ledger(*((f"{row.operation}: {row.what}", row.formula, row.bytes, kept)
                    for row, kept in zip(block, counted)))
    lesson.say("""
        Bytes of blocks.0, 8 per number. An array is listed where it is first needed: what one
        operation returns is often what the next one keeps. Sums and views keep nothing.""")

    lesson.part("The papers say 34 s b h + 5 a s^2 b per block. Who is right?")
    changes = bridge(model)
    lesson.table(["", "bytes"], [(name, f"{n:+d}") for name, n in changes])
    lesson.ledger(("one block", "the sum of these", sum(n for _, n in changes), sum(counted)))
    lesson.say(f"""
        Both. And attention works in tiles of {attention.TILE} queries: with more than one it skips
        the future, up to half of a s^2.""")

    lesson.part("Four kinds of memory")
    lesson.predict("AdamW: bytes of state per byte of parameters?", 2, "bytes",
                   why="running means of g and of g squared",
                   mistakes={1: "momentum keeps one mean, of g; AdamW one of g squared as well"})
    step.train_step(model, batch, optimizer)                 # the first update makes its state
    events = ledger.over_step(model, batch, optimizer)
    P = 8 * cost.gpt_parameters(sizes(model))
    A = activations(model, batch)
    peak = max((held for _, held in events), key=lambda held: held.activations)
    end = events[-1][1]
    lesson.ledger(("P  parameters", "8 (12 L D^2 + 13 L D + (V+T+2) D)", P, end.parameters),
                  ("G  gradients, after backward", "P", P, end.gradients),
                  ("O  AdamW's state", "2 P", 2 * P, end.optimizer),
                  ("A  activations, after forward", "cost.gpt_activations", A, peak.activations),
                  ("A  activations, after backward", "freed one by one", 0, end.activations))
    lesson.say(f"""
        P, G and O do not ask how much you feed the model. A does: {kit.size(A / N)} per token,
        here {A / P:.1f} P. A is full when backward begins, G when it ends.""")
    lesson.figure(draw, events)

    lesson.part("Why backward takes twice as long as forward")
    lesson.predict("Backward: how many times the flops of forward?", 2, "times",
                   why="y = x W comes back as dy W^T and x^T dy",
                   mistakes={1: "every product comes back as two: one for x, one for W"})
    forward, backward, update = map(kit.duration, lesson.share(timed))
    lesson.say(f"""
        measured (`nano`, float32): forward {forward}, backward {backward}, optimizer {update}
        2 flops per parameter and token forward, 4 backward: 6 P N in all. The optimizer computes
        little, but reads and writes all of P, G and O: it pays in bandwidth.""")

    lesson.part("Is it right?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(stale_gradients)
    lesson.takeaway(
        "A step holds P + G + O whatever you feed it, and A in proportion to what you feed it.",
        field="saved tensors (torch.autograd); model states and residual states (ZeRO)",
        tries=["at which T do the attention weights make up half of A? (screen 2 has the formula)",
               "write layer_norm and gelu: --stub mine.py, then --mine mine.py"])


def prove(lesson):
    """Check what is kept, gradients, accumulation, update: each against something independent."""
    model, batch, optimizer = setting()
    loss = model(batch)
    kept = ledger.held(model, None, loss, batch=batch).activations
    lesson.ledger(("bytes kept for backward", "cost.gpt_activations",
                   activations(model, batch), kept))
    loss.backward()
    whole = gradients(model)
    lesson.check("every gradient, against the slope of the loss", slopes(model, batch, whole), 1e-6)
    model.zero_grad()
    step.accumulate(model, batch.split(3))
    lesson.check("three micro-batches, against one batch", apart(gradients(model), whole), 1e-12)

    weight, moments = model.parameters()[0], (0, 0)
    for t in (1, 2):
        before = weight.data.copy()
        fresh = deepcopy(model)
        for p in fresh.parameters():
            p.grad = None
        step.train_step(model, batch, optimizer)
        update, moments = adamw(before, weight.grad, moments, t)
        lesson.check(f"AdamW, update {t}, against its formula",
                     kit.difference(weight.data - before, update), 1e-9)
    fresh(batch).backward()
    lesson.check("update 2 sees the gradients of step 2 alone",
                 apart({name: g * batch.count for name, g in gradients(model).items()},
                       gradients(fresh)), 1e-12)


# ---- breaks

@kit.breaks(nn.Module, "zero_grad")
def stale_gradients(module):
    """zero_grad() does nothing: every step adds its gradients to those of all steps before.

    The classic bug of hand-written training loops. The loss falls all the same, since AdamW hardly
    looks at the size of a gradient; it follows directions that are several steps old."""


@kit.breaks(functional, "gelu")
def greedy_gelu(x):
    """gelu keeps its input beside its derivative, as one written from single operations would.

    Every number is right; only the memory is not: 4 N D more per block, a fifth of all A."""
    y, kept = greedy_gelu.original(x), x.data
    if y.node is None:                                     # under no_grad nothing is kept
        return y
    right = y.node.vjp

    def vjp(g):
        return [part.reshape(kept.shape) for part in right(g)]

    return tensor.Tensor(y.data, (x,), vjp)


@kit.breaks(optim.AdamW, "update")
def no_bias_correction(self, p, scale):
    """AdamW takes its running means as they are, though both start at zero.

    The first update is (1 - 0.9) / sqrt(1 - 0.95) = 0.45 of what it should be, and the next ones
    are too large: warm-up hides it."""
    rate = self.rate
    self.rate *= (1 - self.betas[0] ** self.t) / np.sqrt(1 - self.betas[1] ** self.t)
    no_bias_correction.original(self, p, scale)
    self.rate = rate


# ---- what the screens above count

def setting():
    """A small GPT on real text, in float64, and a batch of which some targets do not count.

    Nothing in it is exactly 0 or 1: a forgotten bias, or factor, must make a difference."""
    corpus = Corpus(default_text()[:20000], 16)
    model = GPT(preset("lesson", corpus.vocab), dtype=np.float64)
    for p in model.parameters():
        p.data += nn.init(p.name + ".off", p.shape, std=0.05, dtype=np.float64)
    batch = corpus.batch(ROWS, seed=0, step=0)
    batch = replace(batch, targets=batch.targets.copy())
    batch.targets[0, :8] = functional.IGNORE
    return model, batch, optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY)


def tape_by_part(model, batch):
    """Run the parts one by one.  -> [(part, [(operation, bytes it keeps)])]"""
    x, ends = None, [0]
    for part in model.parts.values():
        x = part(x, batch)
        ends.append(len(ledger.nodes(x)))
    rows = ledger.by_operation(x, exclude=ledger.known(model, batch))
    return [(name, rows[i:j]) for name, i, j in zip(model.parts, ends, ends[1:])]


def listed(rows):
    """Name the operations in order, but for views."""
    return " ".join(name.removeprefix("scaled_dot_product_") for name, _ in rows
                    if name not in VIEWS)


def sizes(model):
    return cost.Sizes.of(model.config, B=ROWS, w=8, tile=attention.TILE)


def activations(model, batch):
    return cost.gpt_activations(sizes(model), batch.count)


def bridge(model):
    """From the textbook's bytes per block to ours, one difference at a time."""
    s = sizes(model)
    N, D, pairs = s.N, s.D, s.N * s.H * s.T
    return [("34 s b h + 5 a s^2 b    (s = T, b = rows, h = D, a = heads; 2 bytes per number)",
             cost.textbook_activations(s)),
            ("no dropout: neither masks of one byte, nor a second copy of the attention weights",
             -2 * N * D - 3 * pairs),
            ("float64: 8 bytes per number instead of 2", 3 * (32 * N * D + 2 * pairs)),
            ("each layer_norm keeps 1/deviation of its rows", 2 * 8 * N)]


def draw(figure, events):
    axes = figure.subplots()
    phases, held = zip(*events)
    params, grads, state, kept = np.array(held).T / 1e6
    axes.stackplot(range(len(held)), params, state, grads, kept, step="post", labels=[
        "P  parameters", "O  optimizer state", "G  gradients", "A  activations"])
    axes.axvline(phases.index("backward"), color="black", linewidth=0.8)
    for phase in ("forward", "backward"):
        axes.annotate(" " + phase, (phases.index(phase), 0.96), xycoords=("data", "axes fraction"))
    axes.set(xlabel="one event: a part of the model has run, or one more gradient is complete",
             ylabel="MB held", title="What one training step holds, counted from its arrays",
             xlim=(0, len(held) - 1), ylim=(0, 1.12 * (params + state + grads + kept).max()))
    axes.legend()


def timed():
    """Median seconds of forward, backward and update: the `nano` preset, float32, on rank 0."""
    corpus = Corpus(default_text()[:20000], 64)
    model = GPT(preset("nano", corpus.vocab))
    optimizer, batch, laps = optim.AdamW(model.parameters(), LR), corpus.batch(12, 0, 0), []
    for _ in range(7):
        model.zero_grad()
        clock = [time.perf_counter()]
        loss = model(batch)
        for act in (loss.backward, lambda: optimizer.step(1 / batch.count), lambda: None):
            clock.append(time.perf_counter())
            act()
        laps.append(np.diff(clock))
    return np.median(laps, axis=0).tolist()


# ---- references

def gradients(model):
    return {p.name: p.grad.copy() for p in model.parameters()}


def apart(grads, reference):
    return max(kit.difference(g, reference[name]) for name, g in grads.items())


def slopes(model, batch, grads, e=1e-5):
    """Move each parameter along a random u: does the loss change by g . u?  -> worst error"""
    rng, worst = np.random.default_rng(0), 0.0
    for p in model.parameters():
        u, at, ends = rng.standard_normal(p.shape), p.data.copy(), []
        with tensor.no_grad():
            for sign in (1, -1):
                p.data[...] = at + sign * e * u
                ends.append(model(batch).item())
        p.data[...] = at
        gap = abs((ends[0] - ends[1]) / (2 * e) - np.vdot(grads[p.name], u))
        worst = max(worst, gap / (np.linalg.norm(grads[p.name]) * np.linalg.norm(u)))
    return worst


def adamw(w, g, moments, t):
    """The update of w as the paper writes it.  -> update, (m, v)"""
    m = BETAS[0] * moments[0] + (1 - BETAS[0]) * g
    v = BETAS[1] * moments[1] + (1 - BETAS[1]) * g * g
    m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
    return -LR * (m_hat / (np.sqrt(v_hat) + EPS) + DECAY * w), (m, v)


if __name__ == "__main__":
    kit.run(main)
