"""Modules: what they hold, where their numbers come from, how they are wrapped."""
import math

import numpy as np
import pytest

from minidist.engine import functional as F
from minidist.engine.data import Batch
from minidist.engine.nn import Dropout, Embedding, LayerNorm, Linear, Module, Parameter, init
from minidist.engine.optim import SGD
from minidist.engine.tensor import Tensor
from tests.models import tiny


class Pair(Module):
    def __init__(self):
        self.one = Linear("one", 3, 4)
        self.more = {"two": Linear("two", 4, 3), "note": "not a module"}
        self.more["two"].bias = None

    def forward(self, x):
        return self.more["two"](self.one(x))


def test_finds_modules_and_parameters():
    pair = Pair()
    assert [p.name for p in pair.parameters()] == ["one.weight", "one.bias", "two.weight"]
    assert [type(m) for m in pair.modules()] == [Pair, Linear, Linear]
    assert dict(pair.named_parameters())["two.weight"] is pair.more["two"].weight
    assert pair(Tensor(np.ones((2, 4), np.float32))).shape == (2, 4)


def test_a_tied_parameter_is_one_parameter_in_two_places():
    model = tiny()
    slots = [(type(m).__name__, k) for m, k, p in model.slots() if p.name == "embed.wte.weight"]
    assert slots == [("Embedding", "weight"), ("Linear", "weight")]
    assert len(model.parameters()) == len({p.name for p in model.parameters()})


def test_zero_grad():
    pair = Pair()
    pair(Tensor(np.ones((2, 4), np.float32))).backward(np.ones((2, 4), np.float32))
    assert all(p.grad is not None for p in pair.parameters())
    pair.zero_grad()
    assert all(p.grad is None for p in pair.parameters())


def test_wrappers_nest_the_last_one_outermost():
    pair, seen = Pair(), []
    for name in ("inner", "outer"):
        def around(forward, x, name=name):
            seen.append(name)
            return forward(x)
        pair.wrap(around)
    plain = Pair()(Tensor(np.ones((2, 4), np.float32)))
    np.testing.assert_array_equal(pair(Tensor(np.ones((2, 4), np.float32))).data, plain.data)
    assert seen == ["outer", "inner"]


def test_parameter_knows_its_whole():
    p = Parameter(np.ones((4, 2)), "p")
    p.data = p.data[:2].reshape(-1)
    assert p.full_shape == (4, 2) and p.decay and p.requires_grad
    assert p.placements == {} and p.partial == set()
    assert not Parameter(np.ones(3), "b").decay


def test_frozen_parameter_gets_no_gradient():
    pair = Pair()
    pair.one.weight.requires_grad = False
    pair(Tensor(np.ones((2, 4), np.float32))).backward(np.ones((2, 4), np.float32))
    assert pair.one.weight.grad is None and pair.one.bias.grad is not None


class Nested(Module):
    def __init__(self, shared):
        self.layers = [Linear("a", 2, 3), (Linear("b", 2, 2, bias=False), 7)]
        self.table = {"deep": {"er": [Linear("c", 2, 2, bias=False)]}, "scale": parameter("d")}
        self.loose = [parameter("e"), "text"]
        self.again = {"shared": shared}, shared

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1][0], self.table["deep"]["er"][0]):
            x = layer(x)
        return self.again[1](x * self.table["scale"] * self.loose[0])


def parameter(name):
    return Parameter(np.array([2.0, 3.0], np.float32), name)


def test_containers_are_walked():
    """Lists, tuples and dicts however nested, also with a parameter in them: all of them train."""
    nested = Nested(Linear("f", 1, 2, bias=False))
    x = Tensor(np.ones((4, 3), np.float32))
    params = dict(nested.named_parameters())
    assert sorted(params) == ["a.bias", "a.weight", "b.weight", "c.weight", "d", "e", "f.weight"]
    places = {p.name: place for _, place, p in nested.slots()}
    assert places["d"] == "table.scale" and places["e"] == "loose.0" and places["a.bias"] == "bias"
    assert [type(m) for m in nested.modules()] == [Nested] + 4 * [Linear]      # the shared one once
    before, step = {n: p.data.copy() for n, p in params.items()}, SGD(params.values(), lr=1.0)
    nested(x).backward(np.ones((4, 1), np.float32))
    step.step()
    assert all(p.grad.any() and (p.data != before[n]).any() for n, p in params.items())
    with pytest.raises(ValueError, match="optimizer without parameters"):
        SGD(Module().parameters(), lr=1.0)


def test_a_module_that_holds_its_owner():
    pair = Pair()
    pair.one.owner = [pair]
    assert len(pair.modules()) == 3 and len(pair.parameters()) == 3


