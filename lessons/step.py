"""ONE TRAINING STEP      What does one step compute, and what must it keep until it is done?

  lifts   nothing     this is the load that all later lessons cut, move or recompute
  costs   all three   compute: 6 flops per parameter and token; memory: P + G + O + A; bandwidth
  code    minidist/engine/: tensor, graph, tape, functional, optim; minidist/ledger.py
  run     python -m lessons.step        (one rank is enough: all would do the same)
"""
from copy import deepcopy
from dataclasses import replace

import numpy as np

from lessons import clock, counted, kit, pictures, questions, setting
from lessons.textbook import adamw, apart, gradients, slopes
from minidist import cost, ledger, step
from minidist.engine import functional, nn, optim, tensor
from minidist.engine.gpt import GPT, preset

EXERCISE = [functional.layer_norm, functional.gelu]
POINTS = {"layer_norm": 2}
ALONE = True
ROWS, RATES = 6, (1e-3, (0.9, 0.95), 1e-8, 0.1)           # lr, betas, eps, decay
VIEWS = "reshape", "getitem", "transpose"
ACTIVATIONS = "8 N (L (16 D+2+H T) + 2 D+2+V) + 8 (2 n+T)"


def forward_writes_a_tape(lesson):
    """Forward writes a tape

    loss = model(batch);  loss.backward();  optimizer.step()
    The first line computes, and notes how to come back. One whole operation of the engine:"""
    lesson.source(tensor.exp)
    lesson.say("The lambda turns a gradient of y into one of x. As long as it lives, y lives.")
    lesson.predict("A token is 48 numbers wide. How many per token does one block keep?", 962,
                   "numbers", why="see screen 2",
                   mistakes={48: "that is x alone; every operation keeps what backward needs"})
    lesson.table(["part", "keeps", "operations, without views"], kit.fold(
        [(name, kit.size(sum(kept for _, kept in rows)),
          " ".join(operation for operation, _ in rows if operation not in VIEWS))
         for name, rows in tape_by_part(*trained()[:2])]))


def what_is_kept(lesson):
    """What is kept, operation by operation

    N = B T tokens of width D, H heads, K e numbers in a token's keys; 8 bytes each. What one
    operation returns is often what the next one keeps: it is listed once."""
    model, batch, _ = trained()
    kept = [n for name, n in tape_by_part(model, batch)[1][1] if name not in (*VIEWS, "add")]
    s = cost.Sizes.of(model.config, B=ROWS, w=8)
    rows = {}
    for row, n in zip(cost.block_activations(s), kept):
        name = f"{row.operation}: {row.what}", row.formula.replace("Ke", "K e")
        rows.setdefault(name, []).append((row.bytes, n))
    lesson.ledger(*((name, f"{8 * len(both)} ({formula})", *map(sum, zip(*both)))
                    for (name, formula), both in rows.items()), **setting.letters(s))
    lesson.say("The papers say 34 s b h + 5 a s^2 b per block. Who is right? Both:")
    pairs = s.N * s.H * s.T
    bridge = [("34 s b h + 5 a s^2 b  (s = T, b = B, h = D, a = H; 2 bytes per number)",
               cost.textbook_activations(s)),
              ("no dropout: no masks of one byte, no second copy of the attention weights",
               -2 * s.N * s.D - 3 * pairs),
              ("float64: 8 bytes per number instead of 2", 3 * (32 * s.N * s.D + 2 * pairs)),
              ("each layer_norm keeps 1/deviation of its rows", 2 * 8 * s.N)]
    lesson.table(["", "bytes"], [(name, f"{n:+d}") for name, n in bridge])
    lesson.check("the sum of these, against what the block keeps",
                 abs(sum(n for _, n in bridge) - sum(kept)))


def four_kinds_of_memory(lesson):
    """Four kinds of memory"""
    lesson.predict("AdamW in float32: bytes read and written per parameter?", 28,
                   "bytes", why="reads w g m v, writes w m v",
                   mistakes={16: "that is what it holds; it also writes w, m and v back"})
    model, batch, optimizer = trained()
    events, s = ledger.over_step(model, batch, optimizer), cost.Sizes.of(model.config, B=ROWS, w=8)
    P, A = 8 * cost.gpt_parameters(s), cost.gpt_activations(s, batch.count)
    peak, end = max((held for _, held in events), key=lambda held: held.activations), events[-1][1]
    lesson.ledger(("P  parameters", "8 (12 L D^2 + 13 L D + (V+T+2) D)", P, end.parameters),
                  ("G  gradients, after backward", "P", P, end.gradients),
                  ("O  AdamW's state", "2 P", 2 * P, end.optimizer),
                  ("A  kept after forward", ACTIVATIONS, A, peak.activations),
                  ("kept after backward", "0", 0, end.activations),
                  **setting.letters(s), n=batch.count)
    lesson.fill(f"""
        n tokens have a target. P, G, O do not ask how much you feed the model. A does: here
        {A / P:.1f} P, {kit.size(A / s.N)} per token; full when backward begins, as G when it ends.
        """)
    lesson.figure(pictures.memory, {"What one step holds, counted from its arrays": events})


