"""RECOMPUTATION      What does it cost to forget activations, and compute them again?

  lifts   memory      of what forward leaves for backward, only the inputs of segments are kept
  costs   compute     one more forward of what was forgotten: at most a third more
  code    minidist/recompute.py
  run     mpirun -n 4 python -m lessons.recompute       or: python -m lessons.recompute -n 4
"""
from contextlib import contextmanager
from dataclasses import replace

from lessons import again, kit, setting
from lessons.again import LAYERS, ROWS, apart, over_time, small
from minidist import cost, mappings, recompute
from minidist.engine import data, tape
from minidist.engine.tensor import replaying

EXERCISE = [recompute.checkpoint]
GPT3 = replace(cost.GPT3, B=1)                        # one sequence


def a_saw(lesson):
    """Memory over a step: a hill, or a saw

    Forward piles up what each block needs for its backward, and backward takes it down. With every
    block checkpointed only its input stays; in backward one block at a time is built up again."""
    lesson.predict("GPT-3, 96 layers, one sequence: 2048 x 12288 numbers of 16 bits enter a layer. "
                   "All inputs:", 4.8, "GB", why="50 MB each; all activations are 275 GB",
                   mistakes={0.05: "that is one layer", 2.4: "16 bits are 2 bytes"})
    runs = lesson.share(lambda: {"all kept": over_time(0), "blocks": over_time(1)})
    lesson.table([f"{LAYERS} layers, {ROWS} rows", "forward ends", "at the top", "blocks run"],
                 [[name, kit.size(end), kit.size(max(events)), runs_of_blocks]
                  for name, (end, events, runs_of_blocks) in runs.items()])
    lesson.say("Backward needs what a block's forward made: so it runs again, on the input kept.")
    lesson.figure(again.draw, {name: events for name, (_, events, _) in runs.items()})


def a_third_more(lesson):
    """A third more products

    Backward makes two products for each one of forward. If all of forward runs twice, 3 become 4.
    The head does not run again: its backward follows its forward anyway."""
    lesson.predict("Forward takes 1, backward 2. With one more forward: how many times the step?",
                   1.33, "", why="4 / 3",
                   mistakes={2: "only forward runs twice", 1.5: "backward counts twice"})
    counts = again.counted_once(lesson, "", *recompute.WHAT)
    plain = sum(counts[""])
    lesson.table(["flops of products", "forward", "backward", "of a plain step"],
                 [[what or "all kept", *map("{:,}".format, both), f"{sum(both) / plain:.3f}"]
                  for what, both in counts.items()])