def test_shape_and_dtype_survive_freed_data():
    p = Parameter(np.ones((4, 2), np.float32), "p")
    p.data = None
    assert (p.shape, p.ndim, p.size, p.dtype) == ((4, 2), 2, 8, np.float32)
    p.data = np.ones(3)
    assert (p.shape, p.ndim, p.size, p.dtype) == ((3,), 1, 3, np.float64)


# ---------------------------------------------------------------- initial values

def test_initial_values_come_from_seed_and_name():
    a = init("a.weight", (40, 50), seed=3, std=0.02, dtype=np.float64)
    np.random.seed(0)                                      # no one else's generator matters
    np.testing.assert_array_equal(init("a.weight", (40, 50), 3, 0.02, np.float64), a)
    assert not np.array_equal(init("b.weight", (40, 50), 3, 0.02, np.float64), a)
    assert not np.array_equal(init("a.weight", (40, 50), 4, 0.02, np.float64), a)
    assert math.isclose(a.std(), 0.02, rel_tol=0.05) and abs(a.mean()) < 0.002
    np.testing.assert_array_equal(init("a.weight", (40, 50), 3), a.astype(np.float32))


def test_first_values_are_pinned():
    """Runs of different years start equal: a changed generator or key is a changed project."""
    values = init("blocks.0.attn.qkv.weight", (2, 2), seed=0, std=1.0, dtype=np.float64)
    pinned = [0.5434494042003216, 0.17637151131623374,
              -0.3482239422581245, -1.4107360830532556]
    np.testing.assert_allclose(values.ravel(), pinned, rtol=1e-12)


def test_layers_start_as_they_should():
    assert not Linear("l", 3, 4).bias.data.any() and Linear("l", 3, 4, bias=False).bias is None
    norm = LayerNorm("n", 5)
    assert (norm.weight.data == 1).all() and not norm.bias.data.any()
    assert Embedding("e", 7, 5).weight.shape == (7, 5)
    for layer in (Linear("l", 3, 4, dtype=np.float64), LayerNorm("n", 3, np.float64)):
        assert {p.dtype for p in layer.parameters()} == {np.dtype(np.float64)}


# ---------------------------------------------------------------- dropout

def whole(rows=4, length=6, step=0):
    return Batch.of(np.zeros((rows, length), int), step=step)


def test_mask_depends_on_place_and_step_alone():
    """A share of the rows, or of the positions, sees its share of the mask."""
    drop, x = Dropout("site", 0.5), Tensor(np.ones((4, 6, 8)))
    np.random.rand()
    full = drop(x, whole()).data
    rows = np.array([3, 1])
    part = drop(Tensor(np.ones((2, 6, 8))), whole().take_rows(rows)).data
    np.testing.assert_array_equal(part, full[rows])
    places = np.array([0, 5])
    part = drop(Tensor(np.ones((4, 2, 8))), whole().take_tokens(places)).data
    np.testing.assert_array_equal(part, full[:, places])
    part = drop(Tensor(np.ones((4, 2, 8))), whole().take_stream(1, 3)).data
    np.testing.assert_array_equal(part, full[:, 2:4])


def test_masks_differ_where_they_must():
    x = Tensor(np.ones((4, 6, 8)))
    full = Dropout("site", 0.5)(x, whole()).data
    others = [Dropout("other", 0.5)(x, whole()), Dropout("site", 0.5, seed=1)(x, whole()),
              Dropout("site", 0.5)(x, whole(step=1))]
    slices = [full[0], full[1], full[:, 0], full[:, 1], full[..., 0], full[..., 1]]
    assert all(not np.array_equal(full, o.data) for o in others)
    assert not any(np.array_equal(a, b) for a, b in zip(slices[::2], slices[1::2]))
    assert len({m.tobytes() for m in full}) == 4


def test_rate_and_scale():
    y = Dropout("site", 0.2)(Tensor(np.ones((64, 64, 8))), whole(64, 64)).data
    assert set(np.unique(y)) == {0.0, 1.25} and math.isclose((y == 0).mean(), 0.2, abs_tol=0.01)


@pytest.mark.parametrize("rate, step", [(0.0, 0), (0.5, None)])
def test_drops_nothing_at_rate_0_or_outside_of_training(rate, step):
    x = Tensor(np.ones((4, 6, 8)))
    assert Dropout("site", rate)(x, whole(step=step)) is x


def test_backward_goes_through_the_same_mask():
    x = Tensor(np.ones((4, 6, 8)), requires_grad=True)
    y = Dropout("site", 0.5)(x, whole())
    y.backward(np.ones_like(y.data))
    np.testing.assert_array_equal(x.grad, y.data)
    assert F.dropout_mask(0.5, 7, np.dtype(np.float32), np.arange(3)).dtype == np.float32