def backward_multiplies_twice(lesson):
    """Why backward multiplies twice as much as forward

    y = x W comes back as dx = dy W^T and dW = x^T dy: two products for one. So a step takes 2 flops
    per parameter and token forward and 4 backward: 6 P N. Counted while arrays are multiplied:"""
    forward, backward = lesson.share(lambda: counted.step(
        setting.model(dtype=np.float32), setting.words(ROWS)))
    times = lesson.share(timed)
    ratio = [b / f for f, b in zip((*forward, times[0]), (*backward, times[1]))]
    lesson.table(["", "products, Mflop", "elementwise, Mflop", "time of `nano`, here"],
                 [(name, *(f"{n / 1e6:.2f}" for n in flop), kit.duration(took)) for name, flop, took
                  in (("forward", forward, times[0]), ("backward", backward, times[1]))])
    lesson.check("products of backward over forward, against 2", abs(ratio[0] / 2 - 1), 0.01)
    lesson.fill(f"""
        The products are {ratio[0]:.2f} times as many, the rest {ratio[1]:.2f} times: forward has
        already worked out the derivatives that it keeps. So the time need not double: here it is
        {ratio[2]:.2f} times. The optimizer took {kit.duration(times[2])}: it computes little, but
        moves 28 bytes per parameter. It pays in bandwidth.""")


def prove(lesson):
    """Is it right?"""
    questions.step(lesson)
    model, batch, optimizer = trained(0)
    loss, s = model(batch), cost.Sizes.of(model.config, B=ROWS, w=8)
    kept = ledger.held(model, None, loss, batch=batch).activations
    lesson.ledger(("A after forward", ACTIVATIONS,
                   cost.gpt_activations(s, batch.count), kept),
                  **setting.letters(s), n=batch.count)
    loss.backward()
    whole = gradients(model)
    lesson.check("every gradient, against the slope of the loss",
                 slopes(model, batch, whole), 1e-6)
    model.zero_grad()
    step.accumulate(model, batch.split(3))
    lesson.check("three micro-batches, against one batch", apart(gradients(model), whole), 1e-12)
    weight, moments, errors = model.parameters()[0], (0, 0), []
    for t in (1, 2):
        before, fresh = weight.data.copy(), deepcopy(model)
        for p in fresh.parameters():
            p.grad = None
        step.train_step(model, batch, optimizer)
        update, moments = adamw(before, weight.grad, moments, t, *RATES)
        errors.append(kit.difference(weight.data - before, update))
    lesson.check("AdamW's first two updates, against its formula", max(errors), 1e-9)
    fresh(batch).backward()
    lesson.check("update 2 sees the gradients of step 2 alone",
                 apart({name: g * batch.count for name, g in gradients(model).items()},
                       gradients(fresh)), 1e-12)


@kit.breaks(nn.Module, "zero_grad")
def stale_gradients(module):
    """zero_grad() does nothing: every step adds its gradients to those of all steps before.

    The loss falls all the same: AdamW hardly looks at the size of a gradient. It follows
    directions that are several steps old."""


@kit.breaks(functional, "gelu")
def greedy_gelu(x):
    """gelu keeps its input beside its derivative, as one written from single operations would.

    Every number is right; only the memory is not: 4 N D more per block, a fifth of all A."""
    y, kept = greedy_gelu.original(x), x.data
    if y.node is None:                                     # under no_grad nothing is kept
        return y
    right = y.node.vjp
    return tensor.Tensor(y.data, (x,), lambda g: [part.reshape(kept.shape) for part in right(g)])


@kit.breaks(optim.AdamW, "update")
def no_bias_correction(self, p, target, grad, scale):
    """AdamW takes its running means as they are, though both start at zero.

    The first update is (1 - 0.9) / sqrt(1 - 0.95) = 0.45 of what it should be, and the ones up to
    the eighth are too small: warm-up hides it."""
    rate = self.rate
    self.rate *= (1 - self.betas[0] ** self.t) / np.sqrt(1 - self.betas[1] ** self.t)
    no_bias_correction.original(self, p, target, grad, scale)
    self.rate = rate


def trained(steps=1):
    """A small GPT with no value that is 0 or 1, a batch where not all targets count, AdamW."""
    model, batch = setting.reader(dropout=0), setting.text(ROWS)
    for p in model.parameters():
        p.data += nn.init(p.name + ".off", p.shape, std=0.05, dtype=np.float64)
    batch = replace(batch, targets=batch.targets.copy())
    batch.targets[0, :8] = functional.IGNORE
    optimizer = optim.AdamW(model.parameters(), *RATES)
    for _ in range(steps):
        step.train_step(model, batch, optimizer)             # the first update makes its state
    return model, batch, optimizer


def tape_by_part(model, batch):
    """Run the parts one by one.  -> [(part, [(operation, bytes it keeps)])]"""
    x, ends = None, [0]
    for part in model.parts.values():
        x = part(x, batch)
        ends.append(len(ledger.nodes(x)))
    rows = ledger.by_operation(x, exclude=ledger.known(model, batch))
    return [(name, rows[i:j]) for name, i, j in zip(model.parts, ends, ends[1:])]


def timed():
    """Shortest seconds of forward, backward and update: the `nano` preset, float32."""
    corpus = setting.corpus(64)
    model, batch, losses, found = GPT(preset("nano", corpus.vocab)), corpus.batch(12, 0, 0), [], []
    optimizer = optim.AdamW(model.parameters(), 1e-3)
    acts = (lambda: losses.append(model(batch)), lambda: losses.pop().backward(),
            lambda: optimizer.step(1 / batch.count))
    for _ in range(5):
        model.zero_grad()
        found.append([clock.best(act, 1) for act in acts])
    return np.min(found, axis=0).tolist()


TAKEAWAY = "A step holds P + G + O whatever you feed it, and A in proportion to what you feed it."
FIELD = "saved tensors (torch.autograd); model states and residual states (ZeRO)"
TRY = ["at which T do the attention weights make up half of A? (screen 2 has the formula)"]
SCREENS = [forward_writes_a_tape, what_is_kept, four_kinds_of_memory, backward_multiplies_twice,
           prove, stale_gradients]

if __name__ == "__main__":
    kit.run(SCREENS)
