"""The memory ledger against cost's closed forms, over what changes a layer's memory."""
import numpy as np
import pytest

from minidist import cost, ledger
from minidist.engine import attention, optim
from minidist.engine.data import Batch, random_batch
from minidist.engine.functional import IGNORE
from minidist.engine.gpt import GPT, preset
from minidist.engine.tensor import Tensor, exp, graph_bytes, sum as total

LAYOUTS = [dict(), dict(kv_heads=4), dict(tied=False), dict(dropout=0.1), dict(context=100),
           dict(context=160, kv_heads=2, dropout=0.2), dict(layers=1, heads=1)]


def model_and_batch(dtype=np.float64, **over):
    config = preset("lesson", vocab=29, **over)
    return GPT(config, dtype=dtype), random_batch(29, config.context, 3, seed=0, step=1)


def sizes(config, w=8):
    return cost.Sizes.of(config, B=3, w=w, tile=attention.TILE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("over", LAYOUTS, ids=str)
def test_counted_equals_cost(over, dtype):
    model, batch = model_and_batch(dtype, **over)
    optimizer, w = optim.AdamW(model.parameters(), 1e-3), np.dtype(dtype).itemsize
    loss = model(batch)
    before = ledger.held(model, optimizer, loss, batch=batch)
    parameters = w * cost.gpt_parameters(sizes(model.config))
    assert before.activations == cost.gpt_activations(sizes(model.config, w), batch.count)
    assert before == (parameters, 0, 0, before.activations)
    loss.backward()
    optimizer.step()
    assert ledger.held(model, optimizer, loss) == (parameters, parameters, 2 * parameters, 0)


def test_a_block_s_operations_add_up_in_order():
    model, batch = model_and_batch()
    rows = ledger.by_operation(model(batch), exclude=ledger.known(model, batch))
    assert sum(kept for _, kept in rows) == cost.gpt_activations(
        sizes(model.config), batch.count)
    embed, views = 3, ("reshape", "getitem", "transpose", "add")
    kept = [(name, n) for name, n in rows[embed:] if name not in views][:8]
    expected = cost.block_activations(sizes(model.config))
    assert [n for _, n in kept] == [row.bytes for row in expected]
    assert all(n == 0 for name, n in rows if name in views)


def test_a_buffer_counts_once_and_what_lives_anyway_does_not():
    x = Tensor(np.ones((4, 5)), requires_grad=True)
    y = exp(x)
    assert graph_bytes(total(y * y)) == y.data.nbytes
    assert graph_bytes(total(y * x), exclude=[x]) == y.data.nbytes


def test_over_step_grows_and_falls_as_it_should():
    model, batch = model_and_batch()
    optimizer = optim.AdamW(model.parameters(), 1e-3)
    events = ledger.over_step(model, batch, optimizer)
    phases = [phase for phase, _ in events]
    assert phases == ["forward"] * 6 + ["backward"] * len(model.parameters()) + ["optimizer"]
    kept = [held.activations for _, held in events]
    peak = phases.index("backward")
    assert kept[:peak] == sorted(kept[:peak]) and max(kept) == kept[peak - 1]
    assert kept[peak:] == sorted(kept[peak:], reverse=True) and kept[-1] == 0
    grads = [held.gradients for _, held in events]
    assert grads == sorted(grads) and grads[-1] == events[0][1].parameters
    assert not any(p.hooks for p in model.parameters())


def test_only_targets_that_count_are_indexed():
    model, _ = model_and_batch()
    tokens = np.zeros((3, 16), int)
    batch = Batch.of(tokens, np.full((3, 16), IGNORE), 0)
    assert ledger.held(model, None, model(batch), batch=batch).activations == cost.gpt_activations(
        sizes(model.config), targets=0)
