"""Closed forms: what every technique sends, holds and waits for, before it runs.

Bytes are bytes *sent* by one rank.  Imports nothing but math, knows no array and no rank but its number.
"""
import math
from typing import NamedTuple


# === Collectives ===

def chunks(n, p):
    """The one chunking rule: p lengths that add up to n, the first n mod p are one longer.

    As np.array_split cuts."""
    return [n // p + (r < n % p) for r in range(p)]
