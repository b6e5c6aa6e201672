"""Models: what the flags of a training ask for, in one process and untrained.

    flags -> configure -> GPTConfig -> plain -> a GPT, with experts if asked for
    its parameters -> make_optimizer -> AdamW or SGD, with its schedule

Whoever trains spreads the model over ranks then, see minidist.parallel; who samples fills it.

Lesson: python -m lessons.step
"""
import numpy as np

from minidist import flags, moe
from minidist.engine import gpt
from minidist.engine.optim import SGD, AdamW, warmup_cosine


def sizes(o):
    """Look up the preset's sizes; flags replace them."""
    replaced = {name: getattr(o, name) for name in flags.SIZES}
    return gpt.sizes(o.preset, **{name: n for name, n in replaced.items() if n is not None})


def configure(o, vocab):
    """Fix the sizes of the model that the flags ask for."""
    return gpt.GPTConfig(vocab=vocab, dropout=o.dropout, **sizes(o))


def plain(o, config):
    """Make the model, in one process."""
    model = gpt.GPT(config, o.seed, np.dtype(o.dtype))
    return moe.replace_mlps(model, moe.asked(o), o.seed) if o.experts else model


def make_optimizer(params, o, config):
    """Make AdamW or SGD; a tenth of the steps warms up, a cosine leads to a tenth of the rate."""
    usual = 0.5 if o.optimizer == "sgd" else 0.75 / config.width
    peak = usual if o.lr is None else o.lr
    rate = warmup_cosine(peak, min(100, o.steps // 10), o.steps, floor=peak / 10)
    if o.optimizer == "sgd":
        return SGD(params, rate, momentum=0.9)
    return AdamW(params, rate, eps=o.eps)
