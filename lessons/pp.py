"""PIPELINE PARALLELISM      Can four ranks each hold a quarter of the layers, and all be busy?

  lifts   memory      parameters, gradients, optimizer state / p; a layer stays whole
  costs   compute     (p-1)/m of the working time is idle: the bubble; and p activations on rank 0
  code    minidist/pp.py, schedules.py
  run     mpirun -n 4 python -m lessons.pp         or: python -m lessons.pp -n 4
"""
from functools import partial

import numpy as np

from lessons import kit, setting
from minidist import cost, pp, schedules
from minidist.mesh import DeviceMesh
from minidist.placement import everything, finalize
from minidist.simulate import draw, lines, peak_live
from minidist.simulate import cost as timed

EXERCISE = [schedules.one_f_one_b, pp.act]
POINTS = {"act": 2}
ROWS, M = 12, 6


def one_stage_at_a_time(lesson):
    """One stage at a time

    Cut the list of layers into p stages, one per rank. Forward sends x [B, T, D] to the right,
    backward sends its gradient to the left. But with one batch, all ranks but one wait."""
    lesson.predict("4 ranks, one batch at a time: what share of all time is idle?", 75, "%",
                   why="(p-1)/p: one rank of p works", mistakes={25: "that is the share that works",
                                                                  300: "that is idle / working"})
    model = pp.split(setting.model(), setting.mesh(lesson.comm, "pp")["pp"])
    lesson.rows(["holds", "parameters"], [
        f"{list(model.parts)[0]} ... {list(model.parts)[-1]}",
        sum(p.data.size for p in model.parameters())])
    lesson.say("naive, 4 ranks, 2 micro-batches one after the other:")
    lesson.say("\n".join(lines(timeline("naive", 4, 2), 96, ascii=True)))


def timeline(name, p, m):
    return timed(schedules.make(name, p, m))


def micro_batches(lesson):
    """Micro-batches: GPipe, then 1F1B

    Cut the batch into m pieces, and send each on as soon as it is ready (GPipe). 1F1B starts
    backward as early as it can. Same idle time! What it saves is memory."""
    lesson.predict("8 ranks, 32 micro-batches, 1F1B: graphs alive at once on rank 3?", 5,
                   why="p - r: then the first gradient is back",
                   mistakes={32: "that is GPipe, which keeps all of them", 8: "that is rank 0"})
    for name in ("gpipe", "1f1b"):
        lesson.say(f"{name}, 3 micro-batches on 3 ranks:")
        lesson.say("\n".join(lines(timeline(name, 3, 3), 96, ascii=True)))
    lesson.figure(pictures)


def pictures(figure):
    for axes, name in zip(figure.subplots(3), ("naive", "gpipe", "1f1b")):
        draw(axes, timeline(name, 4, 8 if name != "naive" else 3))


def how_many(lesson):
    """How many micro-batches?

    Slots are counted in the lists, F one slot and B two. Two ratios are called "bubble": idle over
    working time, (p-1)/m, and idle over all time, (p-1)/(m+p-1). From m = 4p on it is small."""
    p, rows = 4, []
    for m in (1, 4, 8, 16, 32):
        t = timeline("1f1b", p, m)
        live = [max(timeline(name, p, m).live) for name in ("gpipe", "1f1b")]
        rows.append([m, int(sum(t.idle)), int(sum(t.work)), f"{t.bubble_of_ideal:.3f}",
                     f"{t.bubble_of_total:.3f}", *live])
    lesson.table(["m (p = 4)", "idle slots", "working", "idle / work", "idle / all", "live, gpipe",
                  "live, 1f1b"], rows)
    sizes = cost.Sizes.of(setting.model().config, B=ROWS, w=8)
    border = cost.pp(sizes, cost.Group(4, 1), M).bytes
    layers = sum(cost.tp(sizes, setting.group(4, 1)), cost.messages.NOTHING).bytes
    lesson.say(f"""
        What moves: a rank inside the pipeline sends {kit.size(border)} per step, x and its gradient
        once each; tensor parallelism of the same model, batch and ranks {kit.size(layers)}, in
        every layer. So stages may lie on slow wires. One version of the weights is enough: each
        step ends with an empty pipeline (a flush).""")


def passes(comm, name, model, batch):
    """The sums of a step's gradients, gathered, and what went over the wire and was alive."""
    with DeviceMesh(comm, pp=comm.size) as mesh:
        pp.split(model, mesh["pp"], name)
        alive, late = [], []

        def listen(run, action, *_):
            alive.append(len(run.live) + len(run.late))
            if action[0] == "I":
                late.append(len(run.late.get(action[1:], ())))

        model.pipeline.listeners.append(listen)
        with comm.counting() as counted:
            loss = model.passes(model, batch.split(M))
        finalize(model.parameters(), mesh, 1)
        for p in model.parameters():
            p.data = np.zeros_like(p.data) if p.grad is None else p.grad
        return loss, everything(model.parameters(), mesh), counted, max(alive), late


