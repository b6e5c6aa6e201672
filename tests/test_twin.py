"""The whole GPT against PyTorch: loss, every gradient, and training steps."""
import numpy as np
import pytest

from minidist.engine import graph, tape, tensor
from minidist.engine.data import random_batch
from minidist.engine.optim import SGD, AdamW
from tests.gradcheck import relative
from tests.models import perturb, tiny

try:
    from tests.twin import Twin
except ImportError:
    Twin = None

needs_torch = pytest.mark.skipif(Twin is None, reason="PyTorch, the reference, is not installed")

LAYOUTS = {
    "grouped, tied":   dict(),
    "grouped, untied": dict(tied=False),
    "plain, tied":     dict(kv_heads=None),
    "one kv, untied":  dict(kv_heads=1, tied=False, layers=1),
    "many tiles":      dict(context=130, layers=1),
}


def gradients(model, batch):
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    return loss.item(), {p.name: p.grad for p in model.parameters()}


@needs_torch
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_every_gradient(name, fused):
    """A tensor's difference is measured by its own largest gradient, but key biases, whose
    gradient is zero up to rounding, by the model's."""
    model = perturb(tiny(**LAYOUTS[name]))
    batch = random_batch(model.config.vocab, model.config.context, rows=3, seed=5, step=0)
    loss, grads = gradients(model, batch)
    ref_loss, ref_grads = Twin(model, fused).value_and_gradients(batch)
    assert abs(loss - ref_loss) < 1e-10 * ref_loss and grads.keys() == ref_grads.keys()
    largest = max(np.abs(g).max() for g in ref_grads.values())
    for name, g in grads.items():
        scale = max(np.abs(ref_grads[name]).max(), 1e-6 * largest)
        assert np.abs(g - ref_grads[name]).max() < 1e-10 * scale, name


@needs_torch
@pytest.mark.parametrize("dtype, bound", [(np.float64, 1e-10), (np.float32, 2e-4)])
def test_three_training_steps(dtype, bound):
    """With AdamW: parameters afterwards.  eps keeps rounding in zero gradients from growing."""
    model = perturb(tiny(dtype))
    twin = Twin(model)
    ours, theirs = AdamW(model.parameters(), lr=0.01, eps=1e-5), twin.adamw(lr=0.01, eps=1e-5)
    for step in range(3):
        batch = random_batch(model.config.vocab, model.config.context, rows=3, seed=5, step=step)
        loss, _ = gradients(model, batch)
        ours.step(1 / batch.count)
        theirs.zero_grad()
        ref_loss = twin.loss(batch)
        (ref_loss / batch.count).backward()
        theirs.step()
        assert abs(loss - ref_loss.item()) < bound * loss
    for p in model.parameters():
        assert relative(p.data, twin.params[p.name].detach().numpy()) < bound, p.name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", [
    lambda ps: AdamW(ps, 0.01), lambda ps: SGD(ps, 0.01, momentum=0.9)], ids=["adamw", "sgd"])
def test_one_dtype_through_the_whole_step(dtype, optimizer, monkeypatch):
    """Every result, everything kept for backward, every gradient, parameter, optimizer state."""
    seen = []

    def note(*things):
        seen.extend(a.dtype for a in graph.captured(*things) if a.dtype.kind == "f")

    make, add = tensor.Tensor.__init__, tape.Sum.add

    def noted_init(self, data, parents=(), vjp=None, **options):
        make(self, data, parents, vjp, **options)
        note(self.data, vjp)

    def noted_add(self, c, owned=False):
        note(np.asarray(c) if np.isscalar(c) else c)
        add(self, c, owned)

    monkeypatch.setattr(tensor.Tensor, "__init__", noted_init)
    monkeypatch.setattr(tape.Sum, "add", noted_add)
    model = tiny(dtype, dropout=0.1)
    step = optimizer(model.parameters())
    for i in range(2):
        batch = random_batch(model.config.vocab, model.config.context, rows=3, seed=5, step=i)
        gradients(model, batch)
        step.step(1 / batch.count)
    for p in model.parameters():
        note(p.data, p.grad, *step.state[p.name])
    assert len(seen) > 500 and set(seen) == {np.dtype(dtype)}
