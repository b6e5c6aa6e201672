"""Pipeline parallelism: every schedule, on every number of ranks, against one process."""
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minidist import BadInput, cost, pp, schedules, sp, tp, verify
from minidist.dp import DistributedDataParallel
from minidist.engine.data import Batch, random_batch
from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.tensor import graph_bytes, no_grad
from minidist.mesh import DeviceMesh
from minidist.placement import finalize, grad_norm
from minidist.ranks.comm import run_threads
from minidist.simulate import peak_live
from minidist.step import train_step
from minidist.verify import perturb
from tests.layout import OPTIMIZERS, check_layout
from tests.mpi import mpi
from tests.models import TINY, tiny

EVERY = [(name, v) for name in schedules.ORDERS
         for v in ((2, 3) if name == "interleaved" else schedules.ORDERS[name].chunks[:1])]


def over(name="1f1b", v=None, **options):
    """A strategy: the pipeline inside of replicas, around tensor parallelism."""
    def strategy(model, mesh):
        if mesh["tp"].size > 1:
            tp.parallelize(model, mesh["tp"], *options.get("sequence", ()))
            if "sequence" in options:
                sp.parallelize(model, mesh["tp"])
        pp.split(model, mesh["pp"], name, v, options.get("weigh", (0, 0)))
        return DistributedDataParallel(model, mesh["dp"], bucket_bytes=2000) if (
            mesh["dp"].size > 1) else model
    return strategy


# ------------------------------------------------------------------ the same training

@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name, v", EVERY)
def test_training_equals_one_process(name, v, p):
    """Uneven layers, fewer micro-batches than stages, ragged and empty ones; tied and untied."""
    sizes = sorted({1, max(1, p - 1), p, 2 * p, 2 * p + 1})
    for k, optimizer in enumerate(OPTIMIZERS):                # two of them each, all in all
        m = sizes[(EVERY.index((name, v)) + p + 2 * k) % len(sizes)]
        verdict = verify.layout(over(name, v), make_optimizer=OPTIMIZERS[optimizer], pp=p,
                                num_microbatches=m, rows=2 * p, layers=p * v + (p == 2),
                                tied=p != 3, sync=k == 0)
        assert verdict.equal and verdict.steps == 3, f"m = {m}: {verdict.line()}"


@pytest.mark.parametrize("p", [2, 3])
def test_D13_stages_start_as_one_process_does(p):
    """Layers on different stages are not the same, whoever's generator was where before."""
    def fn(comm):
        np.random.seed(0)
        model = pp.split(tiny(), DeviceMesh(comm, pp=p)["pp"])
        return {q.name: q.data for q in model.parameters()}

    ref = {q.name: q.data for q in tiny().parameters()}
    stages = run_threads(p, fn)
    assert {name for stage in stages for name in stage} == set(ref)
    assert all(np.array_equal(ref[name], x) for stage in stages for name, x in stage.items())
    assert not np.array_equal(ref["blocks.0.attn.qkv.weight"], ref["blocks.2.attn.qkv.weight"])


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("sizes", [dict(dp=2), dict(tp=2), dict(dp=2, tp=2)])
def test_with_replicas_and_tensor_parallelism(name, sizes):
    check_layout(over(name), pp=2, **sizes, microbatches=3, rows=7, layers=4, steps=2, sync=True)


def test_with_sequence_parallelism():
    check_layout(over(sequence=(sp.enter, sp.leave)), pp=2, tp=2, microbatches=3, layers=3)


@pytest.mark.parametrize("p", [8, 16])
def test_many_stages(p):
    verdict = verify.layout(over(), pp=p, layers=p + 1, num_microbatches=4, rows=4, steps=1)
    assert verdict.equal, verdict.line()


