"""MIXED PRECISION      Which numbers may have 16 bits, and which may not?

  lifts   memory      activations take half the bytes, and bandwidth: so does all that is sent
  costs   accuracy    of 10 bits, or 7: masters of 32 keep what they lose; fp16 scales its losses
  code    minidist/precision.py
  run     mpirun -n 4 python -m lessons.precision       or: python -m lessons.precision -n 4
"""
import numpy as np

from lessons import kit, rounding, setting
from minidist import cost, precision
from minidist.engine import dtypes

EXERCISE = [precision.to_bfloat16, precision.moved, precision.update]


def two_formats(lesson):
    """What 16 bits can say

    The bits of the exponent say how large and how small a number may be, those of the fraction how
    close its neighbour is. fp16 lacks range, bf16 lacks precision."""
    lesson.predict("fp16 stores 10 bits of the fraction. Ones are added one by one: where does the "
                   "sum stop?", 2048, why="2048 + 1 lies between 2048 and 2050: a tie, to even",
                   mistakes={65504: "that is the largest number",
                             1024: "the leading bit is not stored: there are 11"})
    lesson.table(["", "sign, exponent, fraction", "largest", "smallest", "neighbour of 1"], [
        ["fp32", "1 + 8 + 23", "3.4e38", "1.4e-45", "1 + 2^-23"],
        ["fp16", "1 + 5 + 10", "65504", "6.0e-8", "1 + 2^-10"],
        ["bf16", "1 + 8 + 7", "3.4e38", "9.2e-41", "1 + 2^-7"]])


def three_losses(lesson):
    """Three ways to lose a number

    A small gradient vanishes, a sum stalls, a product overflows:"""
    lesson.table(["", "fp16", "bf16", "fp32"], lesson.share(rounding.losses))
    found = lesson.share(rounding.vanished)
    lesson.fill("If the loss is a mean over a million tokens, fp16 turns to 0, of the gradients of "
                "a small GPT's embeddings: "
                + ", ".join(f"{share:.1%} with S = 2^{bits}" for bits, share in found) + ".")
    lesson.say("""
        So S multiplies the loss. And sums, those of products, norms, softmax and the loss, are made
        in 32 bits and rounded once:""")
    lesson.source(dtypes.product, "y = widened(a)", "y = widened(a)")
    lesson.figure(rounding.draw)


def masters(lesson):
    """A master keeps what is less than half a step

    The optimizer writes fp32 masters; the fp16 parameters are their rounded copies."""
    lesson.predict("w = 1 in fp16, whose neighbour is 1 + 2^-10. Each step adds 2^-14. Which step "
                   "moves the copy?", 9, why="after the 8th it is a tie, which goes to the even 1",
                   mistakes={8: "a tie goes to even", 16: "it goes to the nearer neighbour"})
    lesson.table(["after step", "master - 1", "fp16 copy - 1", "fp16 without a master, - 1"],
                 rounding.by_small_steps((8, 9, 32)))
    (plain, half, brain) = (cost.state_bytes(form) for form in (None, "fp16", "bf16"))
    lesson.table(["bytes of each", "parameter", "gradient", "master and moments", "all"],
                 [[name, *each, sum(each)] for name, each in
                  (("fp32", plain), ("fp16", half), ("bf16", brain))])
    lesson.say("P + G + O gain nothing. Activations and messages do: they are half as large.")


def up_and_down(lesson):
    """The scale finds its place

    Too large a scale overflows: the step is skipped, by all ranks, and S is halved, except at the
    first overflow. After a window of clean steps S is doubled."""
    lesson.predict("S starts at 2^32; gradients overflow above 2^7. How many steps are skipped?",
                   26, "steps", why="25 halvings, and the first overflow is let pass",
                   mistakes={25: "the first overflow is let pass"})
    steps = lesson.share(rounding.scales)
    lesson.say("A small GPT, window 4: log2 S of each step, * where it was skipped\n"
               "  " + " ".join(f"{bits}{'*' * skipped}" for bits, skipped in steps))
    lesson.source(precision.overflowed, "mine = any")


