"""Mixed precision: compute in 16 bits, and keep in 32 what 16 bits would lose.

                       sign   exponent   fraction    largest     smallest    step at 1
    float32  fp32        1        8         23       3.4e38      1.4e-45     2^-23
    float16  fp16        1        5         10       65504       6.0e-8      2^-10
    bfloat16 bf16        1        8          7       3.4e38      9.2e-41     2^-7

A step in fp16, in its order:

    losses * S -> backward in fp16 -> sums over ranks -> overflow on any rank?
                                                             yes: skip, on all ranks
                                                             no:  / (S * targets) -> norm, clip
    fp16 parameters <- round <- fp32 masters <- optimizer <--------------------------------+
    then S moves: halved after overflows, doubled after many clean steps

S, the loss scale, lifts small gradients above 6e-8, where fp16 ends; a power of two only moves
the exponent.  The masters keep updates that are less than half a step of the 16-bit parameter.
bf16 has the range of fp32, so it needs masters and no S.

What stays in 32 bits: sums (products, norms, softmax, the loss), because a sum of n terms stalls
once it is 2^11 times larger than they are; the masters; the optimizer's moments.

What is real here, and what is not.  fp16 is NumPy's float16: 2 + 2 + 12 bytes per parameter, in
arrays and in messages (but keys and values that a ring of cp passes around are float32).  NumPy has
no bfloat16: such numbers lie in float32 arrays, and are rounded where modules begin and end, so the
rounding is real and the 2 bytes are not.  Gradients of bf16 weights stay float32.  Nothing is
faster: products are computed in float32 and rounded, since NumPy has no 16-bit BLAS.  A float64
model gets rounded parameters, masters and S, and nothing else: so `verify` can compare a step with
one process to 1e-11.

Price: skipped steps, and one message of 4 bytes per step.  P + G + O stay 16 bytes per parameter:
see cost.state_bytes.  Gain: activations, and what is sent, / 2.
Lesson: mpirun -n 4 python -m lessons.precision
Paper:  Micikevicius et al. 2018, "Mixed precision training"; Kalamkar et al. 2019, "A study of
        BFLOAT16 for deep learning training"; Megatron-LM's grad_scaler (when S moves)
"""
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from minidist.engine.optim import clip_scale
from minidist.engine.tape import scale_losses
from minidist.engine.tensor import Tensor, cast
from minidist.placement import agree, finalize, grad_norm

FORMS = "fp16", "bf16"
START = 2.0 ** 8                # of a sum over tokens: over 256 of them, what 2^16 is of their mean


# ------------------------------------------------------------------------ rounding

def to_bfloat16(x):
    """Round float32 to the nearest bfloat16, ties to even.  -> float32 whose low 16 bits are 0

    What is too large becomes infinite; NaN stays NaN."""
    bits = x.view(np.uint32)
    odd = bits >> 16 & 1                                    # of the last bit that is kept
    near = (bits + (odd + 0x7FFF)) & 0xFFFF0000             # past the middle, it carries
    return np.where(np.isnan(x), x.dtype.type(np.nan), near.view(np.float32))


def rounded(x, form):
    """Round to fp16 or bf16, in whichever array can hold it; float64 stays float64."""
    y = x.astype(np.float16) if form == "fp16" else to_bfloat16(x.astype(np.float32, copy=False))
    return y.astype(np.float64) if x.dtype == np.float64 else y


# ------------------------------------------------------------------------ the model

def use(model, form):
    """Let a model hold its parameters, and compute, in 16 bits.  form: fp16, bf16 or None

    After whatever cuts its layers, and before what makes buffers of parameters."""
    if form is None:
        return model
    model.precision = form
    for p in model.parameters():
        p.data = rounded(p.data, form)
    if model.parameters()[0].dtype == np.float64:
        return model
    head = model.parts.get("head")
    if form == "bf16":
        for module in {m for part in model.parts.values() for m in part.modules()} - {head}:
            module.wrap(round_around)
    elif head is not None:
        head.loss = partial(wide_loss, head.loss)
    return model


def wide_loss(loss, logits, targets):
    """Take the loss of float16 logits in float32: in 16 bits a sum over tokens ends at 65504."""
    return loss(cast(logits, np.float32), targets)