def test_a_stage_may_hold_nothing_but_the_embedding():
    check_layout(over(weigh=(1, 1)), pp=4, layers=3, microbatches=4)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_without_its_schedule_a_pipeline_takes_one_batch_at_a_time(name):
    """The model is called like any other: tapes that meet in send and recv."""
    from minidist.step import accumulate
    check_layout(over(name), pp=3, layers=6, microbatches=2, passes=accumulate)


@mpi(4)
def test_training_under_mpi(comm):
    config = GPTConfig(**{**TINY, "dropout": 0.2, "layers": 5})
    batches = [random_batch(config.vocab, config.context, 5, seed=7, step=t) for t in range(2)]
    for sizes, name in ((dict(pp=4), "1f1b"), (dict(pp=2, dp=2), "zb-v")):
        with DeviceMesh(comm, **sizes) as mesh:
            verdict = verify.train(lambda: perturb(GPT(config, 1, np.float64)), OPTIMIZERS["SGD"],
                                   over(name), mesh, batches, num_microbatches=4, max_norm=0.5)
        assert verdict.equal, verdict.line()


# ------------------------------------------------------------------ gradients, bit by bit

def batch_of(rows=6):
    return random_batch(13, 8, rows, seed=1, step=0)


def gradients(world, name, v, m, calls=1, **config):
    """All gradients of this rank's stages after the passes of one step, as sums."""
    model = pp.split(perturb(tiny(dropout=0.2, **config)), DeviceMesh(world, pp=world.size)["pp"],
                     name, v)
    for batch in batch_of().split(calls):
        model.passes(model, batch.split(m))
    return {p.name: p.grad for p in model.parameters()}


@pytest.mark.parametrize("name, v", EVERY)
def test_schedules_differ_in_no_bit(name, v):
    """Each adds up by micro-batch: so does one process, which is the reference."""
    step = partial(gradients, layers=6, tied=False)
    ref, found = run_threads(1, step, "gpipe", 1, 3)[0], {}
    for mine in run_threads(2, step, name, v, 3):
        found |= mine
    assert found.keys() == ref.keys()
    assert all(np.array_equal(found[n], ref[n]) for n in ref)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_neither_micro_batches_nor_calls_scale_the_gradients(name):
    step = partial(gradients, layers=4)
    ref = run_threads(1, step, "gpipe", 1, 1)[0]
    for m, calls in ((1, 2), (2, 1), (2, 2), (4, 1)):
        for mine in run_threads(2, step, name, None, m, calls):
            for n in mine.keys() - {"embed.wte.weight"}:                  # a partial sum, yet
                assert np.allclose(mine[n], ref[n], rtol=1e-11, atol=1e-11)


# ------------------------------------------------------------------ what is placed where

@pytest.mark.parametrize("L", range(1, 14))
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_no_layer_is_lost(L, stages):
    if L < stages:
        with pytest.raises(BadInput, match=f"{L} layers do not fill {stages} stages"):
            pp.deal(L, stages)
    else:
        dealt = pp.deal(L, stages)
        assert [i for layers in dealt for i in layers] == list(range(L)) and len(dealt) == stages
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_embedding_and_head_may_weigh_in():
    assert list(map(len, pp.deal(10, 3))) == [4, 3, 3]
    assert list(map(len, pp.deal(10, 3, weigh=(1, 1)))) == [3, 4, 3]
    assert list(map(len, pp.deal(2, 4, weigh=(1, 1)))) == [0, 1, 1, 0]
    with pytest.raises(BadInput, match="an embedding that weighs 3 layers"):
        pp.deal(2, 4, weigh=(3, 0))


def test_a_tied_embedding_is_held_by_both_ends():
    def fn(world, name, layers):
        model = pp.split(tiny(layers=layers), DeviceMesh(world, pp=world.size)["pp"], name)
        return {p.name: (p.placements["pp"].stages, p.partial) for p in model.parameters()}

    ends = run_threads(3, fn, "1f1b", 3)
    assert ends[0]["embed.wte.weight"] == ends[2]["embed.wte.weight"] == ((0, 2), {"pp"})
    assert "embed.wte.weight" not in ends[1] and ends[1]["blocks.1.norm1.weight"] == ((1,), set())
    for folded in (run_threads(3, fn, "zb-v", 6), run_threads(1, fn, "1f1b", 3)):
        assert folded[0]["embed.wte.weight"] == ((0,), set())         # on one rank: nothing to sum


