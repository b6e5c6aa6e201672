"""What may travel between ranks: contiguous NumPy arrays of a known type, refused by name otherwise.

MPI sends memory, not meaning. A Fortran-ordered array arrives transposed, a float32 message fills
half of a float64 buffer, and neither is an error to MPI. So every array is looked at first.
"""
import numpy as np

# One small code per type travels in the message tag, so that the receiver can compare.
DTYPES = [np.dtype(t) for t in ("f4", "f8", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1",
                                "?", "c8", "c16")]
CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}


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
        flags = into.flags
        if flags.c_contiguous and flags.writeable:
            return CODES[into.dtype]
    except (AttributeError, KeyError):
        pass
    raise refusal(into, "into")


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
    return ValueError(f"{what} is read-only; receive into an array of your own")
