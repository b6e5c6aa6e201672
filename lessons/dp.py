"""DATA PARALLELISM      Can p ranks train one model p times as fast, and is it the same training?

  lifts   compute     each rank works on its rows of the batch: time per step / p
  costs   bandwidth   one all_reduce of all gradients per step, whatever the batch
  code    minidist/dp.py, minidist/buckets.py, minidist/placement.py (the gradient rule)
  run     mpirun -n 4 python -m lessons.dp         or: python -m lessons.dp -n 4
"""
from functools import partial

import numpy as np

from lessons import clock, kit, pictures, questions_training, setting, textbook
from minidist import buckets, cost, dp, files, placement, step, trace, verify
from minidist.engine import optim
from minidist.mesh import DeviceMesh
from minidist.ranks.comm import solo

EXERCISE = [dp.share_rows, dp.start_equal, buckets.assign, placement.finalize]
OPTIONS = {"trace": "write the timeline of the overlap as a Chrome/Perfetto trace"}
ROWS, SHARE = 7, 40                                 # of a batch; per rank, where time is measured
CAP, FIRST, ALL = 120_000, 40_000, 1 << 40          # bytes per bucket: some buckets, or one
SGD = partial(optim.SGD, lr=0.5)
LATENCY, BANDWIDTH = 50e-6, 20e6                    # a slow link: 50 us, 20 MB/s


def split_and_sum(lesson):
    """Split the batch, sum the gradients

    The loss is a sum over tokens, so its gradient is a sum over rows, wherever they are: here
    seven, of different numbers of targets. b is blocks.0.norm1.bias."""
    mesh, reference = setting.mesh(lesson.comm, "dp"), setting.model()
    model = dp.parallelize(setting.model(), mesh["dp"])
    mine, b = model.localize(batch_at(0)), model.blocks[0].norm1.bias
    model(mine).backward()
    own = b.grad.copy()
    placement.finalize(model.parameters(), mesh, 1)
    reference(batch_at(0)).backward()
    grads = [own, b.grad, reference.blocks[0].norm1.bias.grad]
    lesson.rows(["rows", "targets", "dL/db of my rows", "sum over ranks", "one process"],
                [str(mine.rows.tolist()), mine.count, *(f"{g[0]:+.6f}" for g in grads)])
    lesson.check("b's gradient, against one process", kit.difference(*grads[1:]), 1e-12)


def sum_or_mean(lesson):
    """Sum or mean? And whose learning rate?

    Divide once, by the targets of the whole batch. Three ways, over 4 ranks:"""
    lesson.table(["gradient", "size", "off by", "loss, SGD", "loss, AdamW"], lesson.share(
        lambda: textbook.divisors(setting.model, batch_at(0), 4, SGD, setting.ADAMW)))
    lesson.say("""
        AdamW divides by the size of the gradient, which hides the factor that ruins SGD: a curve
        that looks right proves nothing. And p ranks of B rows are one batch of p B rows: it may
        want a larger learning rate, as any large batch does; p itself changes nothing.""")


def p_times_as_fast(lesson):
    """p times as fast?

    Gradients fill buckets, from the last layer to the first; a full bucket is summed in the
    background, while backward goes on. Strictly in order, so that messages pair up:"""
    lesson.source(buckets.Reducer.ready, "self.bucket_of", "self.launch")
    lesson.predict("1B parameters, float32 gradients, 8 ranks: each sends per step", 7, "GB",
                   why="2 (p-1)/p x 4 GB", mistakes={3.5: "the sum must also come back",
                                                     28: "that is the root of a plain sum"})
    lesson.predict("7 GB at 50 GB/s, 400 Tflop/s: tokens per GPU until backward hides it?",
                   14000, "tokens", why="140 ms at 4 flops a parameter", mistakes={
                       28000: "4 flops, not 2", 9333: "the sum waits for backward to begin"})
    lines, left = over_a_slow_link(lesson)
    alone = lesson.share(lambda: clock.best(
        lambda: setting.model()(batch_at(0, 2 * SHARE)).backward(), 3))
    lesson.fill(f"""
        Least is visible here with {min(left, key=left.get)}. What cannot hide is the last bucket:
        small ones pay latency, large ones a long tail. One rank takes {kit.duration(alone)} for all
        rows, each of two ranks half of the flops: on this link and this machine two are
        {alone / min(map(trace.length, lines.values())):.2f} times as fast.""")
    lesson.figure(pictures.traces, lines)
    if lesson.options.trace:
        lesson.write(lesson.options.trace, files.numbers(trace.chrome(lines["buckets of 120 kB"])))


