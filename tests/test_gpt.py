"""The plain GPT against central differences, against its own definition, and in pieces."""
from dataclasses import replace

import numpy as np
import pytest

from minidist import BadInput
from minidist.engine import gpt
from minidist.engine import functional as F
from minidist.engine.data import Batch, random_batch
from minidist.engine.gpt import GPT, GPTConfig, generate, preset
from minidist.engine.tensor import Tensor, no_grad
from tests.models import TINY, perturb, tiny

BLOCK = ["norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight",
         "attn.proj.bias", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias",
         "mlp.fc2.weight", "mlp.fc2.bias"]


def batch_for(model, rows=3, step=0):
    return random_batch(model.config.vocab, model.config.context, rows, seed=5, step=step)


def gradients(model, *batches):
    model.zero_grad()
    for batch in batches:
        model(batch).backward()
    return {p.name: p.grad for p in model.parameters()}


@pytest.mark.parametrize("over", [dict(), dict(kv_heads=None, tied=False), dict(dropout=0.3)],
                         ids=["grouped-tied", "plain-untied", "dropout"])
def test_gradients_are_central_differences(over):
    """Of every parameter, along one random direction."""
    model = perturb(tiny(**over))
    batch, h = batch_for(model), 1e-5
    grads = gradients(model, batch)
    for p in model.parameters():
        direction, losses = np.random.default_rng(1).standard_normal(p.shape), []
        for sign in (1, -1):
            p.data += sign * h * direction
            losses.append(model(batch).item())
            p.data -= sign * h * direction
        slope = (losses[0] - losses[1]) / (2 * h)
        assert abs(slope - (grads[p.name] * direction).sum()) < 1e-6 * max(1, abs(slope)), p.name


def test_names_are_global_and_stable():
    names = [p.name for p in tiny(tied=False).parameters()]
    blocks = [f"blocks.{i}.{name}" for i in range(3) for name in BLOCK]
    assert names == ["embed.wte.weight", "embed.wpe.weight", *blocks, "head.norm.weight",
                     "head.norm.bias", "head.out.weight"]
    assert "head.out.weight" not in [p.name for p in tiny().parameters()]
    assert list(tiny().parts) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_parameter_count(name):
    """V D + T D + L (12 D^2 + 13 D) + 2 D, with one key/value head per head and a tied head."""
    config = preset(name, vocab=97)
    V, T, D, L = config.vocab, config.context, config.width, config.layers
    assert sum(p.size for p in GPT(config).parameters()) == \
        V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D


def test_presets_are_the_agreed_sizes():
    sizes = {n: tuple(p[k] for k in ("context", "width", "heads", "layers"))
             for n, p in gpt.PRESETS.items()}
    assert sizes == {"lesson": (16, 48, 12, 4), "nano": (64, 128, 4, 4), "mini": (256, 384, 6, 6)}
    assert preset("nano", vocab=7, layers=2, dropout=0.1).layers == 2


def test_initial_spread():
    """0.02 everywhere, less by 1/sqrt(2L) where a projection adds to the residual stream."""
    for p in GPT(preset("mini", vocab=97)).parameters():
        residual = p.name.endswith(("proj.weight", "fc2.weight"))
        if p.decay:
            assert abs(p.data.std() / (0.02 / np.sqrt(12 if residual else 1)) - 1) < 0.02, p.name
        else:
            assert set(np.unique(p.data)) == {float("norm" in p.name and "weight" in p.name)}


def test_untrained_loss_is_log_vocab():
    model = GPT(preset("nano", vocab=97))
    batch = batch_for(model, rows=8)
    assert abs(model(batch).item() / batch.count - np.log(97)) < 0.05


def test_no_token_sees_a_later_one():
    model, tokens = perturb(tiny()), np.random.default_rng(0).integers(0, 13, (2, 8))
    before = model.logits(Batch.of(tokens)).data
    tokens[:, 5] = (tokens[:, 5] + 1) % 13
    after = model.logits(Batch.of(tokens)).data
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=(0, 2)).all()


