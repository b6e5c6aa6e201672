"""Distributed training from scratch in NumPy and MPI: one thread, plain output, one error."""

import os
import sys

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
                    "VECLIB_MAXIMUM_THREADS")

# One rank is one worker. A BLAS that spreads over all cores would fight its neighbours,
# and reads these when NumPy is first imported.
if "numpy" not in sys.modules:
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")

# Lines of several ranks must arrive whole and in order, also through a pipe.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(line_buffering=True)


class BadInput(ValueError):
    """A request that cannot be met: one sentence with the numbers and the remedy."""
