"""Context parallelism: a sequence over ranks is the same training, at the price that cost says."""
import functools

import numpy as np
import pytest

from minidist import BadInput, cost, cp, dp, flash, parallel, sp, tp, verify
from minidist.engine import functional as F
from minidist.engine.data import IGNORE, Batch, random_batch
from minidist.engine.tensor import Tensor, no_grad
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from tests.gradcheck import inputs, relative
from tests.layout import OPTIMIZERS, check_layout
from tests.models import tiny
from tests.mpi import mpi

SIZES = dict(heads=12, width=24, context=24, kv_heads=12)      # tokens and heads over 1 to 4
every_method = pytest.mark.parametrize("method", list(cp.METHODS))


def plain(**over):
    return verify.perturb(tiny(**{**SIZES, **over}))


def over_cp(method, sequence=False):
    """A strategy: tensor (and sequence), context and data parallelism, as far as the mesh goes."""
    def strategy(model, mesh):
        if mesh.sizes["tp"] > 1:
            pair = (sp.enter, sp.leave) if sequence else ()
            tp.parallelize(model, mesh["tp"], *pair)
        cp.parallelize(model, mesh["cp"], method)
        if sequence:
            sp.parallelize(model, mesh["tp"])
        return dp.parallelize(model, mesh["dp"])
    return strategy


# ------------------------------------------------------------------ the whole model

@pytest.mark.parametrize("p", [1, 2, 3, 4])
@every_method
def test_training_equals_one_process(method, p):
    check_layout(over_cp(method), cp=p, **SIZES)


@pytest.mark.parametrize("config", [dict(kv_heads=2, tied=False), dict(kv_heads=4),
                                    dict(kv_heads=1)])
@every_method
def test_grouped_heads(method, config):
    check_layout(over_cp(method), 2, cp=4, microbatches=2, rows=3, layers=2, **{**SIZES, **config})


@pytest.mark.parametrize("layout", [dict(cp=2, dp=2), dict(cp=2, tp=2), dict(cp=2, tp=2, dp=2)])
@pytest.mark.parametrize("sequence", [False, True])
@every_method
def test_with_other_axes(method, sequence, layout):
    if not sequence or "tp" in layout:
        check_layout(over_cp(method, sequence), 2, sync=True, rows=3, layers=1, **layout,
                     **{**SIZES, "kv_heads": 4})


@pytest.mark.parametrize("stage", [1, 2, 3])
@every_method
def test_with_zero(method, stage):
    check_layout(functools.partial(parallel.spread, method=method, zero=stage), 2, cp=2, dp=2,
                 equip=lambda optimizer, model, mesh: parallel.equip(optimizer, model),
                 rows=3, layers=2, **{**SIZES, "kv_heads": 4})


@every_method
def test_eight_ranks(method):
    check_layout(over_cp(method), 1, cp=8, rows=2, layers=1,
                 **{**SIZES, "heads": 8, "kv_heads": 2, "context": 16})


def test_tiles_inside_ulysses():
    check_layout(lambda model, mesh: over_cp("ulysses")(flash.use(model), mesh), cp=3, **SIZES)


@mpi(4)
def test_training_under_mpi(comm):
    layouts = ("zigzag", dict(cp=4)), ("ring", dict(cp=2, tp=2)), ("ulysses", dict(cp=4))
    batches = [random_batch(13, 24, 5, seed=7, step=t) for t in range(2)]
    for method, sizes in layouts:
        verdict = verify.train(lambda: plain(dropout=0.2), OPTIMIZERS["SGD"], over_cp(method),
                               DeviceMesh(comm, **sizes), batches, max_norm=0.5)
        assert verdict.equal, verdict.line()


@every_method
def test_D24_targets_follow_their_tokens_even_if_on_one_rank_only(method):
    """The loss is divided by the targets of all ranks; most ranks have none."""
    def fn(comm):
        batch = random_batch(13, 24, 3, seed=1, step=0)
        batch.targets[:, 2:] = IGNORE
        mesh = DeviceMesh(comm, cp=comm.size)
        verdict = verify.train(plain, OPTIMIZERS["SGD"], over_cp(method), mesh, [batch] * 2)
        return verdict.equal, cp.take_tokens(batch, comm, method).count
    results = run_threads(3, fn)
    assert [equal for equal, _ in results] == [True] * 3
    assert sorted(count for _, count in results)[:2] == [0, 0]