def test_loss_is_a_sum_over_targets():
    """Pieces add up, ignored tokens and empty micro-batches add nothing."""
    model = perturb(tiny(dropout=0.2))
    batch = batch_for(model, rows=5)
    whole, pieces = gradients(model, batch), gradients(model, *batch.split(7))
    for name in whole:
        np.testing.assert_allclose(pieces[name], whole[name], rtol=0,
                                   atol=1e-13 * max(np.abs(g).max() for g in whole.values()))
    ignored = replace(batch, targets=np.full_like(batch.targets, F.IGNORE))
    assert model(ignored).item() == 0.0
    assert not any(g.any() for g in gradients(model, ignored).values())


def test_logits_and_loss_agree():
    model = perturb(tiny())
    batch = batch_for(model)
    loss, count = F.cross_entropy(model.logits(batch), batch.targets)
    assert loss.item() == model(batch).item() and count == batch.count


def test_tied_gradient_is_the_sum_of_both_uses():
    """The untied twin holds the same values: its two gradients add up to the tied one."""
    tied, untied = perturb(tiny()), perturb(tiny(tied=False))
    untied.parts["head"].out.weight.data[:] = tied.parts["embed"].wte.weight.data
    batch = batch_for(tied)
    one, two = gradients(tied, batch), gradients(untied, batch)
    np.testing.assert_allclose(one["embed.wte.weight"],
                               two["embed.wte.weight"] + two["head.out.weight"], rtol=1e-12)


def test_groups_share_their_key_and_value():
    """2 groups of 2 heads equal 4 heads of which pairs have the same key and value rows."""
    grouped, plain = perturb(tiny()), perturb(tiny(kv_heads=None))
    rows = np.arange(32).reshape(2, 4, 4)                  # [group, (q q k v), e]
    spread = rows[:, [0, 2, 3, 1, 2, 3]].ravel()           # q0 k v, q1 k v
    values = dict(grouped.named_parameters())
    for p in plain.parameters():
        source = values[p.name].data
        p.data[:] = source[spread] if ".qkv." in p.name else source
    batch = batch_for(grouped)
    np.testing.assert_allclose(plain(batch).item(), grouped(batch).item(), rtol=1e-13)