def square_root(lesson):
    """Segments of sqrt(L) blocks

    Segments of k blocks keep L/k inputs, and k blocks at a time in backward. Large k: few inputs;
    small k: little to build up. Each block runs once more, whatever k. The peak, as counted:"""
    counts = lesson.share(lambda: [(k, max(over_time(k)[1])) for k in (1, 2, 3, 9)])
    lesson.table(["k", "inputs", "at the top: formula", "counted"],
                 [[k, -(-LAYERS // k), kit.size(cost.recomputed_activations(shape(), k)[1]),
                   kit.size(top)] for k, top in counts])
    one, block = (n / 1e9 for n in (GPT3.N * GPT3.D * 2, cost.textbook_activations(GPT3)))
    peaks = {k: 96 / k * one + k * block for k in (1, 2, 3, 10)}
    lesson.fill(f"""
        sqrt(L) is best if a block keeps about as much as one input. Those of a GPT keep much more:
        GPT-3 has its top at {peaks[1]:.1f} GB with k = 1, {peaks[2]:.1f} with 2,
        {peaks[10]:.1f} with 10.""")


def selective(lesson):
    """Forget only what is large and cheap

    The weights of attention are T x T for each head: 5 a s^2 b bytes of a layer's 34 s b h +
    5 a s^2 b. To make them again takes two products of s x s x h, and no collective."""
    lesson.predict("GPT-3: 34 s b h + 5 a s^2 b, a = 96, s = 2048, h = 12288. Share of the second?",
                   70, "%", why="5 a s / h = 80 against 34", mistakes={30: "that is the first"})
    whole = cost.gpt_flops(GPT3)
    kept = {"all kept": cost.textbook_activations(GPT3), "attention": 34 * GPT3.N * GPT3.D,
            "blocks": 2 * GPT3.N * GPT3.D}
    more = {name: 0 if name == "all kept" else cost.recomputed_flops(GPT3, name) for name in kept}
    lesson.table(["GPT-3, one sequence", "kept of 96 layers", "more products"],
                 [[name, kit.size(96 * n), f"{more[name] / whole:.1%}"]
                  for name, n in kept.items()])
    lesson.say("""
        The paper says 2.7 %: it charges three times what the forward of the core takes.""")


def shape(**changes):
    return cost.Sizes.of(small(**changes).config, B=ROWS, w=8)


def prove(lesson):
    """Is it the same, bit for bit, and at what price?

    With dropout, cut over all ranks by tp: every difference must be 0, not merely small."""
    plain, batch = ranked(lesson, None), setting.words(ROWS)
    for what in recompute.WHAT:
        lesson.check(f"{what}: gradients, bit for bit", apart(ranked(lesson, what), plain))
    lesson.check("a function that draws numbers", again.drawing())
    (aux, gradient), times = again.auxiliary(), again.delivered()
    lesson.check("an auxiliary loss counts once", aux + gradient)
    end, events, runs = lesson.share(lambda: over_time(1))
    ends, top = cost.recomputed_activations(shape(), 1, batch.count)
    products = again.counted_once(lesson, "", "blocks")
    extra = sum(products["blocks"]) - sum(products[""])
    sizes = shape()
    lesson.ledger(("bytes when forward ends", "8 N (L D + 2 D+1+V) + 24 N + 8 T", ends, end),
                  ("bytes at the top", "8 N (L D + 16 D+2) + 8 H S + 8 (N+T)", top, max(events)),
                  ("runs of blocks", "2 L", None, runs),
                  ("flops more, means of norms in them", "2 L N (12 D^2 + 2 T D) + 4 L N D", None,
                   extra),
                  ("gradients that a shared weight gets", "1", None, times),
                  **setting.letters(sizes, "NTDHLV", S=ROWS * cost.tiles(sizes.T, sizes.tile)))
    setting.same_training(lesson, setting.reader, blocks_again, setting.mesh(lesson.comm, "tp"),
                          [setting.text(ROWS, step) for step in range(3)])


def blocks_again(model, mesh):
    """Cut a model over all ranks, and let every block be computed again in backward."""
    return recompute.parallelize(setting.cut(model, mesh, "tp"), "blocks")


def ranked(lesson, what):
    """Gradients of a model cut over all ranks, with dropout."""
    mesh = setting.mesh(lesson.comm, "tp")
    model = setting.cut(small(layers=3, dropout=0.1), mesh, "tp")
    if what:
        recompute.parallelize(model, what)
    model(setting.words(ROWS)).backward()
    return [p.grad for p in model.parameters()]


@kit.breaks(tape, "again", first="args")
def new_dropout(fn, *args):
    """The repetition drops other numbers than the forward did.

    The gradients are those of another network. The loss still falls, a little worse."""
    args = [replace(a, step=a.step + 1) if isinstance(a, data.Batch) else a for a in args]
    return new_dropout.original(fn, *args)


@kit.breaks(recompute, "rewound")
@contextmanager
def not_rewound(rng, state):
    """The generator goes on, instead of repeating what it drew.

    Whatever draws from it inside a checkpoint gets new numbers in backward."""
    yield


@kit.breaks(mappings, "reduce_from", first="if replaying")
def skipped_by_one(x, comm):
    """Rank 0 thinks that it can do without the sum when it computes again.

    The others wait for it in a collective that it never enters."""
    if replaying() and comm.rank == 0:
        return x
    return skipped_by_one.original(x, comm)


@kit.breaks(recompute, "checkpoint")
def nothing_forgotten(fn, *args, rng=None):
    """The function runs as it is, and its graph stays.

    All numbers are right: only who counts bytes and runs sees that nothing was gained."""
    return fn(*args)


TAKEAWAY = "Recomputation trades up to a third more work for one input per segment."
FIELD = "torch.utils.checkpoint; Megatron --recompute-granularity; jax.checkpoint"
TRY = ["why does a pipeline with 1f1b gain more from it than one process?"]
SCREENS = [a_saw, a_third_more, square_root, selective, prove, new_dropout]

if __name__ == "__main__":
    kit.run(SCREENS)
