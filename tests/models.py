"""Small models for tests: every size different from its neighbours, nothing zero."""
import numpy as np

from minidist.engine.gpt import GPT, GPTConfig
from minidist.engine.nn import init

TINY = dict(vocab=13, context=8, width=16, heads=4, layers=3, kv_heads=2, dropout=0.0, tied=True)


def tiny(dtype=np.float64, seed=0, **over):
    """Make a GPT small enough for central differences; keyword arguments replace its sizes."""
    return GPT(GPTConfig(**{**TINY, **over}), seed, dtype)


def perturb(model, std=0.1):
    """Move every parameter by noise from its name, so that no bias is 0 and no norm is 1."""
    for p in model.parameters():
        p.data += init("noise." + p.name, p.full_shape, seed=1, std=std, dtype=p.dtype)
    return model
