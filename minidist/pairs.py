"""Pairs: which two techniques cannot train together, each with its reason.

Whatever is not in TABLE composes, and `python -m minidist.verify --sweep` trains every pair beside
one process to prove it. What a technique needs, such as --sp the ranks of --tp, and sizes that do
not fit, are refused where they are known; here is what no size would mend.

Run: python -m minidist.verify --sweep
"""
from typing import NamedTuple

from minidist import BadInput


class Pair(NamedTuple):
    """Two techniques, by their names in the sweep; met(flags, axis sizes): are both asked for?"""
    one: tuple
    other: tuple
    met: object
    reason: str


RINGS = "cp ring", "cp zigzag"
BITS = "fp16", "bf16"


def ring(o, sizes):
    return sizes["cp"] > 1 and o.cp_method != "ulysses"


TABLE = [
    Pair(("zero 2", "zero 3"), ("pp", "pp interleaved"),
         lambda o, sizes: sizes["pp"] > 1 and (o.zero or 0) > 1,
         "--zero {zero} would send gradients after each micro-batch of each stage of --pp; "
         "use --zero 1, or leave out --pp"),
    Pair(("recompute attention",), ("tiled", *RINGS),
         lambda o, sizes: o.recompute == "attention" and (
             o.attention == "tiled" or ring(o, sizes)),
         "--recompute attention saves the T x T weights, which attention in tiles "
         "(--attention tiled, and every ring of --cp) does not keep; leave it out, or use "
         "--recompute blocks"),
    Pair(("recompute sqrt",), ("pp", "pp interleaved"),
         lambda o, sizes: o.recompute == "sqrt" and sizes["pp"] > 1,
         "--recompute sqrt joins several layers to one part, and the schedule of --pp {pp} knows "
         "its parts one by one; use --recompute blocks"),
    Pair(("sp",), ("experts", "ep"),
         lambda o, sizes: o.sp and o.experts,
         "--sp would give a router only some of the tokens that its experts work on; leave it "
         "out, or --experts"),
    Pair(BITS, ("offload",),
         lambda o, sizes: o.precision and o.offload,
         "--offload moves what the optimizer writes together with its state, and the masters of "
         "--precision are of another size than the parameters and their gradients; leave out one "
         "of the two"),
    Pair(BITS, ("experts", "ep"),
         lambda o, sizes: o.precision and o.experts,
         "a router in 16 bits would choose other experts wherever two scores are as good as "
         "equal, so --experts is for float32; leave out --precision"),
    # Any two of these three can.
    Pair(("ep",), ("zero 3 with offload",),
         lambda o, sizes: (o.ep or 1) > 1 and o.zero == 3 and o.offload,
         "--offload moves what --zero 3 has cut to pieces, and the experts of --ep are not; "
         "use --zero 1 or 2, or leave out --offload"),
]


class Flags(dict):
    """Flags by name; one that was not given is None."""

    def __getattr__(self, name):
        return self.get(name)


def refuse(args, sizes):
    """Raise BadInput, with its reason, for the first pair of the table that is asked for."""
    o = Flags(vars(args) if hasattr(args, "__dict__") else args._asdict())
    for pair in TABLE:
        if pair.met(o, sizes):
            raise BadInput(pair.reason.format(**{**o, **sizes}))


def refused(a, b):
    """Find the pair of the table that two techniques are.  -> Pair or None"""
    return next((pair for pair in TABLE if a in pair.one and b in pair.other
                 or b in pair.one and a in pair.other), None)
