"""Small models for tests: every size different from its neighbours, nothing zero."""
import numpy as np

from minidist.engine.gpt import GPT, GPTConfig
from minidist.verify import SMALL, perturb                                         # noqa: F401

TINY = SMALL


def tiny(dtype=np.float64, seed=0, **over):
    """Make a GPT small enough for central differences; keyword arguments replace its sizes."""
    return GPT(GPTConfig(**{**TINY, **over}), seed, dtype)