def over_a_slow_link(lesson):
    """Run a step on two ranks in three forms.  -> {form: spans}, {form: seconds not hidden}"""
    pair, rows, left = lesson.comm.split(0 if lesson.comm.rank < 2 else None, name="pair"), [], {}
    found = lesson.collect([timeline(pair, form) for form in FORMS.values()] if pair else None)
    lines = {name: trace.spans([notes[i] for notes in found if notes])
             for i, name in enumerate(FORMS)}
    for name, spans in lines.items():
        busy, hidden = trace.hidden(spans)
        left[name] = busy - hidden
        rows.append([name, *map(kit.duration, (trace.length(spans), busy, busy - hidden))])
    lesson.table(["two ranks, 50 us, 20 MB/s", "forward to last sum", "wire busy", "of it visible"],
                 rows)
    return lines, left


def bucketed(model, mesh, cap=CAP, first=FIRST):
    return dp.DistributedDataParallel(model, mesh["dp"], cap, first)


FORMS = {"one all_reduce per parameter": partial(setting.cut, way="dp"),
         "buckets of 120 kB": bucketed, "one bucket": partial(bucketed, cap=ALL, first=ALL)}


def timeline(pair, form):
    """Run a step over the slow link, after a first one.  -> what I noted"""
    mesh = setting.mesh(pair, "dp")
    model = form(setting.model(), mesh)
    mine = model.localize(batch_at(0, SHARE * pair.size))
    with pair.link(LATENCY, BANDWIDTH):
        return [trace.record(model, mine, pair, lambda: placement.finalize(
            model.parameters(), mesh, 1)) for _ in range(2)][-1]


def prove(lesson):
    """Is it the same training, and what does it cost?

    Ragged batches, dropout, two micro-batches, another start on each rank; SGD and AdamW. Then n
    parameters in b buckets; f flags say which were used. Micro-batches send with the last only."""
    comm, mesh = lesson.comm, setting.mesh(lesson.comm, "dp")
    questions_training.of_dp(lesson)
    batches = [batch_at(t) for t in range(3)]
    for name, make in ("SGD", SGD), ("AdamW", setting.ADAMW):
        verdict = verify.train(lambda: start_of(comm.rank), make, bucketed, mesh, batches,
                               num_microbatches=2)
        lesson.verdict(verdict, f"the same training, {name}")
    with comm.counting() as start:
        model = bucketed(setting.shallow(), mesh)
    model.algorithm = "ring"
    sent = [traffic(lesson, model, 1), traffic(lesson, model, 3)]
    everyone = np.array(lesson.collect([*(n for _, n in sent), start.bytes])).sum(0)
    lesson.ledger(("messages of a rank", "b 2(p-1)", None, sent[0][0]),
                  ("bytes of a step, all ranks", "2(p-1) 8 (n+f)", None, everyone[0]),
                  ("the same, 3 micro-batches", "2(p-1) 8 (n+f)", None, everyone[1]),
                  ("bytes at the start, all ranks", "(p-1) 8 n", None, everyone[2]),
                  p=comm.size, b=len(model.buckets), f=len(model.params),
                  n=cost.gpt_parameters(cost.Sizes.of(model.config)))


@kit.breaks(step, "train_step", first="mine =")
def mean_of_means(model, batch, optimizer, mesh=None, num_microbatches=1, max_norm=None):
    """Each rank divides by its own number of targets, then the ranks are averaged.

    A token among few then weighs more than one among many (transformers issue 35203)."""
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

    Nothing fails and every loss falls; the replicas drift apart."""
    self.works.append(self.stream.submit(lambda comm: None))


@kit.breaks(placement, "finalize")
def sum_instead_of_mean(params, mesh, count):
    """Gradients are divided by one rank's share of the targets: p times too large.

    SGD takes steps that are p times too long. AdamW hardly notices: its curve looks right."""
    sum_instead_of_mean.original(params, mesh, count / mesh.sizes["dp"])


@kit.breaks(dp, "start_equal")
def no_broadcast(model, comm):
    """Replicas start from different values, as when every rank seeds by its own number.

    The sum of p models' gradients is the gradient of none of them."""


def start_of(rank):
    model = setting.shallow(dropout=0.1)
    for p, other in zip(model.parameters(), setting.shallow(seed=rank).parameters()):
        p.data[...] = other.data
    return model


def batch_at(step, rows=ROWS):
    return setting.words(rows, step, ragged=True, seed=1)


def traffic(lesson, model, passes):
    """Count what forward and backward of one batch send.  -> messages, bytes"""
    model.zero_grad()
    with lesson.comm.counting() as counted:
        with step.summing(model, passes):
            step.accumulate(model, model.localize(batch_at(0)).split(passes))
    return counted.messages, counted.bytes


TAKEAWAY = "DP buys time with bandwidth, which a larger batch hides; it holds everything p times."
FIELD = "torch DistributedDataParallel (it averages where we sum and divide by tokens), Horovod"
TRY = ["why must the first bucket be small, and what does --trace out.json show?"]
SCREENS = [split_and_sum, sum_or_mean, p_times_as_fast, prove, mean_of_means]

if __name__ == "__main__":
    kit.run(SCREENS)
