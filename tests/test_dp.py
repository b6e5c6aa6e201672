"""Data parallelism is one-process training, whatever the ranks, rows, buckets and parameters."""
from functools import partial

import numpy as np
import pytest

from minidist import cost, dp, verify
from minidist.collectives import chosen
from minidist.engine.data import Batch, random_batch
from minidist.engine.functional import IGNORE
from minidist.engine.nn import Module, Parameter
from minidist.engine.optim import SGD, AdamW
from minidist.engine.tensor import Tensor
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import run_threads
from minidist.step import train_step
from tests import mpi
from tests.layout import OPTIMIZERS, check_layout
from tests.models import perturb, tiny

HUGE = 1 << 40


def plain(model, mesh):
    return dp.parallelize(model, mesh["dp"])


def ddp(model, mesh, **sizes):
    return dp.DistributedDataParallel(model, mesh["dp"], **sizes)


one_byte = partial(ddp, bucket_bytes=1)
everything = partial(ddp, bucket_bytes=HUGE, first_bucket_bytes=HUGE)
some = partial(ddp, bucket_bytes=9000, first_bucket_bytes=2000)
FORMS = {"plain": plain, "ddp": ddp, "one_byte": one_byte, "everything": everything, "some": some}


def odd(model):
    """Freeze some parameters, add one that nothing uses, and one that only row 0 uses.

    Row 0 is in the first micro-batch of rank 0: all others never touch that parameter."""
    perturb(model)
    frozen = "embed.wpe.weight", "blocks.0.mlp.fc1.weight", "blocks.2.norm1.bias"
    for p in model.parameters():
        p.requires_grad = p.name not in frozen
    block, head = model.blocks[1], model.parts["head"]
    block.unused = Parameter(np.ones(3), "blocks.1.unused")
    block.rare = Parameter(np.full(model.config.width, 0.1), "blocks.1.rare")
    head.last = Parameter(np.ones(5, np.float32), "head.last")
    head.last.requires_grad = False

    def rarely(forward, x, batch):
        y, here = forward(x, batch), batch.rows == 0
        return y + block.rare * Tensor(here[:, None, None] * 1.0) if here.any() else y

    block.wrap(rarely)
    return model


# -------------------------------------------------------------------- equal to one process

@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks, microbatches", [(1, 2), (2, 1), (3, 3), (4, 2)])
def test_equals_one_process(form, ranks, microbatches):
    check_layout(FORMS[form], dp=ranks, steps=5, microbatches=microbatches)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_frozen_unused_and_rarely_used_parameters(form, microbatches):
    check_layout(FORMS[form], dp=2, prepare=odd, microbatches=microbatches)


def test_fewer_rows_than_ranks_and_than_microbatches():
    check_layout(some, dp=4, rows=3, microbatches=3)


def test_an_untied_head_and_plain_attention():
    check_layout(some, dp=3, tied=False, kv_heads=None)


def test_with_synchronous_sends():
    check_layout(some, dp=3, sync=True)


def test_what_nobody_uses_is_not_moved_by_adamw():
    """Momentum and decay leave alone what has no gradient on any rank."""
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = some(odd(tiny()), mesh)
        optimizer = AdamW(model.parameters(), 0.1, weight_decay=0.5)
        for step in range(3):
            train_step(model, random_batch(13, 8, 4, 0, step), optimizer, mesh)
        return {p.name: (p.grad, p.data.copy()) for p in model.parameters()}

    for found in run_threads(2, fn):
        grad, data = found["blocks.1.unused"]
        assert grad is None and np.all(data == 1)
        assert np.all(found["head.last"][1] == 1) and found["head.last"][0] is None
        assert np.any(found["blocks.1.rare"][1] != 0.1)


# ------------------------------------------------------------------------- numbers by hand

class Line(Module):
    """loss = w x, summed over the tokens that count."""

    def __init__(self, w=0.0):
        self.w, self.localizers = Parameter(np.array([w]), "w"), []

    def localize(self, batch):
        for narrow in self.localizers:
            batch = narrow(batch)
        return batch

    def forward(self, batch):
        return (self.w * Tensor(batch.tokens * (batch.targets != IGNORE) * 1.0)).sum()


def numbers(rows):
    """A batch of numbers, one row per list; None is a target to ignore."""
    width = max(map(len, rows))
    full = [list(row) + [None] * (width - len(row)) for row in rows]
    tokens = np.array([[x or 0 for x in row] for row in full])
    targets = np.array([[IGNORE if x is None else 0 for x in row] for row in full])
    return Batch.of(tokens, targets, 0)


def gradients(ranks, form, rows, microbatches, windows=2):
    """w's finished gradient after each of several windows, on every rank."""
    def fn(world):
        mesh = DeviceMesh(world, dp=ranks)
        model = form(Line(), mesh)
        optimizer, found = SGD(model.parameters(), lr=0.0), []
        for _ in range(windows):
            train_step(model, numbers(rows), optimizer, mesh, microbatches)
            found.append(model.parameters()[0].grad.item())
        return found
    return run_threads(ranks, fn)