PARTS = {"the embedding, held by both ends": lambda n: n.startswith("embed.wte"),
         "matrices and biases": lambda n: ".weight" in n and not n.startswith("embed.w")
         and "norm" not in n,
         "norms of the last stage": lambda n: n.startswith("head.norm"),
         "norms of the stages before": lambda n: n.startswith("blocks.0.norm")}


def prove(lesson):
    """Is it the same training?

    A step by 1f1b, and one by zb-h1 (backward in two halves), against one process: all gradients,
    a tied embedding on both ends, ragged rows. Then messages, bytes, and graphs alive."""
    comm, batch, model = lesson.comm, setting.words(ROWS, ragged=True), setting.model()
    _, found, border, live, _ = passes(comm, "1f1b", setting.model(), batch)
    _, split, _, alive, late = passes(comm, "zb-h1", setting.model(), batch)
    model(batch).backward()
    ref = {p.name: p.grad for p in model.parameters()}
    for part, inside in PARTS.items():
        lesson.check(part, max(kit.difference(grads[n], ref[n])
                               for grads in (found, split) for n in ref if inside(n)), 1e-11)
    p, r = comm.size, comm.rank
    made = schedules.make("1f1b", p, M)
    lesson.check("1f1b: graphs alive min(p - r, m), also in its list", float(
        live != min(p - r, M) or peak_live(made.actions[r]) != min(p - r, M)))
    lesson.check("zb-h1: graphs alive min(p, m), each I puts work off", float(
        alive != min(p, M) or len(late) != M or not all(late)))
    sizes = cost.Sizes.of(model.config, B=ROWS, w=8)
    price, ends = cost.pp(sizes, cost.Group(p, r), M), int(r > 0) + int(r < p - 1)
    lesson.ledger(("messages, E neighbours", "E m", price.messages, border.messages),
                  ("bytes", "E (B T D w + 32 m)", price.bytes, border.bytes),
                  E=ends, m=M, B=ROWS, T=sizes.T, D=sizes.D, w=8)


def the_same_run(lesson):
    """A short training run

    SGD, real text, dropout, 5 steps of 4 micro-batches; on a rank alone and by 1f1b."""
    def spread(model, mesh):
        run = pp.split(model, mesh["pp"]).passes
        model.passes = lambda model, batches: run(model, batches[0].split(4))
        return model

    batches = [setting.text(4, step) for step in range(5)]
    setting.same_training(lesson, partial(setting.reader, layers=4), spread,
                          setting.mesh(lesson.comm, "pp"), batches)


@kit.breaks(pp, "place", first="for p")
def untied(model, *args):
    """The two copies of the tied embedding each step on their own gradient.

    Megatron-LM users have seen the head come untied so; the loss falls all the same."""
    untied.original(model, *args)
    for p in model.parameters():
        p.partial.clear()


@kit.breaks(pp.Run, "backward")
def scaled(self, i, chunk, g, put_off):
    """Backward starts from 1/m, though the loss is a sum that is divided by its tokens later.

    torchtitan's gradients once differed so with and without pipeline; the printed loss did not."""
    g = np.array(1 / len(self.batches)) if g is None else g
    return scaled.original(self, i, chunk, g, put_off)


@kit.breaks(pp, "run_deferred")
def dropped(late):
    """The weight gradients that were put off are dropped.

    Norms, whose gradients are not put off, go on learning."""


@kit.breaks(pp.Run, "backward", first="other")
def another_s_graph(self, i, chunk, g, put_off):
    """Backward takes the graph of another micro-batch, if one is alive.

    DeepSpeed had one buffer too few: micro-batch 2 overwrote what micro-batch 0 still needed."""
    other = max(self.live)
    self.live[i, chunk], self.live[other] = self.live[other], self.live[i, chunk]
    return another_s_graph.original(self, i, chunk, g, put_off)


@kit.breaks(pp.Run, "take_in", first="for request", sync=True)
def send_before_receive(self, action):
    """A rank waits until its results have arrived before it posts the next receive.

    Its neighbour does the same: each waits to send. With small messages nobody notices."""
    for request in self.going:
        request.wait()
    self.coming.clear()
    self.post(action)
    return send_before_receive.original(self, action)


TAKEAWAY = "A pipeline buys memory with idle time, and m micro-batches make that time (p-1)/m."
FIELD = ("Megatron-LM --pipeline-model-parallel-size, GPipe, PipeDream-Flush = 1F1B; "
         "torch.distributed.pipelining Schedule1F1B")
TRY = ["which number of screen 3 changes when T doubles, and which do not?",
       "where does the bubble go when backward is cut in two? next: lessons.schedules"]
SCREENS = [one_stage_at_a_time, micro_batches, how_many, prove, the_same_run, untied]

if __name__ == "__main__":
    kit.run(SCREENS)
