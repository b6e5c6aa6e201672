"""cost.step against real steps: every byte and message of every axis, and all that is held."""
import math
from functools import partial

import numpy as np
import pytest

from minidist import buckets, cost, ep, ledger, moe, offload, parallel, precision, verify, zero
from minidist.collectives import all_gather, chosen
from minidist.cost.layout import AXES, Rank, activations
from minidist.dp import DistributedDataParallel
from minidist.engine import attention
from minidist.engine.data import random_batch
from minidist.engine.optim import SGD, AdamW
from minidist.engine.tensor import graph_bytes, replaying
from minidist.mesh import DeviceMesh
from minidist.ranks.buffers import PAGE
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests.models import perturb, tiny

ODD = dict(heads=6, width=24, kv_heads=3, vocab=13, context=12)
CASES = {
    "one process": (dict(), ODD),
    "dp 3, 5 rows": (dict(dp=3), ODD),
    "tp 3, 13 words": (dict(tp=3), ODD),
    "tp 2, heads wider than the cut": (dict(tp=2), dict(ODD, width=30, kv_heads=2)),
    "tp 4, keys shared": (dict(tp=4), dict(heads=4, width=20, kv_heads=2, vocab=13, context=12)),
    "tp 2, untied, dropout": (dict(tp=2), dict(ODD, kv_heads=6, tied=False, dropout=0.2)),
    "sp 2": (dict(tp=2, sequence="again"), dict(ODD, kv_heads=2)),
    "sp 3, inputs kept": (dict(tp=3, sequence="keep"), ODD),
    "sp 3, dropout": (dict(tp=3, sequence="again"), dict(ODD, dropout=0.2)),
    "cp 3": (dict(cp=3), ODD),
    "cp 2, in order": (dict(cp=2, method="ring"), ODD),
    "cp 3, heads": (dict(cp=3, method="ulysses"), ODD),
    "dp 2, cp 3": (dict(dp=2, cp=3), ODD),
    "cp 2, tp 3": (dict(cp=2, tp=3), ODD),
    "cp 2, tp 2, sp": (dict(cp=2, tp=2, sequence="again"), dict(ODD, kv_heads=2)),
    "dp 2, cp 2, tp 2, heads": (dict(dp=2, cp=2, tp=2, method="ulysses"), dict(
        heads=4, width=20, kv_heads=4, vocab=13, context=12)),
    "dp 2, tp 2": (dict(dp=2, tp=2), dict(ODD, kv_heads=2)),
    "dp 2, tp 3": (dict(dp=2, tp=3), ODD),
    "dp 3, tp 2, sp": (dict(dp=3, tp=2, sequence="again"), dict(ODD, kv_heads=2)),
    "pp 3": (dict(pp=3, microbatches=4), ODD),
    "pp 2, untied": (dict(pp=2, microbatches=2), dict(ODD, tied=False)),
    "dp 2, pp 2, tp 2": (dict(dp=2, pp=2, tp=2, microbatches=2), dict(ODD, kv_heads=2)),
    "dp 2, pp 3, zero 1": (dict(dp=2, pp=3, microbatches=3, zero=1), ODD),
    "pp 2, tp 2, sp, dropout": (dict(pp=2, tp=2, sequence="again", microbatches=2),
                                dict(ODD, kv_heads=2, dropout=0.2)),
    "pp 2, cp 2": (dict(pp=2, cp=2, microbatches=3), ODD),
    "dp 2, tp 4, sp, keys shared": (dict(dp=2, tp=4, sequence="again"), dict(
        heads=4, width=20, kv_heads=2, vocab=13, context=12)),
}
LESS = {
    "blocks": (dict(recompute="blocks"), ODD),
    "sqrt, dp 2, zero 1, offload": (dict(recompute="sqrt", dp=2, zero=1, offload=256), ODD),
    "attention, dropout": (dict(recompute="attention"), dict(ODD, dropout=0.2)),
    "blocks, tp 3, dropout": (dict(recompute="blocks", tp=3), dict(ODD, dropout=0.2)),
    "sqrt, sp 2": (dict(recompute="sqrt", tp=2, sequence="again"), dict(ODD, kv_heads=2)),
    "attention, tp 2, untied": (dict(recompute="attention", tp=2), dict(ODD, kv_heads=6,
                                                                      tied=False)),
    "blocks, cp 2, zigzag": (dict(recompute="blocks", cp=2), ODD),
    "dp 3, zero 3, offload": (dict(dp=3, zero=3, offload=1024, microbatches=2), ODD),
    "dp 2, tp 2, zero 3, all of it": (dict(dp=2, tp=2, zero=3, offload=64, microbatches=3,
                                           recompute="blocks"), dict(ODD, kv_heads=2)),
    "dp 2, zero 2, offload": (dict(dp=2, zero=2, offload=1 << 20), ODD),
}


