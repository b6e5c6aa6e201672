"""Time every algorithm of every collective, beside MPI's own, in the columns of nccl-tests.

    python -m minidist.bench collectives -n 4 --collective all_reduce --max-bytes 67108864

One round calls every contender once, MPI's collective among them, in an order that changes from
round to round, each after a barrier and on fresh data: all meet the same machine.  A call takes as
long as its slowest rank.  algbw is size over time; busbw multiplies it by what each rank must send
at least, so that it compares with the speed of the wire whatever the number of ranks.

Lesson: mpirun -n 4 python -m lessons.ring
"""
import os
import platform
import time
from functools import partial
from typing import NamedTuple

import numpy as np

from minidist import BadInput, collectives, files, flags
from minidist.bench import fit
from minidist.collectives.choice import ALGORITHMS, chosen
from minidist.ranks import comm, environment

SMALLEST, LARGEST, WARM_UP = 1 << 10, 1 << 26, 2
COLUMNS = ("#{:>10} {:>11} {:>6}  {:<25}{:>10} {:>10} {:>10} {:>7} {:>7} {:>5} {:>6}")
HEAD = ("size", "count", "type", "algorithm", "time", "min", "max", "algbw", "busbw", "wrong",
        "ratio")
UNITS = ("(B)", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "")


class Row(NamedTuple):
    """One line of the table."""
    collective: str
    algorithm: str
    ranks: int
    bytes: int
    t_med_us: float
    t_min_us: float
    t_max_us: float
    t_mpi_us: float | None
    ratio: float | None                     # MPI's time / ours
    algbw_GBps: float
    busbw_GBps: float
    wrong: int


def main():
    """Run the benchmark that the command line asks for."""
    options = parser().parse_args()
    world = comm.world()
    names = wanted(options)
    sizes = [SMALLEST << k for k in range(0, 64, 2) if SMALLEST << k <= options.max_bytes]
    say = print if world.rank == 0 else lambda *_: None
    rows = []
    say(header(world))
    for collective in names:
        say(f"\n# {collective}, float32, sum, {CASES[collective].title}")
        say(COLUMNS.format(*HEAD) + "\n" + COLUMNS.format(*UNITS))
        for nbytes in sizes:
            for row in measure(collective, nbytes, options.algorithm, world):
                rows.append(row)
                say(line(row))
    if world.rank == 0:
        finish(rows, options, world)


def parser():
    p = flags.Parser(prog="python -m minidist.bench collectives",
                     description="Time every collective's algorithms beside MPI's own.",
                     epilog="example: python -m minidist.bench collectives -n 4 "
                            "--collective all_reduce")
    p.add_argument("--collective", metavar="NAME", help=", ".join(CASES) + " (default: all)")
    p.add_argument("--algorithm", metavar="NAME", help="default: all, and the automatic choice")
    p.add_argument("--max-bytes", type=flags.integer(SMALLEST), default=LARGEST, metavar="N",
                   help=f"largest array (default {LARGEST}); sizes grow by 4 from {SMALLEST}")
    p.add_argument("--json", metavar="FILE", help="write the rows and the fit there")
    p.add_argument("--out", metavar="DIR", default="out", help="the picture's folder (default out)")
    p.add_argument("--no-figure", action="store_true", help="draw no picture")
    return p


def wanted(options):
    """Names of the collectives to time, after looking at what was asked for."""
    names = list(CASES) if options.collective is None else [options.collective]
    if names[0] not in CASES:
        raise BadInput(f"no collective {names[0]}; there are {', '.join(CASES)}")
    if options.algorithm not in (None, "auto"):
        names = [name for name in names if options.algorithm in ALGORITHMS[name]]
        if not names:
            raise BadInput(f"no algorithm {options.algorithm} for that; there are " + "; ".join(
                f"{name}: {', '.join(ALGORITHMS[name])}" for name in CASES))
    files.ready(options.json, picture_path(options))
    if not options.no_figure:
        files.drawable()
    return names


# --- What is called, and what must come out. ---

def values(n, rank):
    """Whole numbers that differ from rank to rank; their sum over ranks is exact."""
    return np.add(np.arange(n, dtype="float32") % 1000, rank, out=empty((n,)))