def test_the_norm_is_that_of_all_stages():
    """Rank 0 holds a gradient [3, 4], rank 1 holds [12]: both report 13."""
    def fn(world):
        mesh = DeviceMesh(world, pp=2)
        model = pp.split(tiny(layers=2), mesh["pp"])
        p = next(p for p in model.parameters() if len(p.placements["pp"].stages) == 1)
        p.grad = np.zeros_like(p.data)
        p.grad.flat[:2 - world.rank] = [[3, 4], [12]][world.rank]
        return grad_norm(model.parameters(), mesh)
    assert run_threads(2, fn) == [13.0, 13.0]


def test_validation_and_logits():
    def fn(world):
        model = pp.split(tiny(layers=4), DeviceMesh(world, pp=world.size)["pp"], "zb-v")
        with no_grad():
            loss = model(batch_of()).item()
        with pytest.raises(ValueError, match="on its last stage only"):
            model.logits(batch_of())
        return loss
    whole = run_threads(1, fn)
    assert run_threads(2, fn) == [whole[0], 0.0] and whole[0] > 0     # folded: the end is on rank 0


# ------------------------------------------------------------------ counted

def listened(world, name, v, m):
    """What a listener hears on this rank: each action, graphs and put-off passes alive, bytes."""
    model = pp.split(tiny(layers=9, tied=False), DeviceMesh(world, pp=world.size)["pp"], name, v)
    tokens = np.arange(2 * m * 9).reshape(2 * m, 9) % 13
    batch, heard, runs = Batch.of(tokens[:, :-1], tokens[:, 1:], step=0), [], set()

    def listen(run, action, start, end):
        shared = [x for b in run.batches for x in vars(b).values() if isinstance(x, np.ndarray)]
        held = graph_bytes(*(y for _, y in run.live.values()),
                           exclude=[*model.parameters(), *shared])
        heard.append((action, len(run.live), len(run.late), held))
        runs.add(run)

    model.pipeline.listeners.append(listen)
    model.passes(model, batch.split(m))
    run, = runs
    assert not (run.live or run.late or run.here or run.coming)
    return heard


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name, v", EVERY)
def test_live_activations_in_bytes_of_the_engine(name, v, p):
    """Every graph of a stage holds the same; at the peak as many as the formula says."""
    m = 2 * p + 1
    made = schedules.make(name, p, m, v)
    for rank, heard in enumerate(run_threads(p, listened, name, v, m)):
        assert [action for action, *_ in heard] == made.actions[rank]
        assert heard[-1][1:] == (0, 0, 0)
        one, alive = {}, []                                 # bytes of a chunk's graph; those alive
        for (kind, _, chunk), _, _, held in heard:
            if kind == "F":
                one.setdefault(chunk, held - sum(one[c] for c in alive))
                alive.append(chunk)
            elif kind in "BI":
                alive.remove(chunk)
            assert held == sum(one[c] for c in alive)
        assert all(size > 0 for size in one.values())
        both = max(graphs + late for _, graphs, late, _ in heard)
        assert both == peak_live(made.actions[rank])        # whose closed forms: test_simulate


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name, v", EVERY)
def test_messages_and_bytes_equal_the_formula(name, v, p):
    m, rows = 3, 5

    def fn(world):
        model = pp.split(tiny(layers=12), DeviceMesh(world, pp=p)["pp"], name, v)
        with world.counting() as counted:
            model.passes(model, batch_of(rows).split(m))
        return counted

    sizes = cost.Sizes.of(tiny(layers=12).config, B=rows, w=8)
    for rank, counted in enumerate(run_threads(p, fn)):
        price = cost.pp(sizes, cost.Group(p, rank), m, v, name in ("zb-v", "dualpipe-v"))
        assert (counted.messages, counted.bytes) == price[1:]
        assert counted.by_label.keys() <= {"activations", "gradients"}