def counted(layout, config, rows, ragged, optimizer=AdamW, form=None):
    """Take two steps on thread ranks.  -> (coordinates, Count of the second, Bytes) of each rank"""
    def rank(world):
        mesh = DeviceMesh(world, **axes_of(layout))
        model = spread(perturb(tiny(np.float32 if form else np.float64, **config)), mesh, layout,
                       form)
        opt = parallel.equip(optimizer(model.parameters(), 0.01), model)
        opt.loss_scale = precision.LossScale(8.0) if form else None
        batches = [random_batch(config["vocab"], config["context"], rows, 1, t, ragged)
                   for t in range(2)]
        train_step(model, batches[0], opt, mesh, layout.microbatches)
        with world.counting() as count:
            train_step(model, batches[1], opt, mesh, layout.microbatches)
        held = ledger.held(model, opt)
        first = model.localize(batches[1]).split(layout.microbatches)[0]
        kept = ledger.held(model, None, model(first), batch=first).activations
        at = {axis: mesh.coords[axis] for axis in AXES}
        return at, by_axes(count), held._replace(activations=kept), first.count
    return run_threads(math.prod(axes_of(layout).values()), rank)


def axes_of(layout):
    return {axis: getattr(layout, axis) for axis in AXES}


EXPERTS = {
    "one process": (dict(), dict(k=1)),
    "dp 3": (dict(dp=3), dict(biased=True)),
    "ep 3, five experts, a loss": (dict(dp=3, ep=3), dict(E=5, aux=True)),
    "ep 2 of dp 4, micro-batches": (dict(dp=4, ep=2, microbatches=2), dict(biased=True)),
    "ep 2, tp 2, shared": (dict(dp=2, ep=2, tp=2), dict(shared=True, aux=True)),
    "tp 3": (dict(tp=3), dict(k=1, shared=True)),
    "ep 2, cp 2": (dict(dp=2, ep=2, cp=2), dict(biased=True)),
    "cp 3": (dict(cp=3), dict(biased=True)),
    "dp 4, ep 2, zero 2": (dict(dp=4, ep=2, zero=2, microbatches=2), dict(biased=True)),
    "dp 2, zero 1": (dict(dp=2, zero=1), dict(aux=True)),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_a_step_with_experts(case):
    """Every byte sent and held, given where the routers have sent the rows."""
    axes, given = EXPERTS[case]
    config = dict(ODD, kv_heads=2) if axes.get("tp") == 2 else ODD
    layout, given = cost.Layout(**axes, chosen=chosen), {**dict(E=4, k=2), **given}
    sizes = cost.Sizes.of(tiny(**config).config, B=6, w=8, tile=attention.TILE, **given)
    for at, sent, held, targets, routed in routed_steps(layout, config, given):
        step = cost.step(sizes, layout, targets, routed, **at)
        assert {axes: price[1:] for axes, price in step.sent.items() if price.messages} == sent, at
        assert step.held == held, at
        even = cost.step(sizes, layout, targets, **at)
        assert set(even.sent) == set(step.sent) and even.held[:3] == held[:3]


def routed_steps(layout, config, given):
    """Take a step on thread ranks, and note the rows that go to the ranks of ep and come back."""
    routing = moe.MoEConfig(given["E"], given["k"], aux=0.1 * given.get("aux", False),
                            bias=0.1 * given.get("biased", False),
                            shared=given.get("shared", False))

    def rank(world):
        mesh = DeviceMesh(world, dp=layout.dp, cp=layout.cp, tp=layout.tp, ep=layout.ep)
        model = moe.replace_mlps(tiny(**config), routing)
        model, notes = parallel.spread(verify.perturb(model), mesh, zero=layout.zero), []
        for layer in moe.mixtures(model):
            layer.experts.wrap(partial(noted, notes))
        opt = parallel.equip(AdamW(model.parameters(), 0.01), model)
        batch = random_batch(config["vocab"], config["context"], 6, 1, 0, True)
        first = model.localize(batch).split(layout.microbatches)[0]
        kept = ledger.held(model, None, model(first), batch=first).activations
        notes.clear()
        with world.counting() as count:
            train_step(model, batch, opt, mesh, layout.microbatches)
        held = ledger.held(model, opt)._replace(activations=kept)
        there = [ep.sums(counts, cost.chunks(given["E"], layout.ep)) for counts in notes]
        back = all_gather(np.array(there)[None], mesh["ep"])[:, :, mesh.coords["ep"]].T
        rows, L = list(zip(there, back.tolist())), len(model.blocks)
        at = {axis: mesh.coords[axis] for axis in ("dp", "cp", "tp")}
        return at, by_axes(count), held, first.count, lambda i, layer: rows[i * L + layer]
    return run_threads(layout.dp * layout.cp * layout.tp, rank)


def noted(notes, forward, rows, counts):
    notes.append(counts)
    return forward(rows, counts)


@pytest.mark.parametrize("case", LESS)
def test_recomputed_and_offloaded_steps(case):
    """What is kept when forward ends and at the top of backward; what moves; whose FLOPs."""
    axes, config = LESS[case]
    layout = cost.Layout(**axes, chosen=chosen)
    sizes = cost.Sizes.of(tiny(**config).config, B=6, w=8, tile=attention.TILE)
    for at, ends, top, held, account, targets in followed(layout, config):
        step = cost.step(sizes, layout, targets, **at)
        assert activations(Rank(sizes, layout, at), targets) == (ends, top), at
        assert step.held == held._replace(activations=top)
        assert step.moved[:3] == (tuple(account.values()) if layout.offload else (0, 0, 0))


def followed(layout, config):
    """Take a step on thread ranks, and follow a forward and backward of its first micro-batch."""
    def rank(world):
        mesh = DeviceMesh(world, dp=layout.dp, cp=layout.cp, tp=layout.tp)
        model, watch = perturb(tiny(**config)), Watch()
        for block in model.blocks:
            block.wrap(watch)
        model = parallel.spread(model, mesh, layout.sequence, zero=layout.zero,
                                method=layout.method, recompute=layout.recompute)
        opt = parallel.equip(AdamW(model.parameters(), 0.01), model)
        if layout.offload:
            offload.attach(opt, model, offload.Host, world, layout.offload)
        batch = random_batch(config["vocab"], config["context"], 6, 1, 0, True)
        train_step(model, batch, opt, mesh, layout.microbatches)
        account, held = opt.offload.account() if layout.offload else {}, ledger.held(model, opt)
        first = model.localize(batch).split(layout.microbatches)[0]
        model.zero_grad()
        watch.known, loss = ledger.known(model, first), model(first)
        watch.graph = ledger.nodes(loss)
        ends, watch.most = graph_bytes(loss, exclude=watch.known), 0
        loss.backward()
        at = {axis: mesh.coords[axis] for axis in ("dp", "cp", "tp")}
        return at, ends, max(ends, watch.most), held, account, first.count
    return run_threads(layout.dp * layout.cp * layout.tp, rank)


class Watch:
    """Note the most that is kept when a block has been computed again."""
    graph, known, most = (), (), 0

    def __call__(self, forward, x, batch):
        y = forward(x, batch)
        if replaying() and self.graph:                      # x is as large as the segment's input
            held = graph_bytes(y, *map(ledger.rooted, self.graph), exclude=self.known)
            self.most = max(self.most, held + x.data.nbytes)
        return y


@pytest.mark.parametrize("axes", [dict(), dict(dp=2), dict(dp=2, tp=3), dict(cp=3), dict(
    dp=2, tp=2, sequence="again", zero=3), dict(cp=2, method="ulysses", tp=3)], ids=str)
@pytest.mark.parametrize("what", [None, "blocks", "sqrt", "attention"])
def test_all_ranks_together_compute_the_flops_of_one_process(axes, what):
    sizes = cost.Sizes(B=8, T=12, D=24, H=6, V=13, L=4)
    layout = cost.Layout(**axes, recompute=what, microbatches=3)
    total = sum(cost.step(sizes, layout, dp=d, cp=c, tp=t).flops for d in range(layout.dp)
                for c in range(layout.cp) for t in range(layout.tp))
    assert total == cost.gpt_flops(sizes) + (cost.recomputed_flops(sizes, what) if what else 0)


def spread(model, mesh, layout, form=None):
    """As the command spreads it; with other buckets than the usual ones, by dp alone."""
    if layout.first == buckets.FIRST:
        return parallel.spread(model, mesh, layout.sequence, zero=layout.zero,
                               method=layout.method, precision=form)
    if layout.zero:
        return zero.parallelize(model, mesh["dp"], layout.zero, bucket_bytes=layout.cap,
                                first_bucket_bytes=layout.first)
    return DistributedDataParallel(model, mesh["dp"], layout.cap, layout.first)


def by_axes(count):
    """Messages and bytes in each group of the mesh; "tp.kv", a part of tp's, counts there."""
    found = {}
    for name, sent in count.by_group.items():
        axes = name.split(".")[0]
        messages, nbytes = found.get(axes, (0, 0))
        found[axes] = messages + sent.messages, nbytes + sent.bytes
    return {axes: sent for axes, sent in found.items() if sent[0]}


def compare(layout, config, rows=5, ragged=True, form=None, **options):
    bits = dict(w=2, loss=4) if form else dict(w=8)
    sizes = cost.Sizes.of(tiny(**config).config, B=rows, tile=attention.TILE, **bits)
    for at, sent, held, targets in counted(layout, config, rows, ragged, form=form, **options):
        step = cost.step(sizes, layout, targets, **at)
        assert {axes: price[1:] for axes, price in step.sent.items() if price.messages} == sent
        # A gathered input that is kept begins off a page's border: two per block, one in the head.
        slack = (2 * 3 + 1) * PAGE if layout.sequence == "keep" else 0
        if 1 < layout.pp == at["pp"] + 1:                   # one number: the loss, under its root
            slack += sizes.w
        predicted = step.held._replace(activations=step.held.activations + slack)
        if layout.method == "ulysses":                      # whose exchanges keep copies
            predicted = predicted._replace(activations=held.activations)
        assert predicted == held, at


@pytest.mark.parametrize("case", CASES)
def test_every_byte_sent_and_held_is_predicted(case):
    axes, config = CASES[case]
    compare(cost.Layout(**axes, chosen=chosen), config)


@pytest.mark.parametrize("axes", [
    dict(), dict(dp=3), dict(dp=3, zero=1), dict(dp=2, zero=2, microbatches=2), dict(dp=3, zero=3),
    dict(tp=3), dict(tp=3, sequence="again"), dict(dp=2, tp=3, sequence="again", zero=3),
    dict(cp=3, method="ulysses")], ids=str)
def test_fp16_sends_and_holds_what_is_predicted(axes):
    """Two bytes per number, four in the loss, twelve of state; and one question: any overflow?"""
    compare(cost.Layout(**axes, state=6, scaled=True, chosen=chosen), ODD, form="fp16")


@pytest.mark.parametrize("microbatches", [2, 3])
def test_micro_batches_send_activations_again_and_gradients_once(microbatches):
    compare(cost.Layout(dp=2, tp=2, microbatches=microbatches, chosen=chosen),
            dict(ODD, kv_heads=2), rows=7)


def test_ranks_and_micro_batches_without_rows():
    compare(cost.Layout(dp=3, microbatches=2, chosen=chosen), ODD, rows=2)
    compare(cost.Layout(dp=2, tp=2, microbatches=3, chosen=chosen), dict(ODD, kv_heads=2), rows=3)


def test_optimizer_state_is_what_the_optimizer_keeps():
    compare(cost.Layout(dp=2, state=0, chosen=chosen), ODD, optimizer=SGD)


@pytest.mark.parametrize("first, cap", [(1, 1), (2000, 9000), (9000, 2000)])
def test_a_step_with_small_buckets(first, cap):
    compare(cost.Layout(dp=3, first=first, cap=cap, chosen=chosen), ODD)


def test_a_bucket_closes_when_it_has_reached_its_limit():
    numbers = np.random.default_rng(0).integers(1, 400_000, 60).tolist()
    for first, cap in (1 << 20, 25 << 20), (1, 1), (1000, 1 << 22), (1 << 22, 1 << 20), (1e9, 1e9):
        lists = buckets.assign([8 * n for n in numbers], None, cap, first)
        assert cost.strategies.buckets(numbers, 8, first, cap) == [
            sum(numbers[i] for i in members) + len(members) for members in lists]


def test_one_process_sends_nothing_and_gpt3_needs_many_gpus():
    assert cost.step(cost.GPT3, cost.Layout()).sent == {}
    whole, cut = (cost.step(cost.GPT3, cost.Layout(dp=16, tp=p)) for p in (1, 8))
    assert 7.9 < whole.held.parameters / cut.held.parameters < 8
    assert set(whole.sent) == {"dp"} and set(cut.sent) == {"dp", "tp", "dp-tp"}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dp, microbatches, first, tied", [(2, 1, 1 << 20, True),
                                                          (3, 3, 2000, False), (4, 3, 1, True)])