def empty(shape):
    """Numbers at the start of a page: where an array lies must not decide who is faster."""
    nbytes = 4 * int(np.prod(shape))
    raw = np.empty(nbytes + 4096, "u1")
    start = -raw.ctypes.data % 4096
    return raw[start:start + nbytes].view("float32").reshape(shape)


def total(n, p, rank=0):
    """The sum of all ranks' values."""
    return (np.arange(n, dtype="float32") % 1000) * p + p * (p - 1) // 2


def piece(x, p, rank):
    """A rank's piece of a vector that divides."""
    return x.reshape(p, -1)[rank]


def in_place():
    """MPI's word for a sum that takes the place of what is summed."""
    from mpi4py import MPI
    return MPI.IN_PLACE


class Kind(NamedTuple):
    """A collective: its title, what a rank has before and after it, and MPI's own call for that."""
    title: str
    before: object                  # (n, p, rank) -> array
    after: object                   # (n, p, rank) -> array
    mpi: object                     # (MPI's communicator, what is sent, what comes out) -> a call
    in_place: bool = False          # does the result take the place of what is sent?


CASES = {
    "all_reduce": Kind(
        "in place", lambda n, p, r: values(n, r), total,
        lambda mpi, x, out: partial(mpi.Allreduce, in_place(), out), in_place=True),
    "reduce_scatter": Kind(
        "size of the input", lambda n, p, r: values(n, r), lambda n, p, r: piece(total(n, p), p, r),
        lambda mpi, x, out: partial(mpi.Reduce_scatter_block, x, out)),
    "all_gather": Kind(
        "size of the output", lambda n, p, r: piece(values(n, 0), p, r),
        lambda n, p, r: values(n, 0), lambda mpi, x, out: partial(mpi.Allgather, x, out)),
    "all_to_all": Kind(
        "size of a rank's input", lambda n, p, r: values(n, r).reshape(p, -1),
        lambda n, p, r: np.stack([piece(values(n, source), p, r) for source in range(p)]),
        lambda mpi, x, out: partial(mpi.Alltoall, x, out)),
    "broadcast": Kind(
        "from rank 0", lambda n, p, r: values(n, r), lambda n, p, r: values(n, 0),
        lambda mpi, x, out: partial(mpi.Bcast, out, 0), in_place=True),
    "reduce": Kind(
        "to rank 0", lambda n, p, r: values(n, r), lambda n, p, r: total(n, p) * (r == 0),
        lambda mpi, x, out: partial(mpi.Reduce, x, out, root=0)),
}


class Case(NamedTuple):
    """A collective on arrays of one size: after reset() and call(), result must be as expected."""
    nbytes: int
    reset: object
    call: object
    mpi: object                     # None without MPI
    result: np.ndarray
    expected: np.ndarray


def make(collective, n, group):
    """Make the arrays of a Case: n numbers on each rank, or n in all."""
    kind, where = CASES[collective], (n, group.size, group.rank)
    expected, source = kind.after(*where), kind.before(*where)
    out, sent = empty(expected.shape), empty(source.shape)
    sent[...] = source
    reset = partial(np.copyto, out, source) if kind.in_place else partial(out.fill, 0)
    mpi = reference(group)
    return Case(4 * n, reset,
                partial(getattr(collectives, collective), out if kind.in_place else sent, group,
                        out=out),
                mpi and kind.mpi(mpi, sent, out), out, expected)


def reference(group):
    """The MPI communicator under a group, for MPI's own collectives; None without MPI."""
    return getattr(group.plain.bare, "mpi", None)


# --- Measuring. ---