@every_method
def test_logits_are_those_of_the_whole_sequence(method):
    """Without targets nothing is cut: any length will do."""
    def fn(comm):
        model = plain()
        batch = Batch.of(np.arange(14).reshape(2, 7) % 13)
        with no_grad():
            ref = model.logits(batch).data
            cp.parallelize(model, comm, method)
            return relative(model.logits(model.localize(batch)).data, ref)
    assert max(run_threads(3, fn)) < 1e-12


# ------------------------------------------------------------------ ring attention alone

def whole_and_ring(comm, method, causal, arrays, K):
    """Value and gradients of my tokens: of plain attention, and of the ring."""
    q, k, v, g = arrays
    places = cp.METHODS[method](q.shape[2], comm.size)
    mine = places[comm.rank]
    sights = [flash.Sight(places[comm.rank], keys, causal, K, q.shape[1] // K) for keys in places]
    ref = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    ref_y = F.scaled_dot_product_attention(*ref, causal=causal)
    ref_y.backward(g)
    ours = [Tensor(x[:, :, mine], requires_grad=True) for x in (q, k, v)]
    y = cp.ring_attention(*ours, comm, sights)
    y.backward(g[:, :, mine])
    # Where softmax is saturated gradients cancel: what is left is measured by the largest of them.
    largest = max(np.abs(x.grad).max() for x in ref)
    pairs = [(y.data, ref_y.data, np.abs(ref_y.data).max()),
             *((a.grad, b.grad, largest) for a, b in zip(ours, ref))]
    assert all(np.isfinite(x).all() for x, _, _ in pairs)
    return max(np.abs(x - r[:, :, mine]).max() / scale for x, r, scale in pairs)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", ["ring", "zigzag"])
@pytest.mark.parametrize("size, bound", [(1, 1e-12), (3e3, 1e-11)])
def test_equals_full_attention(method, causal, p, size, bound):
    """Also with scores of +-1e4; causal in chunks, rank 0 meets p-1 blocks that are all masked."""
    q, k, v, g = inputs([(2, 4, 24, 3), (2, 2, 24, 3), (2, 2, 24, 3), (2, 4, 24, 3)])
    worst = run_threads(p, whole_and_ring, method, causal, (q * size, k, v, g), 2, sync=True)
    assert max(worst) < bound


@pytest.mark.parametrize("elements", [1, 1 << 17])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_hop_cannot_block(p, elements):
    def fn(comm):
        return cp.hop(np.full(elements, float(comm.rank)), comm)()[-1]
    assert run_threads(p, fn, sync=True, timeout=600) == [(r - 1) % p for r in range(p)]


# ------------------------------------------------------------------ the order of tokens

def test_D24_zigzag_of_eight_tokens():
    first, second = cp.zigzag(8, 2)
    assert first.tolist() == [0, 1, 6, 7] and second.tolist() == [2, 3, 4, 5]
    assert [pairs(cp.zigzag(8, 2), r) for r in (0, 1)] == [18, 18]
    assert [pairs(cp.contiguous(8, 2), r) for r in (0, 1)] == [10, 26]


def pairs(places, rank):
    """Visible pairs of one rank's queries and everybody's keys."""
    return sum(int((places[rank][:, None] >= keys).sum()) for keys in places)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("runs", [1, 2, 3])
def test_D24_orders_hold_every_token_once(p, runs):
    T = 2 * p * runs
    for order in cp.METHODS.values():
        places = order(T, p)
        assert {len(x) for x in places} == {T // p}
        assert np.array_equal(np.sort(np.concatenate(places)), np.arange(T))
    zigzag = [pairs(cp.zigzag(T, p), r) for r in range(p)]
    assert set(zigzag) == {T * (T + 1) // 2 // p}


@pytest.mark.parametrize("p", [2, 3, 4])
def test_zigzag_works_as_much_on_every_rank_in_every_step(p):
    """Scores computed, by the tiles: after the first step, two of the runs' four squares each."""
    places, n = cp.zigzag(2 * p * 512, p), 512

    def work(r, step):
        return sum((mine.stop - mine.start) * (seen.stop - seen.start)
                   for mine, seen in flash.tiles(places[r], places[r - step]))
    for step in range(1, p):
        assert [work(r, step) for r in range(p)] == [2 * n * n] * p
    assert len({work(r, 0) for r in range(p)}) == 1


# ------------------------------------------------------------------ counted

@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["ring", "zigzag"])
def test_messages_and_bytes(method, p):
    """Per layer p-1 blocks of keys and values forward, 2(p-1) backward; K heads, not H."""
    B, K, e, T, L = 5, 4, 2, 24, 3
    batch = random_batch(13, T, B, seed=1, step=0)
    config = tiny(**{**SIZES, "kv_heads": K}).config

    def fn(comm):
        model = cp.parallelize(tiny(**{**SIZES, "kv_heads": K}), comm, method)
        with comm.counting() as forward:
            loss = model(model.localize(batch))
        with comm.counting() as backward:
            loss.backward()
        return (forward.messages, forward.bytes), (backward.messages, backward.bytes)

    hops, nbytes = L * (p - 1), 2 * B * K * e * T // p * 8
    there, back = cost.cp(cost.Sizes.of(config, B=B, w=8), cost.Group(p))
    assert there[1:] == (hops, hops * nbytes) and back[1:] == (2 * hops, 2 * hops * nbytes)
    assert run_threads(p, fn) == [(there[1:], back[1:])] * p


# ------------------------------------------------------------------ refused

@pytest.mark.parametrize("method, T, p, message", [
    ("ring", 25, 2, "25 tokens do not split over 2 ranks .*use a context of 24 or 26"),
    ("zigzag", 18, 4, "18 tokens do not split over 8 runs on 4 ranks .*16 or 24"),
    ("ulysses", 22, 4, "22 tokens do not split over 4 ranks .*20 or 24"),
    ("stripes", 24, 2, "no method 'stripes'; use one of ring, zigzag, ulysses")])
def test_refused_on_every_rank_before_any_message(method, T, p, message):
    def fn(comm):
        with comm.counting() as counted, pytest.raises(BadInput, match=message):
            cp.parallelize(tiny(**{**SIZES, "context": T}), comm, method)
        return counted.messages
    assert run_threads(p, fn) == [0] * p


@every_method
def test_a_shorter_batch_that_does_not_split_is_refused_too(method):
    def fn(comm):
        model = cp.parallelize(tiny(**SIZES), comm, method)
        with pytest.raises(BadInput, match="11 tokens do not split"):
            model.localize(random_batch(13, 11, 3, seed=1, step=0))
        return True
    assert run_threads(2, fn) == [True] * 2


# ------------------------------------------------------------------ a check that fails

def test_each_mistake_diverges(monkeypatch):
    """Positions that do not follow; the first keys in every backward hop; gradients not home."""
    def local_positions(batch, comm, method):
        batch = original_take(batch, comm, method)
        return Batch(batch.tokens, batch.targets, batch.rows,
                     np.arange(len(batch.positions)) + comm.rank * len(batch.positions), batch.step)

    def stale(q, g, kv, comm, sights):
        gq, gkv = np.zeros_like(q[..., :-1]), np.zeros_like(kv)
        for r in range(comm.size):
            flash.attend_backward(q, g, *kv, sights[comm.rank - r], gq, *gkv)
        return gq, gkv

    def one_hop_short(q, g, kv, comm, sights):
        gq, gkv = original_backward(q, g, kv, comm, sights)
        return gq, cp.hop(gkv, comm)()

    original_take, original_backward = cp.take_tokens, cp.backward
    for name, wrong in (("take_tokens", local_positions), ("backward", stale),
                        ("backward", one_hop_short)):
        monkeypatch.setattr(cp, name, wrong)
        with pytest.raises(AssertionError, match="DIVERGED at step 0"):
            check_layout(over_cp("zigzag"), cp=2, **SIZES)
        monkeypatch.undo()