def test_zero(stage, dp, microbatches, first, tied):
    """Padded sizes, small buckets, micro-batches; dp 4 has parameters of 6 numbers."""
    options = dict(first=first, cap=9000) if first < 1 << 20 and stage < 3 else {}
    compare(cost.Layout(dp=dp, zero=stage, microbatches=microbatches, chosen=chosen, **options),
            dict(ODD, tied=tied), rows=7)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_beside_tensor_and_sequence_parallelism(stage):
    for sequence in None, "again":
        compare(cost.Layout(dp=2, tp=2, sequence=sequence, zero=stage, microbatches=2,
                            chosen=chosen), dict(ODD, kv_heads=2))


def test_zero_sends_2_and_m_plus_1_and_3_m_units():
    numbers, p = [4 * 3 * 12] * 5, 4                    # nothing to pad
    unit = sum(numbers) * (p - 1) // p * 8
    flags = len(numbers) * (p - 1) * 8
    for stage, m, units in (1, 1, 2), (1, 3, 2), (2, 1, 2), (2, 3, 4), (3, 1, 3), (3, 3, 9):
        price = cost.zero([numbers], cost.Group(p), 8, stage, m)
        assert price.bytes == units * unit + (1 if stage == 1 else m) * flags


@pytest.mark.parametrize("p, stages", [(1, [120, 120, 120]), (4, [52.5, 41.25, 30]),
                                       (64, [31.4, 16.6, 1.88]), (1024, [30.1, 15.1, 0.12])])
def test_the_table_of_the_zero_paper(p, stages):
    assert cost.zero_memory(7.5e9, p, 0) == 120e9
    for stage, GB in enumerate(stages, 1):
        assert cost.zero_memory(7.5e9, p, stage) / 1e9 == pytest.approx(GB, abs=0.05)