def measure(collective, nbytes, algorithm, group):
    """Time all contenders on one size -> a list of rows, MPI's own first."""
    p = group.size
    case = make(collective, max(p, nbytes // 4 // p * p), group)
    calls = {} if case.mpi is None else {"mpi": case.mpi}
    for name in contenders(collective, case.nbytes, p, algorithm):
        calls[name] = case.call if name.startswith("auto:") else partial(case.call, algorithm=name)
    times = timed(case, calls, rounds(case.nbytes), group)
    wrong = {name: errors(case, call, group) for name, call in calls.items()}
    return [row(collective, name, case.nbytes, p, times, wrong[name]) for name in calls]


def contenders(collective, nbytes, p, algorithm):
    """Names of the algorithms to time; "auto:NAME" is the automatic choice."""
    auto = "auto:" + chosen(collective, nbytes, p)
    if algorithm is not None:
        return [auto if algorithm == "auto" else algorithm]
    return [auto, *ALGORITHMS[collective]]


def rounds(nbytes):
    """How often: enough for a median, few where one call takes long."""
    return max(9, min(200, 50_000_000 // nbytes))


def timed(case, calls, repeats, group):
    """Seconds of the slowest rank, for each contender an array over the rounds.

    Each round goes through them in another order, the same on all ranks: who comes after MPI's own
    finds other data in the caches than who comes after one of ours."""
    order, functions = np.random.default_rng(0), list(calls.values())
    mine = np.empty((len(calls), repeats + WARM_UP))
    for i in range(repeats + WARM_UP):
        for k in order.permutation(len(calls)).tolist():
            call = functions[k]
            case.reset()
            group.barrier()
            start = time.perf_counter()
            call()
            mine[k, i] = time.perf_counter() - start
    slowest = collectives.all_reduce(mine, group, "max")[:, WARM_UP:]
    return dict(zip(calls, slowest))


def errors(case, call, group):
    """Call once more and count wrong elements over all ranks."""
    case.reset()
    call()
    return int(collectives.all_reduce(np.array([(case.result != case.expected).sum()]), group)[0])


def bus_factor(collective, p):
    """What each rank must send at least, as a share of the full array (nccl-tests)."""
    return {"all_reduce": 2 * (p - 1) / p, "broadcast": 1, "reduce": 1}.get(collective, (p - 1) / p)


def row(collective, name, nbytes, p, times, wrong):
    """Summarize the rounds of one contender."""
    med, low, high = np.median(times[name]), min(times[name]), max(times[name])
    mpi = float(np.median(times["mpi"])) if "mpi" in times else None
    algbw = nbytes / med / 1e9
    return Row(collective=collective, algorithm=name, ranks=p, bytes=nbytes,
               t_med_us=float(med) * 1e6, t_min_us=float(low) * 1e6, t_max_us=float(high) * 1e6,
               t_mpi_us=mpi and mpi * 1e6, ratio=mpi and float(mpi / med),
               algbw_GBps=float(algbw), busbw_GBps=float(algbw * bus_factor(collective, p)),
               wrong=wrong)


# --- Showing. ---

def header(group):
    """Say what it runs on."""
    mpi = reference(group)
    library = "no MPI" if mpi is None else library_version()
    return (f"# {group.size} ranks on {environment.cores()} cores, {platform.machine()} "
            f"{cpu()}; {library}\n# Python {platform.python_version()}, NumPy {np.__version__}, "
            f"{os.environ.get('OMP_NUM_THREADS', '?')} BLAS thread per rank, counters and watchdog "
            f"on\n# time: of the slowest rank, median of the rounds [min, max], after {WARM_UP} to "
            "warm up\n# ratio: MPI's time / ours.  GB = 1e9 bytes")


def library_version():
    from minidist.ranks.processes import MPI
    return " ".join(MPI.Get_library_version().split("\n")[0].split()).rstrip(",")[:40]


def cpu():
    """The processor's name, where the system tells."""
    try:
        lines = open("/proc/cpuinfo").read().split("\n")
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")


def line(r):
    """One row as text."""
    ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
    return COLUMNS.replace("#{:>10}", "{:>11}").format(
        r.bytes, r.bytes // 4, "float", r.algorithm, f"{r.t_med_us:.1f}", f"{r.t_min_us:.1f}",
        f"{r.t_max_us:.1f}", f"{r.algbw_GBps:.2f}", f"{r.busbw_GBps:.2f}", r.wrong, ratio)


def finish(rows, options, group):
    """Fit, picture and file, on rank 0."""
    found = fit.fit(rows)
    print(fit.report(found, rows))
    data = {"header": header(group), "rows": [r._asdict() for r in rows], "fit": found}
    height = 3.4 * len({r.collective for r in rows})
    return files.deliver(
        ("# data", options.json, files.numbers(data)),
        ("# picture", picture_path(options),
         files.picture(fit.draw, rows, f"{group.size} ranks", size=(11, height))))


def picture_path(options):
    return None if options.no_figure else os.path.join(options.out, "bench_collectives.png")


if __name__ == "__main__":
    from minidist.ranks import launch
    launch.run(main)
