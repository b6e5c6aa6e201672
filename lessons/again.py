"""What the lesson on recomputation counts: a step's bytes over time, and small checkpoints."""
import numpy as np

from lessons import counted, setting
from minidist import ledger, recompute
from minidist.engine import functional
from minidist.engine.graph import graph_bytes
from minidist.engine.tensor import Tensor, replaying

ROWS, LAYERS = 6, 9


def small(layers=LAYERS, **changes):
    return setting.model(layers=layers, **changes)


def over_time(every):
    """Follow one step, with segments of so many blocks (0: none).

    -> bytes when forward ends, bytes after each run of a block or gradient, runs of blocks"""
    model, batch, x = small(), setting.words(ROWS), None
    note = Notes(ledger.known(model, batch))
    for block in model.blocks:
        block.wrap(note.watch)
    if every:
        recompute.segments(model, every)
    for part in model.parts.values():
        x = part(x, batch)
        note(x)
    note.graph, end = ledger.nodes(x), note.events[-1]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: note())
    x.backward()
    return end, note.events, note.runs


class Notes:
    """Note the bytes that the graph holds, now and after each block that is computed again."""

    def __init__(self, known):
        self.known, self.graph, self.events, self.runs = known, [], [], 0

    def __call__(self, *roots, beside=0):
        roots = map(ledger.rooted, (*self.graph, *roots))
        self.events.append(graph_bytes(*roots, exclude=self.known) + beside)

    def watch(self, forward, x, batch):
        """Run a block.  x is as large as the input of the segment whose node is running"""
        y = forward(x, batch)
        self.runs += 1
        if replaying():
            self(y, beside=x.data.nbytes)
        return y


def counted_once(lesson, *ways):
    """Count on rank 0 while all others wait: threads share what counts.  -> {way: [n, n]}"""
    lesson.comm.barrier()
    return lesson.share(lambda: {way: products(way) for way in ways})


def products(what):
    """FLOPs of the products of a step.  -> [forward, backward]"""
    model = recompute.parallelize(small(), what) if what else small()
    return [n for n, _ in counted.step(model, setting.words(ROWS))]


def apart(found, reference):
    """The largest difference."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, reference))


def drawing():
    """Multiply by numbers that a generator draws: does the gradient see the same ones?"""
    rng, x = np.random.default_rng(0), Tensor(np.ones(9), requires_grad=True)
    recompute.checkpoint(lambda a: a * rng.standard_normal(9), x * 1.0, rng=rng).sum().backward()
    return apart([x.grad], [np.random.default_rng(0).standard_normal(9)])


def auxiliary():
    """Add x^2 as an auxiliary loss.  -> error of its sum, and of the gradient 1 + 2 x"""
    x = Tensor(np.arange(4.0), requires_grad=True)
    with functional.auxiliary_losses() as sums:
        recompute.checkpoint(lambda a: functional.add_auxiliary_loss(a, (a * a).sum()),
                             x * 1.0).sum().backward()
    return abs(sums["auxiliary"] - 14), apart([x.grad], [1 + 2 * x.data])


def delivered():
    """Use one weight in three segments.  -> how often its gradient is delivered"""
    w, times = Tensor(np.eye(3), requires_grad=True), []
    w.register_post_accumulate_grad_hook(times.append)
    y = Tensor(np.ones((2, 3)), requires_grad=True)
    for _ in range(3):
        y = recompute.checkpoint(lambda a: a @ w, y)
    y.sum().backward()
    return len(times)


def draw(figure, runs):
    axes = figure.subplots()
    for name, events in runs.items():
        axes.plot(np.linspace(0, 1, len(events)), np.array(events) / 1e6, label=name)
    axes.set(xlabel="one step", ylabel="MB of activations", title="a hill and a saw", ylim=0)
    axes.legend()