def prove(lesson):
    """Is it right, and what is held and sent?

    Real fp16 on the ranks against real fp16 in one process: near. In float64, with rounded
    parameters, masters and S: equal."""
    rounding.ask(lesson)
    p, n = lesson.comm.size, sum(x.size for x in rounding.small().parameters())
    lesson.check("updates of less than half a step", rounding.small_updates())
    lesson.check("a loss of 20,000 tokens", rounding.long_loss(), 1e-6)
    lesson.check("infinite on the last rank of tp: nothing moves", rounding.skip(lesson.comm))
    lesson.check("fp16, gradients on ranks and alone", rounding.apart(lesson), 2.0 ** -6)
    held, sent, flags = rounding.counted(lesson)
    lesson.ledger(("bytes of parameters", "2 n", None, held.parameters),
                  ("bytes of gradients", "2 n", None, held.gradients),
                  ("masters and moments", "12 n", None, held.optimizer),
                  ("gradients sent by all ranks", "2(p-1) 2 (n+f)", None, sent),
                  p=p, n=n, f=flags)
    lesson.verdict(rounding.same(setting.mesh(lesson.comm, "dp")))


@kit.breaks(precision, "overflowed")
def alone(params, mesh):
    """Each rank looks for overflow in its own gradients alone.

    Where gradients are summed over ranks, all see it. A piece that one rank alone holds, as under
    tp or ZeRO, it alone skips; the others go on to the norm, where they wait for it."""
    return any(not np.isfinite(p.grad).all() for p in params if p.grad is not None)


@kit.breaks(precision, "clip_scale")
def clipped_first(norm, max_norm):
    """Gradients are clipped before they are unscaled: to a norm of max_norm / S.

    Training all but stands still; seen in Lightning, where the loss still fell a little."""
    return clipped_first.original(1024 * norm, max_norm)


@kit.breaks(precision, "round_masters")
def rebuilt(optimizer, low, form):
    """Masters are made anew from their rounded copies after every step.

    What is less than half a step is lost, as if there were no masters."""
    rebuilt.original(optimizer, low, form)
    for p in optimizer.params:
        optimizer.masters[p.name][...] = low(p)[0]


@kit.breaks(precision, "to_bfloat16")
def cut_off(x):
    """bfloat16 is made by dropping the lower 16 bits.

    Every number moves towards zero: on average by half a step, at each rounding."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@kit.breaks(precision, "moved")
def refilled(scale, overflow):
    """A clean step refills the hysteresis: overflows with clean steps between never halve S.

    Half of all steps may be skipped, for ever."""
    scale = refilled.original(scale, overflow)
    return scale if overflow else scale._replace(left=scale.hysteresis)


@kit.breaks(precision, "update")
def time_goes_on(optimizer, *rest):
    """A skipped step counts as a step: the learning rate moves on, and Adam's bias correction.

    Seen in accelerate and NeMo: a run that starts with twenty skipped steps misses its warm-up."""
    norm = time_goes_on.original(optimizer, *rest)
    optimizer.t += np.isinf(norm)
    return norm


@kit.breaks(precision, "wide_loss")
def narrow(loss, logits, targets):
    """The loss is summed in fp16, whose largest number is 65504.

    With few tokens nothing is wrong."""
    return loss(logits, targets)


TAKEAWAY = "16 bits for what is moved and multiplied, 32 for what is summed, and for what is kept."
FIELD = "torch.amp, GradScaler; Megatron --fp16, --bf16; DeepSpeed fp16, bf16"
TRY = ["why does a loss that is a sum over tokens vanish less, and overflow more, than a mean?"]
SCREENS = [two_formats, three_losses, masters, up_and_down, prove, alone]

if __name__ == "__main__":
    kit.run(SCREENS)