@pytest.mark.parametrize("form", FORMS)
def test_unequal_token_counts(form):
    """x = 1, 2, 3 | 7: 13/4, not (2 + 7)/2; over two ranks or two micro-batches."""
    uneven = [[1, 2, 3], [7]]
    assert gradients(1, FORMS[form], uneven, 2) == [[3.25] * 2]
    assert gradients(2, FORMS[form], uneven, 1) == [[3.25] * 2] * 2
    assert gradients(1, FORMS[form], [*uneven, [None]], 3) == [[3.25] * 2]
    assert gradients(3, FORMS[form], [*uneven, [None]], 1) == [[3.25] * 2] * 3


@pytest.mark.parametrize("form", FORMS)
def test_no_microbatch_is_lost(form):
    """Rank 0 sees 1, 2, 3, rank 1 sees 3, 4, 5: mean 3 in every window, not the last one's 4."""
    assert gradients(2, FORMS[form], [[1], [2], [3], [3], [4], [5]], 3) == [[3.0] * 2] * 2


@pytest.mark.parametrize("form", FORMS)
def test_one_norm_clips_all_replicas(form):
    """Gradients 6 and 8, two targets: 7, whose norm is clipped to 3.5 everywhere."""
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = FORMS[form](Line(), mesh)
        step = train_step(model, numbers([[6], [8]]), SGD(model.parameters(), lr=1.0), mesh,
                          max_norm=3.5)
        return step.norm, model.parameters()[0].data.item()
    for norm, w in run_threads(2, fn):
        assert norm == 7.0 and w == pytest.approx(-3.5, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_used_on_one_rank_only(form):
    """A gradient of 4 on rank 0 alone, two targets: 2 on both."""
    class Sometimes(Line):
        def forward(self, batch):
            if 4 in batch.tokens:
                return super().forward(batch)
            return (Tensor(np.zeros(1), requires_grad=True) * 1.0).sum()

    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = FORMS[form](Sometimes(), mesh)
        train_step(model, numbers([[4], [9]]), SGD(model.parameters(), 0.0), mesh)
        return model.parameters()[0].grad.item()
    assert run_threads(2, fn) == [2.0, 2.0]


def test_D13_replicas_start_equal_even_from_different_seeds():
    def fn(world, form):
        np.random.seed(world.rank)
        model = form(tiny(seed=world.rank), DeviceMesh(world, dp=3))
        return [p.data for p in model.parameters()]
    for form in (plain, ddp):
        first, *others = run_threads(3, fn, form)
        for other in others:
            assert all(map(np.array_equal, first, other))
        assert all(map(np.array_equal, first, [p.data for p in tiny(seed=0).parameters()]))


def test_a_batch_without_targets_changes_nothing():
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = ddp(Line(2.0), mesh)
        optimizer = SGD(model.parameters(), lr=1.0)
        step = train_step(model, numbers([[None], [None]]), optimizer, mesh)
        return step.count, step.loss, optimizer.t, model.w.data.item(), model.w.grad
    assert run_threads(2, fn) == [(0, 0.0, 0, 2.0, None)] * 2


@pytest.mark.parametrize("sizes", [{"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "tp": 2}],
                         ids=str)
def test_every_row_goes_to_one_replica_and_to_all_ranks_of_it(sizes):
    def fn(world):
        mesh = DeviceMesh(world, **sizes)
        model = Line()
        dp.share_rows(model, mesh["dp"])
        return mesh.coords["dp"], model.localize(random_batch(13, 8, 5, 0, 0)).rows.tolist()

    shares = {}
    for replica, rows in run_threads(int(np.prod(list(sizes.values()))), fn):
        assert shares.setdefault(replica, rows) == rows
    assert sorted(sum(shares.values(), [])) == [0, 1, 2, 3, 4] and len(shares) == sizes["dp"]


# --------------------------------------------------------------------------- what is sent

class Shuffled(Module):
    """Three parameters whose gradients come in an order that depends on the rank."""

    def __init__(self, rank):
        self.localizers = []
        self.parts = {n: Parameter(np.ones(size), n) for n, size in zip("abc", (10, 20, 30))}
        self.a, self.b, self.c = self.parts.values()
        self.order, self.came = np.roll(["a", "b", "c"], rank), []
        for p in self.parts.values():
            p.register_post_accumulate_grad_hook(lambda p: self.came.append(p.name))

    def forward(self, batch):
        terms = [(self.parts[name] * 2.0).sum() for name in self.order]
        return terms[0] + terms[1] + terms[2]


def test_buckets_leave_in_one_order_even_if_gradients_come_in_different_ones():
    def fn(world):
        mesh = DeviceMesh(world, dp=3)
        model = one_byte(Shuffled(world.rank), mesh)
        sent = []
        submit = model.stream.submit
        model.stream.submit = lambda fn, flat: sent.append(flat.size - 1) or submit(fn, flat)
        model(Batch.of(np.zeros((1, 1), int))).backward()
        return model.came, sent, [p.grad.tolist() for p in model.parameters()]

    came, sent, grads = zip(*run_threads(3, fn))
    assert len({tuple(order) for order in came}) == 3
    assert sent == ([30, 20, 10],) * 3
    assert grads == ([[6.0] * 10, [6.0] * 20, [6.0] * 30],) * 3


def test_a_bucket_leaves_while_backward_goes_on():
    """When the embedding's gradient comes, all buckets but the last have left."""
    def fn(world):
        model = some(perturb(tiny(tied=False)), DeviceMesh(world, dp=2))
        seen = []
        model.parts["embed"].wpe.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(len(model.works)))
        model(model.localize(random_batch(13, 8, 4, 0, 0))).backward()
        return seen, len(model.buckets), [b.params[0].name for b in model.buckets]
    for seen, count, first in run_threads(2, fn):
        assert count > 3 and seen == [count - 1] and first[0].startswith("head")


def sent(ranks, form, microbatches):
    """Count what each rank sends in one step.  -> per rank: (counts, the model's parts)"""
    def fn(world):
        mesh = DeviceMesh(world, dp=ranks)
        model = form(perturb(tiny()), mesh)
        optimizer = SGD(model.parameters(), 0.1)
        with world.counting() as counted:
            train_step(model, random_batch(13, 8, 6, 0, 0), optimizer, mesh, microbatches)
        lengths = [b.flat.size for b in getattr(model, "buckets", [])]
        return counted, lengths, [p.size for p in model.parameters()]
    return run_threads(ranks, fn)


def price_of_the_rest(ranks, rank):
    """Besides gradients, a step sums loss and count (together) and the square of the norm."""
    return cost.ddp([2, 1], cost.Group(ranks, rank, chosen), 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_messages_and_bytes_are_as_predicted(ranks, form, microbatches):
    """Once per step, however many micro-batches; nothing but all_reduces."""
    for rank, (counted, buckets, sizes) in enumerate(sent(ranks, FORMS[form], microbatches)):
        group = cost.Group(ranks, rank, chosen)
        if form == "plain":
            price = cost.dp(sizes, group, 8)
            calls = len(sizes) + 1 if ranks > 1 else 0
        else:
            assert sum(buckets) == sum(sizes) + len(sizes)          # gradients, and a flag each
            price, calls = cost.ddp(buckets, group, 8), len(buckets)
        rest = price_of_the_rest(ranks, rank)
        assert counted.by_label["all_reduce"].calls == counted.calls == calls + 2
        assert counted.bytes == price.bytes + rest.bytes
        assert counted.messages == price.messages + rest.messages


def test_nothing_is_sent_before_the_last_pass():
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = some(perturb(tiny()), mesh)
        batch = model.localize(random_batch(13, 8, 4, 0, 0))
        with model.summing(3):
            with world.counting() as counted:
                model(batch).backward()
                model(batch).backward()
                assert not model.works
            model(batch).backward()
            assert len(model.works) == len(model.buckets)
        return counted.messages
    assert run_threads(2, fn) == [0, 0]


def test_gradients_are_held_once():
    """After a step every gradient is a view of its bucket: G is not held twice."""
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = some(perturb(tiny()), mesh)
        optimizer = SGD(model.parameters(), 0.1)
        for step in range(2):
            train_step(model, random_batch(13, 8, 4, 0, step), optimizer, mesh)
        return all(p.grad.base is model.bucket_of[p.name].flat for p in model.parameters())
    assert run_threads(2, fn) == [True, True]


# ---------------------------------------------------------------------- mistakes are named

def test_gradients_that_were_summed_already_are_not_summed_again():
    def fn(world):
        model = ddp(Line(), DeviceMesh(world, dp=2))
        batch = model.localize(numbers([[1], [2]]))
        model(batch).backward()
        with pytest.raises(RuntimeError, match="w still holds the sum of the last step"):
            model(batch).backward()
    run_threads(2, fn)


def test_a_parameter_frozen_later_holds_nothing_up():
    def fn(world):
        mesh = DeviceMesh(world, dp=2)
        model = one_byte(perturb(tiny()), mesh)
        frozen = model.blocks[1].norm1.weight
        frozen.requires_grad = False
        train_step(model, random_batch(13, 8, 4, 0, 0), SGD(model.parameters(), 0.1), mesh)
        return frozen.grad, model.blocks[0].norm1.weight.grad is None
    assert run_threads(2, fn) == [(None, False)] * 2


# -------------------------------------------------------------------------- over real MPI

@mpi.mpi(4)
def test_equals_one_process_over_mpi(comm):
    batches = [random_batch(13, 8, 5, 7, step) for step in range(2)]
    for ranks in (2, 3, 4):
        group = comm.split(0 if comm.rank < ranks else None)
        if group:
            verdict = verify.train(lambda: odd(tiny(dropout=0.2)), OPTIMIZERS["AdamW"], some,
                                   DeviceMesh(group, dp=ranks), batches, num_microbatches=2)
            assert verdict.equal, verdict.line()