def round_around(forward, *args):
    """Run a module on rounded inputs, and round what comes out; gradients on their way as well."""
    return round_tensor(forward(*map(round_tensor, args)))


def round_tensor(x):
    """Round a Tensor to bf16, and its gradient; what is no Tensor stays as it is."""
    if not isinstance(x, Tensor):
        return x
    return Tensor(to_bfloat16(x.data), (x,), lambda g: (to_bfloat16(g),))


# ------------------------------------------------------------------------ the optimizer

def attach(optimizer, form, scale=None):
    """Let an optimizer write 32-bit masters, and round them to the 16-bit parameters after.

    After what decides which piece is written (ZeRO).  scale: a LossScale; fp16 starts at START."""
    if form is None:
        return optimizer
    low, masters = optimizer.target, optimizer.masters
    for p in optimizer.params:
        if p.requires_grad:                                 # a copy, whatever the dtype
            w = low(p)[0]
            masters[p.name] = w.astype(np.result_type(w, np.float32))

    def target(p):
        w, g = low(p)
        return masters.get(p.name, w), g

    optimizer.target = target
    optimizer.after_step.insert(0, partial(round_masters, optimizer, low, form))
    if form == "fp16":
        optimizer.loss_scale = scale or LossScale(START)
        optimizer.counters += ("loss_scale",)
    return optimizer


def round_masters(optimizer, low, form):
    """Write every master, rounded, to the parameter that the model computes with.

    low(p) -> where it is written, and its gradient."""
    for p in optimizer.params:
        if p.name in optimizer.masters:
            low(p)[0][...] = rounded(optimizer.masters[p.name], form)


# ------------------------------------------------------------------------ the loss scale

class LossScale(NamedTuple):
    """Hold S, and what decides when it moves; the rule and its numbers are Megatron's."""
    value: float = 2.0 ** 32
    window: int = 1000                                      # clean steps until S doubles
    hysteresis: int = 2                                     # overflows until S is halved
    minimum: float = 1.0
    clean: int = 0                                          # steps since S doubled or overflowed
    left: int = 2                                           # of the hysteresis


def moved(scale, overflow):
    """Move S after a step: down at the last overflow that is let pass and at each one after it, up
    after a window of clean steps, which alone restores the hysteresis.  -> LossScale"""
    if overflow:
        left = scale.left - 1
        value = scale.value if left > 0 else max(scale.value / 2, scale.minimum)
        return scale._replace(value=value, clean=0, left=left)
    if scale.clean + 1 < scale.window:
        return scale._replace(clean=scale.clean + 1)
    return scale._replace(value=scale.value * 2, clean=0, left=scale.hysteresis)


@contextmanager
def scaled(scale):
    """Multiply every loss by S in here, and say nothing of overflows; None: do nothing."""
    if scale is None:
        yield
        return
    with scale_losses(scale.value), np.errstate(over="ignore", invalid="ignore"):
        yield


def overflowed(params, mesh):
    """Say, on all ranks alike, whether any gradient on any rank is infinite or NaN.  Collective"""
    mine = any(p.grad is not None and not np.isfinite(p.grad).all() for p in params)
    return bool(agree([mine], mesh[tuple(mesh.sizes)])[0])


def update(optimizer, params, mesh, count, max_norm):
    """Update from sums of scaled gradients, unless one has overflowed; then move S.  -> norm

    The norm is that of the true mean gradient, before clipping; inf: this step was skipped, and
    nothing but S has moved.  Divisions are left to the optimizer, which makes them in 32 bits.
    Collective.  Raises FloatingPointError if S could only fall below its minimum."""
    scale = optimizer.loss_scale
    finalize(params, mesh, 1)
    overflow = overflowed(params, mesh)
    norm = np.inf
    if not overflow:
        unscale = 1 / (scale.value * count)
        norm = grad_norm(params, mesh) * unscale
        optimizer.step(clip_scale(norm, max_norm) * unscale)
    elif scale.left <= 1 and scale.value <= scale.minimum:
        raise FloatingPointError(f"gradients overflow float16 even at the smallest loss scale, "
                                 f"{scale.minimum:g}: no step was taken, nothing has changed")
    optimizer.loss_scale = moved(scale, overflow)
    return norm
