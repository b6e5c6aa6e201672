"""PIPELINE SCHEDULES      Where does the bubble go when stages are cut finer, or backward in two?

  lifts   compute     the idle time of 1F1B: by v with v chunks per rank, to a third with ZB-H1
  costs   bandwidth   v times the messages; or memory: as many activations alive on every rank
  code    minidist/schedules.py, simulate.py
  run     python -m lessons.schedules
"""
from fractions import Fraction

from lessons import kit
from minidist import schedules
from minidist.simulate import cost, draw, lines, numbers, peak_live

ALONE = True
EXERCISE = [schedules.interleaved, schedules.zb_h1]
POINTS = {"interleaved": 2, "zb_h1": 2}


def timeline(name, p, m, v=None):
    """F, I and W take one unit each, B takes two; in fractions, so that thirds are exact."""
    return cost(schedules.make(name, p, m, v), *map(Fraction, (1, 1, 1)), message=Fraction(0))


def show(lesson, *timelines):
    """Draw schedules as text."""
    for t in timelines:
        s = t.schedule
        lesson.say(f"{s.name}" + (f", {s.v} chunks: an action takes 1/{s.v}" if s.v > 1 else ""))
        lesson.say("\n".join(lines(t, 96, ascii=True)))


def finer_stages(lesson):
    """Interleaving: start before a whole stage is ready

    A rank idles until the first micro-batch has come through all stages before its own. So cut the
    layers into p v stages and deal them like cards: rank 0 has stages 0, p, 2p, ... Now the first
    micro-batch is with the last rank after p - 1 chunks, not p - 1 whole ranks' layers."""
    lesson.predict("8 ranks, 16 micro-batches, 4 chunks each: idle time / working time?", 10.9, "%",
                   why="(p-1) / (v m)", mistakes={43.8: "that is 1F1B: divide by the chunks",
                                                  9.9: "that is the share of the whole time"})
    show(lesson, timeline("1f1b", 3, 3), timeline("interleaved", 3, 3, 2))
    lesson.say("FBW: what; number: micro-batch; a, b: chunk. live: graphs held at once, in chunks.")


def backward_in_two(lesson):
    """Zero bubble: nobody waits for a weight gradient

    Backward computes two things. The gradient of the input (I) is what the stage before waits for.
    The gradients of the weights (W) are needed at the end of the step only: W fills the gaps."""
    lesson.predict("F = I = W: how much of 1F1B's idle time is left?", 33, "%",
                   why="each of p - 1 waits was F + B = 3 units, and is F + I - W = 1",
                   mistakes={50: "B was two units: one goes, and W takes one more off",
                             67: "F + I are on the way there and back, but W fills one of them"})
    show(lesson, timeline("1f1b", 3, 4), timeline("zb-h1", 3, 4))
    lesson.say("""
        Before: gaps between the last B's of rank 0. After: W's are there. A W needs what its F
        kept, so the last rank, which had one graph alive, now has as many as the first.""")


def there_and_back(lesson):
    """Folded: the rank that starts first also ends first

    Two chunks per rank, the second dealt backwards: rank 0 has the first and the last stage. If
    F = I = W, zb-v has no gap in any rank: what is left is that ranks start one after another."""
    show(lesson, timeline("zb-v", 2, 3), timeline("dualpipe-v", 2, 3))
    rows = [numbers(timeline(name, 8, 32, 2 if name == "interleaved" else None))
            for name in schedules.ORDERS]
    lesson.table(["8 ranks, 32 micro-batches", "idle / work", "idle / all", "gaps", "live",
                  "messages"],
                 [[r["schedule"], f"{float(r['bubble_of_ideal']):.3f}",
                   f"{float(r['bubble_of_total']):.3f}", f"{float(max(r['gaps'])):g}",
                   f"{max(r['live']) / r['chunks']:g}", r["messages"]] for r in rows])
    lesson.figure(pictures)