def test_a_contiguous_piece_of_qkv_rows_is_whole_heads():
    attn, half = perturb(tiny()).blocks[0].attn, perturb(tiny()).blocks[0].attn
    x = perturb(tiny()).parts["embed"](None, Batch.of(np.arange(8)[None]))
    for p in (half.qkv.weight, half.qkv.bias):
        p.data = p.data[len(p.data) // 2:]
    half.groups = 1
    for whole, piece in zip(attn.split(attn.qkv(x)), half.split(half.qkv(x))):
        np.testing.assert_array_equal(whole.data[:, whole.shape[1] // 2:], piece.data)


def test_the_last_rows_of_a_group_are_its_value():
    """Without them nothing can be gathered, whatever queries and keys say."""
    attn, batch = perturb(tiny()).blocks[0].attn, Batch.of(np.arange(8)[None])
    for p in (attn.qkv.weight, attn.qkv.bias):
        p.data.reshape(2, 4, 4, -1)[:, 3] = 0              # [group, (q q k v), e, ...]
    out = attn(perturb(tiny()).parts["embed"](None, batch), batch).data
    np.testing.assert_array_equal(out, np.broadcast_to(attn.proj.bias.data, out.shape))


def test_parts_run_one_by_one():
    model = perturb(tiny())
    batch, x = batch_for(model), None
    for part in model.parts.values():
        x = part(x, batch)
    assert x.item() == model(batch).item()
    model.parts = {name: model.parts[name] for name in ("blocks.1", "blocks.2")}
    names = [block.norm1.weight.name for block in model.blocks]
    assert names == ["blocks.1.norm1.weight", "blocks.2.norm1.weight"]


def test_localizers_narrow_in_order():
    model = tiny()
    model.localizers += [lambda b: b.take_rows([1, 2]), lambda b: b.take_rows([1])]
    assert list(model.localize(batch_for(model)).rows) == [2]


def test_dropout_masks_follow_the_global_position():
    """Rows trained one at a time drop what they drop together; another step drops otherwise."""
    model = perturb(tiny(dropout=0.3))
    batch = batch_for(model)
    alone = sum(model(b).item() for b in batch.split(3))
    np.testing.assert_allclose(alone, model(batch).item(), rtol=1e-13)
    assert abs(model(replace(batch, step=1)).item() / alone - 1) > 1e-4
    assert model(replace(batch, step=None)).item() == perturb(tiny())(batch).item()


def test_attention_takes_the_heads_it_is_given():
    """Some of the heads, and some of the tokens in any order, drop what all of them drop there."""
    attn, batch = tiny(dropout=0.3, kv_heads=None).blocks[0].attn, batch_for(tiny())
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 4, 8, 4))
    whole = gpt.attend(*map(Tensor, (q, k, v)), batch, attn).data
    heads, mine = np.array([3, 1]), np.array([6, 0, 3])
    q, k, v = (Tensor(x[:, heads]) for x in (q, k, v))
    part = gpt.attend(q, k, v, batch, attn, heads).data
    np.testing.assert_array_equal(part, whole[:, heads])
    few = Tensor(q.data[:, :, mine])
    part, lse = gpt.attend(few, k, v, batch.take_tokens(mine), attn, heads,
                           key_positions=np.arange(8), return_lse=True)
    np.testing.assert_allclose(part.data, whole[:, heads][:, :, mine], rtol=1e-13)
    assert lse.shape == (3, 2, 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_never_widens(dtype):
    model = tiny(dtype, dropout=0.2)
    batch = batch_for(model)
    assert model(batch).dtype == model.logits(batch).dtype == dtype
    assert {g.dtype for g in gradients(model, batch).values()} == {np.dtype(dtype)}
    if dtype == np.float32:
        rounded = {p.name: p.data.astype(np.float32) for p in tiny(np.float64).parameters()}
        assert all(np.array_equal(p.data, rounded[p.name]) for p in model.parameters())


def test_generate():
    model = perturb(tiny(dropout=0.3))
    long = generate(model, [1, 2], 20, np.random.default_rng(0))
    assert len(long) == 22 and long[:2] == [1, 2] and all(0 <= t < 13 for t in long)
    assert generate(model, [1, 2], 20, np.random.default_rng(0)) == long
    with no_grad():
        model.parts["head"].norm.bias.data[:] = 0          # a certain model has no choice
        model.parts["head"].norm.weight.data[:] = 0
        model.parts["head"].norm.bias.data[:] = 1e3 * model.parts["embed"].wte.weight.data[7]
    scores = model.logits(Batch.of(np.array([[0]]))).data[0, 0]
    assert generate(model, [0], 5, np.random.default_rng(1))[1:] == [int(scores.argmax())] * 5


@pytest.mark.parametrize("over, words", [
    (dict(heads=5), "5 heads do not divide a width of 16; use 1, 2, 4, 8 or 16"),
    (dict(kv_heads=3), "3 key/value heads do not divide 4 heads; use 1, 2 or 4"),
    (dict(layers=0), "layers = 0"), (dict(kv_heads=0), "kv_heads = 0"),
    (dict(dropout=1.0), "dropout = 1.0")])
def test_sizes_that_cannot_be(over, words):
    with pytest.raises(BadInput, match=words):
        GPTConfig(**{**TINY, **over})


def test_unknown_preset():
    with pytest.raises(BadInput, match="no preset 'huge'; use one of lesson, nano, mini"):
        preset("huge", vocab=10)


def test_position_beyond_the_context():
    with pytest.raises(IndexError):
        tiny().logits(Batch.of(np.zeros((1, 9), int)))
