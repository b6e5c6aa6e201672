"""Memory that nobody has written reads as NaN, in every test: a read before the write shows.

np.empty and np.empty_like hand out what lay there before, often zeros, with which a mistake looks
right. Here they are filled: floats with NaN, integers with the largest that their type has, whose
bytes are NaN as well where a buffer of bytes is looked at as floats. In reach is what this process
allocates by these two names; not what NumPy allocates for itself, nor a command in a process of
its own. MINIDIST_TEST_EMPTY=plain leaves both as they are.
"""
import functools
import os

import numpy as np

PLAIN = os.environ.get("MINIDIST_TEST_EMPTY") == "plain"


def fill_what_is_empty():
    """Put filled versions in the place of np.empty and np.empty_like, once."""
    if not PLAIN and not hasattr(np.empty, "unfilled"):
        np.empty, np.empty_like = filled(np.empty), filled(np.empty_like)


def filled(make):
    @functools.wraps(make)
    def empty(*args, **options):
        x = make(*args, **options)
        if x.dtype.kind in "fc":
            x.fill(np.nan)
        elif x.dtype.kind in "iu":
            x.fill(np.iinfo(x.dtype).max)
        return x
    empty.unfilled = make
    return empty
