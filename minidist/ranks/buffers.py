"""What may travel between ranks: contiguous arrays of a known type; others are refused by name.

MPI sends memory, not meaning. A Fortran-ordered array arrives transposed, a float32 message fills
half of a float64 buffer, and neither is an error to MPI. So every array is looked at first.
"""
import math

import numpy as np

from minidist.ranks.counting import COLLECTIVES, code_of

# A tag, in the 15 bits that every MPI has:  more pieces follow 1 | type 4 | operation 5 | number 5
# Above them, where the MPI allows it: 7 bits of what a call is made with (op, dim, root, shape).
DTYPES = [np.dtype(t) for t in ("f4", "f8", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1",
                                "?", "c8", "c16")]
HEADER = 0x7FFF            # the tag of a slow link's departure times: no array has this one
PAGE = 4096
INCOMING, WORK = 0, 1      # the slots of Scratch
CODES = {dtype: code << 10 for code, dtype in enumerate(DTYPES, start=1)}


def outgoing(x):
    """Return the type code of an array that may be sent, or refuse it by name."""
    try:
        if x.flags.c_contiguous:
            return CODES[x.dtype]
    except (AttributeError, KeyError):
        pass
    raise refusal(x, "x")


def incoming(into):
    """Return the type code of an array that may be received into, or refuse it by name."""
    try:
        if into.flags.carray:                      # C-contiguous, writeable, aligned
            return CODES[into.dtype]
    except (AttributeError, KeyError):
        pass
    raise refusal(into, "into")


def apart(shape, dtype):
    """A new array whose address lies half a page off those that NumPy hands out.

    Large arrays often begin at the same place of a page, or 16 bytes further. Copying between two
    such pages, 1 to 31 bytes apart, is the slow case of x86: measured 4 times slower at 1 MB.
    """
    dtype = np.dtype(dtype)
    nbytes = dtype.itemsize * math.prod(shape)
    if nbytes < PAGE:                              # small ones do not feel it
        return np.empty(shape, dtype)
    raw = np.empty(nbytes + PAGE, "u1")
    start = (PAGE // 2 - raw.ctypes.data) % PAGE
    return raw[start:start + nbytes].view(dtype).reshape(shape)


class Scratch:
    """Kept buffers, one to a slot: scratch(n, dtype) is an array for what nobody needs for long.

    Who takes a slot's buffer ends the life of the array taken before. So slot INCOMING is for what
    has just arrived and is used at once, WORK for what lives as long as one collective call: an
    algorithm that works in place gets its copy of the input there. A call that makes another one
    must not hold the slot that the other takes.
    """

    def __init__(self):
        self.buffers, self.views = {}, {}

    def __call__(self, n, dtype, slot=INCOMING):
        """An array of n elements, with whatever happens to be in it."""
        view = self.views.get((n, dtype, slot))
        return self._view(n, dtype, slot) if view is None else view

    def _view(self, n, dtype, slot):
        nbytes, buffer = n * np.dtype(dtype).itemsize, self.buffers.get(slot)
        if buffer is None or buffer.size < nbytes:
            self.views.clear()                     # they would keep the old buffer alive
            buffer = self.buffers[slot] = apart((nbytes,), "u1")
        if len(self.views) >= 100:                 # sizes that depend on data never come again
            self.views.clear()
        view = self.views[n, dtype, slot] = buffer[:nbytes].view(dtype)
        return view


def refuse_overlaps(moves):
    """Refuse several sendrecvs at once if one receives into what another sends or receives."""
    for i, (_, _, into, _) in enumerate(moves):
        for x in [move[0] for move in moves] + [move[2] for move in moves[:i]]:
            if np.may_share_memory(x, into):
                raise ValueError(f"into ({into.dtype} {list(into.shape)}) shares memory with what "
                                 f"another message uses ({x.dtype} {list(x.shape)}): receive into "
                                 "an array of its own, or send x.copy()")


def refusal(x, name):
    """The error that says what is wrong with x and what to do."""
    if not isinstance(x, np.ndarray):
        return TypeError(f"{name} is a {type(x).__name__}, not a NumPy array")
    what = f"{name} ({x.dtype} {list(x.shape)})"
    if not x.dtype.isnative:
        return TypeError(f"{what} has foreign byte order; use {name}.astype("
                         f"{name}.dtype.newbyteorder('='))")
    if x.dtype not in CODES:
        return TypeError(f"{what} has a type that does not travel; types that do: "
                         + ", ".join(t.name for t in DTYPES))
    if not x.flags.c_contiguous:
        kind = "is Fortran-ordered" if x.flags.f_contiguous else "is not contiguous"
        remedy = ("receive into a contiguous array, then copy" if name == "into"
                  else "send np.ascontiguousarray(x)")
        return ValueError(f"{what} {kind}; {remedy}")
    if not x.flags.writeable:
        return ValueError(f"{what} is read-only; receive into an array of your own")
    return ValueError(f"{what} is not aligned in memory; receive into an array of your own")


# -- what came is not what was expected ---------------------------------------------------------

def unlike(comm, came, expected, into, source):
    """The error that names both what a rank expected and what came."""
    tag, nbytes = came
    start = (f"rank {comm.rank} of group {comm.name} expected {words(expected, into.nbytes)} "
             f"from rank {source}")
    if tag == HEADER:
        return ValueError(f"{start}, but only one of the two has a software link: "
                          "every rank of a group must call link()")
    text = f"{start}{call(comm, expected)}, but got {words(tag, nbytes)}{call(comm, tag)}"
    if (tag ^ expected) & 0x3FF:
        text += ": all ranks of a group must make the same calls in the same order"
    elif (tag ^ expected) >> 15:
        text += (": all ranks must make this call with the same op, dim, root, algorithm, shape "
                 "and sizes; MINIDIST_CHECK=1 shows how they differ")
    return ValueError(text)


def words(tag, nbytes):
    """A message's length and type, in words."""
    dtype = DTYPES[(tag >> 10 & 15) - 1]
    more = "more than " if tag >> 14 & 1 or nbytes % dtype.itemsize else ""
    return f"{more}{nbytes // dtype.itemsize} {dtype.name}"


def call(comm, tag):
    """The collective call a tag speaks of, as far as its ten bits tell."""
    code, number = tag >> 5 & 31, tag & 31
    if code == 0:
        return "" if comm._operation is None else " outside a collective"
    names = [n for n in [*COLLECTIVES, *comm.counts] if code_of(n) == code]
    near = comm._sequence + (number - comm._sequence + 16) % 32 - 16
    return f" in {names[0] if names else 'another operation'} #{near}"
