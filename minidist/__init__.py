"""Distributed training from scratch in NumPy and MPI.

    engine/        one process       dtypes graph tape tensor functional attention nn optim
                                     data gpt
    ranks/         how ranks talk,   comm wire counting buffers agree stream link threads processes
                   start and fail    report watch arrive safety environment launch
    collectives/   arrays over       ring tree halving double_tree hierarchical alltoall
                   ranks             choice layouts calls
    cost/          closed forms      messages model shards experts strategies compression
                                     layout
    bench/         measurements      engine attention memory collectives train moe tp
                                     fit

    where the two worlds meet        mesh mappings placement buckets schedules
    one technique each               dp zero tp sp pp flash cp ulysses moe ep
                                     recompute offload precision compress
    the whole                        step parallel verify ledger trace checkpoint storage
                                     progress flags files models resume replicas pairs
                                     estimate machine published search request
    commands                         train sample plan simulate dryrun doctor fuzz sweep recorder
                                     calibrate trial

engine, ranks and cost know nothing of each other; collectives builds on ranks and cost; techniques
build on all of these and never on one another.  Importing this package sets one BLAS thread per
rank, plain output lines and how glibc keeps memory, and nothing else.
"""
import ctypes
import os
import sys

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
                    "VECLIB_MAXIMUM_THREADS")

# One rank is one worker. A BLAS that spreads over all cores would fight its neighbours,
# and reads these when NumPy is first imported.
NUMPY_CAME_FIRST = "numpy" in sys.modules and not any(v in os.environ for v in THREAD_VARIABLES)
if "numpy" not in sys.modules:
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")

# A training step frees what the next one asks for again. glibc would return such memory to the
# system, which clears every page before it hands it out anew: up to a third of a step.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
if sys.platform == "linux":
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)   # other C libraries have none
    if mallopt is not None:
        mallopt(M_TOP_PAD, 256 << 20)                       # grow in large steps,
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)                # never shrink,
        mallopt(M_MMAP_THRESHOLD, 32 << 20)                 # and reuse arrays of up to 32 MB

# Lines of several ranks must arrive whole and in order, also through a pipe.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(line_buffering=True)
        if stream.errors == "strict":                       # "é" on an ASCII terminal: \xe9
            stream.reconfigure(errors="backslashreplace")


class BadInput(ValueError):
    """A request that cannot be met: one sentence with the numbers and the remedy."""