# ------------------------------------------------------------------ what is refused, and found

def test_what_cannot_be_split_is_refused_on_every_rank():
    def fn(world, name, v, message):
        with world.counting() as counted, pytest.raises(BadInput, match=message):
            pp.split(tiny(layers=3), world, name, v)
        return counted.messages
    for request in (("1f1b", 2, "1f1b works on 1 chunk per rank"),
                    ("interleaved", 2, "3 layers do not fill 4 stages"),
                    ("x", None, "there is no schedule 'x'")):
        assert run_threads(2, fn, *request) == [0, 0]


def test_a_message_of_another_micro_batch_is_an_error():
    """Two ranks that follow different lists: the receiver names what it has got."""
    def fn(world):
        model = pp.split(tiny(layers=2), world, "gpipe")
        made = schedules.make("gpipe", 2, 2)
        if world.rank == 0:
            first, second, *rest = made.actions[0]
            made = replace(made, actions=[[second, first, *rest], made.actions[1]])
        pp.Run(model.pipeline, made, batch_of(4).split(2)).all()

    with pytest.raises(RuntimeError, match=r"rank 1 waits for F of micro-batch 0, shape \[2, 8, "
                                           r"\d+\], and stage 0 has sent micro-batch 1"):
        run_threads(2, fn)


def untied(model, *args, place=pp.place):
    place(model, *args)
    for p in model.parameters():
        p.partial.discard("pp")


def scaled(run, i, chunk, g, put_off, backward=pp.Run.backward):
    return backward(run, i, chunk, None if g is None else g / len(run.batches), put_off)


def another_s(run, i, chunk, g, put_off, backward=pp.Run.backward):
    other = max(run.live)
    run.live[i, chunk], run.live[other] = run.live[other], run.live[i, chunk]
    return backward(run, i, chunk, g, put_off)


def twice(late, run=pp.run_deferred):
    run(list(late))
    run(late)


@pytest.mark.parametrize("owner, name, wrong, found", [
    (pp, "place", untied, "embed.wte.weight"),
    (pp, "run_deferred", lambda late: None, "DIVERGED"),
    (pp, "run_deferred", twice, "DIVERGED"),
    (pp.Run, "backward", scaled, "DIVERGED"),
    (pp.Run, "backward", another_s, "DIVERGED"),
])
def test_mistakes_are_found(monkeypatch, owner, name, wrong, found):
    monkeypatch.setattr(owner, name, wrong)
    verdict = verify.layout(over("zb-h1"), pp=2, num_microbatches=4, layers=2, rows=4,
                            make_optimizer=OPTIMIZERS["SGD"])
    assert not verdict.equal and found in verdict.line()


def test_the_same_model_trains_again_after_a_step():
    """Three steps on one pipeline: the third starts from nothing left by the second."""
    def fn(world):
        mesh = DeviceMesh(world, pp=3)
        model = pp.split(perturb(tiny(layers=3)), mesh["pp"])
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        for _ in range(3):
            train_step(model, batch_of(), optimizer, mesh, 6)
        again = pp.split(perturb(tiny(layers=3)), mesh["pp"])
        for p, q in zip(again.parameters(), model.parameters()):
            p.data[...] = q.data
        for one in (model, again):
            one.zero_grad()
            one.passes(one, batch_of().split(6))
            finalize(one.parameters(), mesh, 1)
        return all(np.array_equal(p.grad, q.grad)
                   for p, q in zip(again.parameters(), model.parameters()))
    assert run_threads(3, fn) == [True] * 3
