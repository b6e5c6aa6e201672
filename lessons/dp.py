"""DATA PARALLELISM      Can p ranks train one model p times as fast, and is it the same training?

  lifts   compute     each rank works on its rows of the batch: time per step / p
  costs   bandwidth   one all_reduce of all gradients per step: 2(p-1)/p of the model per rank
  code    minidist/dp.py, minidist/buckets.py, minidist/placement.py (the gradient rule)
  before  lessons.ring  (how the sum travels)                next  lessons.zero
  run     mpirun -n 4 python -m lessons.dp         or: python -m lessons.dp -n 4
"""
import json
from functools import partial

import numpy as np
from lessons import kit
from minidist import buckets, cost, dp, ledger, placement, step, trace, verify
from minidist.collectives import chosen
from minidist.engine import nn, optim
from minidist.engine.data import random_batch
from minidist.engine.gpt import GPT, preset
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import solo

EXERCISE = [dp.share_rows, dp.start_equal, buckets.assign, placement.finalize]
OPTIONS = {"trace": "write the timeline of the overlap as a Chrome/Perfetto trace"}
VOCAB, CONTEXT, ROWS = 29, 16, 7
CAP, FIRST, ALL = 120_000, 40_000, 1 << 40          # bytes per bucket: some buckets, or one
SGD = partial(optim.SGD, lr=0.5)
ADAMW = partial(optim.AdamW, lr=3e-3, eps=verify.ADAMW_EPS)
SHARE = 40                                          # rows per rank, where time is measured
LATENCY, BANDWIDTH = 50e-6, 100e6                   # a slow link: 50 us, 100 MB/s