def pictures(figure):
    made = [timeline(name, 4, 8) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")]
    figure.set_size_inches(11, 10)
    for axes, t in zip(figure.subplots(len(made)), made):
        draw(axes, t)
        axes.set_xlim(0, float(made[0].makespan))


def prove(lesson):
    """Are they complete, and is the idle time what the formula says?

    Every list is checked: each pass once, in order, sends match receives, nobody waits in a circle;
    then it is timed. Ratios are exact, in fractions."""
    wrong, uneven, live = 0, 0, 0
    for p, m, v in ((2, 4, 2), (3, 6, 3), (4, 8, 2), (4, 12, 3), (3, 7, 2)):
        made = schedules.make("interleaved", p, m, v)
        wrong += faults(made)
        uneven += wrong == 0 and cost(made, 3, 3, 3).makespan != 9 * m + 9 * (p - 1) / v
        if m % p == 0:
            live += sum(peak_live(actions) != min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v)
                        for r, actions in enumerate(made.actions))
    lesson.check("interleaved: lists without a fault", wrong)
    lesson.check("interleaved: idle (p-1)(F+B) / v", uneven)
    lesson.check("interleaved: live 2(p-1-r) + (v-1) p + 1", live)
    wrong, uneven, live = 0, 0, 0
    for p, m in ((1, 3), (2, 2), (3, 5), (4, 9), (4, 2)):
        made = schedules.make("zb-h1", p, m)
        wrong += faults(made)
        for times in ((1, 1, 1), (5, 6, 4)) if m >= p and not wrong else ():
            F, I, W = times                                                        # noqa: E741
            uneven += cost(made, *times).makespan != m * sum(times) + (p - 1) * (F + I - W)
        live += sum(peak_live(actions) != min(p, m) for actions in made.actions)
    lesson.check("zb-h1: lists without a fault", wrong)
    lesson.check("zb-h1: idle (p-1)(F+I-W)", uneven)
    lesson.check("zb-h1: live min(p, m) on every rank", live)


def faults(made):
    """Count what the checker finds: 0 or 1."""
    try:
        schedules.check(made)
        return 0
    except (ValueError, KeyError, IndexError):
        return 1


@kit.breaks(schedules, "interleaved", first="order")
def warms_up_like_1f1b(rank, p, m, v):
    """The warm-up counts chunks of one round only, as 1F1B does.

    Rank 0 then wants a gradient back before its last chunk has been forward: a circle of waits."""
    order = [(i, c) for first in range(0, m, p) for c in range(v)
             for i in range(first, min(first + p, m))]
    warmup = min(p - rank - 1, m * v)
    for k in range(m * v + warmup):
        if k < m * v:
            yield "F", *order[k]
        if k >= warmup:
            i, c = order[k - warmup]
            yield "B", i, v - 1 - c


@kit.breaks(schedules, "zb_h1", first="for kind")
def weights_at_once(rank, p, m):
    """W follows its I at once, so nothing is left to fill the gaps.

    Right, and as slow as 1F1B: splitting backward alone wins nothing, putting W off does."""
    for kind, i in schedules.one_f_one_b(rank, p, m):
        yield ("I" if kind == "B" else kind), i
        if kind == "B":
            yield "W", i


@kit.breaks(schedules, "zb_h1", first="for kind")
def last_weights_lost(rank, p, m):
    """The W's that are still put off at the end are never run.

    The loss falls all the same: a few micro-batches do not count in a few layers."""
    late = 0
    for kind, i in schedules.one_f_one_b(rank, p, m):
        yield ("I" if kind == "B" else kind), i
        if kind == "B" and i - late >= rank:
            yield "W", late
            late += 1


TAKEAWAY = "A bubble is a wait for a neighbour: shorten what is waited for, or have work put by."
FIELD = ("Megatron-LM --num-layers-per-virtual-pipeline-stage; ScheduleInterleaved1F1B, "
         "ScheduleZBVZeroBubble, ScheduleDualPipeV in torch.distributed.pipelining")
TRY = ["python -m minidist.simulate --schedule all -p 8 -m 16 --message 0.5: who suffers most?",
       "when is W longer than its gap? try --F 1 --I 1 --W 3 and look at zb-h1"]
SCREENS = [finer_stages, backward_in_two, there_and_back, prove, weights_at_once]

if __name__ == "__main__":
    kit.run(SCREENS)