def main(lesson):
    mesh = DeviceMesh(lesson.comm, dp=lesson.comm.size)

    lesson.part("Split the batch, sum the gradients")
    lesson.say(f"""
        The loss is a sum over tokens, so its gradient is a sum over rows, wherever they are: here
        {ROWS} rows, of different numbers of targets, on {mesh.describe()}.""")
    sum_of_shares(lesson, mesh)
    lesson.say("That is the whole method. What ends every backward, on every mesh:")
    lesson.source(placement.finalize, "for comm")

    lesson.part("Sum or mean? And whose learning rate?")
    lesson.say("Divide once, by the targets of the whole batch. Three ways, over 4 ranks:\n")
    lesson.table(["gradient", "size", "off by", "loss, SGD", "loss, AdamW"],
                 lesson.share(lambda: divisors(4)))
    lesson.say("""
        AdamW divides by the size of the gradient, which hides the factor that ruins SGD: a curve
        that looks right proves nothing. And p ranks of B rows are one batch of p B rows: it may
        want a larger learning rate, as any large batch does; p itself changes nothing.""")

    lesson.part("What does each rank hold?")
    redundancy(lesson, mesh)

    lesson.part("What does it cost?")
    lesson.predict("1B parameters, float32 gradients, 8 ranks: each sends per step", 7, "GB",
                   why="2 (p-1)/p x 4 GB, whatever the batch",
                   mistakes={3.5: "the sum must also come back: twice (p-1)/p",
                             4: "the sum must also come back", 8: "the limit for many ranks",
                             28: "that is what the root of a plain sum sends"})
    price(lesson, mesh)

    lesson.part("Send while backward is still running")
    lesson.say("""
        The last layer's gradient comes first, and nobody needs it before the step. So gradients
        fill buckets, and a full bucket is summed in the background. Strictly in order: gradients
        may come in another order on another rank, and messages must pair up.""")
    lesson.source(buckets.Reducer.ready, "self.bucket_of")
    overlap(lesson, mesh)

    lesson.part("Is it the same training?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(mean_of_means)
    lesson.takeaway(
        "DP buys time with bandwidth, and holds everything p times. What it sends does not grow "
        "with the batch, so a larger batch hides it better.",
        field="torch DistributedDataParallel (bucket_cap_mb=25, no_sync; it averages where we sum "
              "and divide by tokens), Megatron-LM, Horovod",
        tries=["which lines of the ledger change when the batch doubles? when p does?",
               "why must the first bucket be small, and what does --trace out.json show?",
               "write share_rows, start_equal, assign, finalize: --stub mine.py, --mine mine.py"])


def prove(lesson):
    """Train on ragged batches, with dropout and accumulation, from another start on each rank."""
    comm = lesson.comm
    mesh = DeviceMesh(comm, dp=comm.size)
    dealt = buckets.assign([40, 40, 300, 10, 90, 5], cap=100, first=50)
    lesson.check("assign: a bucket closes once it has reached its limit",
                 dealt != [[0, 1], [2], [3, 4], [5]])
    lesson.check("finalize: 1 + ... + p, once / 10; rank 0's alone; nobody's", rule(mesh), 1e-15)
    batches = [batch_at(t) for t in range(3)]
    for name, make in ("SGD", SGD), ("AdamW", ADAMW):
        lesson.say(f"3 steps of {name}; loss, every gradient, every parameter after each:")
        lesson.verdict(verify.train(lambda: start_of(comm.rank), make, ddp, mesh, batches,
                                    num_microbatches=2))
    model = ddp(model_of(), mesh)
    lesson.ledger(("bytes per step", "2(p-1)/p (n + flags) x 8", predicted(model, mesh).bytes,
                   traffic(lesson, model, 2).bytes))


def rule(mesh):
    """Finish gradients that all ranks, rank 0, and nobody have.  -> error"""
    everybody, first, nobody = (nn.Parameter(np.zeros(2), name) for name in "abc")
    params = [everybody, first, nobody]
    everybody.grad = np.full(2, mesh.world.rank + 1.0)
    first.grad = None if mesh.world.rank else np.ones(2)
    for p in params:
        p.partial.add("dp")
    placement.finalize(params, mesh, 10)
    right = sum(range(1, mesh.world.size + 1)) / 10
    return max(kit.difference(everybody.grad, [right, right]),
               kit.difference(first.grad, [0.1, 0.1]), nobody.grad is not None)


# ---- breaks

@kit.breaks(step, "train_step", first="mine =")
def mean_of_means(model, batch, optimizer, mesh=None, num_microbatches=1, max_norm=None):
    """Each rank divides by its own number of targets, then the ranks are averaged.

    Right only if all ranks have equally many targets: a token among few weighs more than one
    among many. Trainers did this for years, with plausible curves (transformers issue 35203)."""
    mesh, params = mesh or DeviceMesh(solo()), model.parameters()
    model.zero_grad()
    mine = model.localize(batch)
    loss = model(mine) * (1 / max(1, mine.count))           # the mean over my tokens ...
    loss.backward()
    placement.finalize(params, mesh, mesh.sizes["dp"])      # ... and the mean over ranks
    optimizer.step()
    mean, count = placement.total([loss.item() / mesh.sizes["dp"], mine.count], mesh, ["dp"])
    return step.Step(mean, int(count), placement.grad_norm(params, mesh))


@kit.breaks(buckets.Reducer, "launch")
def no_all_reduce(self):
    """The buckets are never summed: every rank trains alone, on its own rows.

    Nothing fails and every loss falls; the replicas drift apart, and what is saved is rank 0's."""
    self.works.append(self.stream.submit(lambda comm: None))


@kit.breaks(placement, "finalize")
def sum_instead_of_mean(params, mesh, count):
    """Gradients are divided by one rank's share of the targets: p times too large.

    SGD takes steps that are p times too long. AdamW hardly notices: its curve looks right."""
    sum_instead_of_mean.original(params, mesh, count / mesh.sizes["dp"])


@kit.breaks(dp, "start_equal")
def no_broadcast(model, comm):
    """Replicas start from different values, as when every rank seeds by its own number.

    The gradients of p different models are summed, and the sum is the gradient of none of them;
    since all add the same sum, they stay different for ever."""


# ---- the screens

def sum_of_shares(lesson, mesh):
    """Show each rank's share of the batch and of one gradient, and their sum."""
    model, reference = dp.parallelize(model_of(), mesh["dp"]), model_of()
    mine = model.localize(batch_at(0))
    model(mine).backward()
    b = model.blocks[0].norm1.bias
    own = b.grad.copy()
    placement.finalize(model.parameters(), mesh, 1)
    reference(batch_at(0)).backward()
    grads = [own, b.grad, reference.blocks[0].norm1.bias.grad]
    lesson.rows(["rows", "targets", "dL/db of my rows", "sum over ranks", "one process"],
                [str(mine.rows.tolist()), mine.count, *(f"{g[0]:+.6f}" for g in grads)])
    lesson.check("b = blocks.0.norm1.bias, against one process", kit.difference(*grads[1:]), 1e-12)


def divisors(p):
    """Divide in three ways: size and error of the first gradient, loss after four steps."""
    shares, count = batch_at(0).split(p), batch_at(0).count
    ways = {"the sum over all tokens, / all targets": [1 / count] * p,
            "the sum of the ranks' means": [1 / share.count for share in shares],
            "the mean of the ranks' means": [1 / share.count / p for share in shares]}
    rows, right = [], None
    for name, weights in ways.items():
        g, after = weighted(SGD, shares, weights)
        right = g if right is None else right
        sizes = [np.linalg.norm(x) / np.linalg.norm(right) for x in (g, g - right)]
        after = [after, weighted(ADAMW, shares, weights)[1]]
        rows.append([name, *(f"{x:.2f}" for x in sizes + after)])
    return rows


def redundancy(lesson, mesh):
    """Show that P, G and O are complete on every rank; A is not."""
    model = ddp(model_of(), mesh)
    optimizer, mine = ADAMW(model.parameters()), model.localize(batch_at(0))
    step.train_step(model, batch_at(0), optimizer, mesh)
    held = ledger.held(model, optimizer, model(mine), batch=mine)
    lesson.rows(["P parameters", "G gradients", "O AdamW's state", "A activations"],
                [kit.size(x) for x in held])
    lesson.say(f"""
        Only A shrinks with a rank's share of the rows. P, G and O are held {lesson.comm.size} times
        over: what does not fit one rank does not fit DP. ZeRO will remove that.""")


def price(lesson, mesh):
    """Predict and count what one step sends, and the broadcast at the start."""
    p, rank = mesh.sizes["dp"], mesh.coords["dp"]
    with lesson.comm.counting() as start:
        model = ddp(model_of(), mesh)
    price, once = predicted(model, mesh), traffic(lesson, model, 1)
    params = model.parameters()
    begin = sum(cost.Group(p, rank, chosen).broadcast(q.size, 8).bytes for q in params)
    lesson.ledger(
        ("all_reduces per step", "one per bucket", len(model.buckets), once.calls),
        ("messages per step", "by size and algorithm", price.messages, once.messages),
        ("bytes per step", "2(p-1)/p (n + flags) x 8", price.bytes, once.bytes),
        ("bytes, 3 micro-batches", "the same", price.bytes, traffic(lesson, model, 3).bytes),
        ("bytes at the start", "a broadcast of n x 8", begin, start.by_label["broadcast"].bytes))
    lesson.say(f"""
        n = {sum(q.size for q in params)}; {len(params)} flags say which parameters were used.
        Three micro-batches send only with the last one: accumulation saves activations,
        and costs no traffic.""")


def overlap(lesson, mesh):
    """Run one step over the slow link: nothing hidden, all in one piece, most of it hidden."""
    forms = {"one all_reduce per parameter": lambda model, mesh: dp.parallelize(model, mesh["dp"]),
             "one bucket": partial(ddp, cap=ALL, first=ALL), f"buckets of {kit.size(CAP)}": ddp}
    lines, rows = {}, []
    for name, form in forms.items():
        lines[name] = spans = timeline(lesson, mesh, form)
        busy, hidden = trace.hidden(spans)
        rows.append([name, kit.duration(trace.length(spans)), kit.duration(busy),
                     f"{100 * hidden / (busy or 1):.0f} %"])
    lesson.table([f"link: {kit.duration(LATENCY)}, {kit.size(BANDWIDTH)}/s",
                  "forward to last sum", "wire busy", "of that, behind backward"], rows)
    lesson.say("""
        From the event log, mean over ranks. What stays visible is the last bucket, which cannot
        leave before the last gradient. So: small buckets pay latency, large ones a long tail.""")
    lesson.figure(draw, lines)
    if lesson.options.trace and lesson.comm.rank == 0:
        with open(lesson.options.trace, "w") as file:
            json.dump(trace.chrome(spans), file)
        lesson.say(f"trace: {lesson.options.trace}  (open it in ui.perfetto.dev)")


def timeline(lesson, mesh, form):
    """Run a step over the slow link.  -> the spans of all ranks, of the fastest of three tries"""
    model, tries = form(model_of(), mesh), []
    mine = model.localize(batch_at(0, SHARE * mesh.sizes["dp"]))
    with lesson.comm.link(LATENCY, BANDWIDTH):
        for _ in range(3):
            lesson.comm.barrier()
            tries.append(trace.record(model, mine, lesson.comm, lambda: placement.finalize(
                model.parameters(), mesh, 1)))
    return min(map(trace.spans, zip(*lesson.collect(tries))), key=trace.length)


def draw(figure, lines):
    end = max(map(trace.length, lines.values()))
    panels = figure.subplots(len(lines), 1, sharex=True)
    for axes, (name, spans) in zip(panels, lines.items()):
        trace.draw(axes, [s for s in spans if s.rank < 2], min(s.start for s in spans))
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlim(0, 1e3 * end)
    axes.set_xlabel("milliseconds     blue: forward   orange: backward   green: messages under way")


# ---- the setting

def model_of(seed=0, dropout=0.0):
    return GPT(preset("lesson", vocab=VOCAB, dropout=dropout), seed, np.float64)


def start_of(rank):
    """Make a model with dropout whose values depend on the rank."""
    model = model_of(dropout=0.1)
    for p, other in zip(model.parameters(), model_of(seed=rank).parameters()):
        p.data[...] = other.data
    return model


def ddp(model, mesh, cap=CAP, first=FIRST):
    return dp.DistributedDataParallel(model, mesh["dp"], cap, first)


def batch_at(step, rows=ROWS):
    return random_batch(VOCAB, CONTEXT, rows, seed=1, step=step)


def predicted(model, mesh):
    group = cost.Group(mesh.sizes["dp"], mesh.coords["dp"], chosen)
    return cost.ddp([b.flat.size for b in model.buckets], group, 8)


def traffic(lesson, model, microbatches):
    """Count what forward and backward of one batch send."""
    model.zero_grad()
    with lesson.comm.counting() as counted:
        with step.summing(model, microbatches):
            step.accumulate(model, model.localize(batch_at(0)).split(microbatches))
    return counted


def weighted(make, shares, weights, steps=4):
    """Train one process on weighted shares.  -> its first gradient, its last loss per target"""
    model, grads = model_of(), []
    optimizer = make(model.parameters())
    for _ in range(steps):
        model.zero_grad()
        for share, weight in zip(shares, weights):
            (model(share) * weight).backward()
        grads.append(np.concatenate([p.grad.reshape(-1) for p in model.parameters()]))
        optimizer.step()
    return grads[0], model(batch_at(0)).item() / batch_at(0).count


if __name__ == "__main__":
    kit.run(main)
