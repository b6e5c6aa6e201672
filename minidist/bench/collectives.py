"""Time every algorithm of every collective, beside MPI's own, in the columns of nccl-tests.

    python -m minidist.bench collectives -n 4 --collective all_reduce --max-bytes 67108864

One round calls every contender once, MPI's collective among them, in an order that changes from
round to round, each after a barrier and on fresh data: all meet the same machine.  A call takes as
long as its slowest rank.  algbw is size over time; busbw multiplies it by what each rank must send
at least, so that it compares with the speed of the wire whatever the number of ranks.

Lesson: mpirun -n 4 python -m lessons.ring
"""
import json
import os
import platform
import time
from functools import partial
from typing import NamedTuple

import numpy as np

from minidist import BadInput, collectives, flags
from minidist.bench import fit
from minidist.collectives.choice import ALGORITHMS, chosen
from minidist.ranks import comm

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
        say(f"\n# {collective}, float32, sum, {DONE[collective]}")
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
    if options.json:
        flags.writable(options.json)
    return names


# --- What is called, and what must come out. ---

class Case(NamedTuple):
    """A collective on arrays of one size: after call() or mpi(), result must be as expected."""
    nbytes: int
    reset: object
    call: object
    mpi: object
    result: np.ndarray
    expected: np.ndarray


def values(n, rank):
    """Whole numbers that differ from rank to rank; their sum over ranks is exact."""
    return np.add(np.arange(n, dtype="float32") % 1000, rank, out=empty(n))


def empty(n):
    """n numbers at the start of a page: where an array lies must not decide who is faster."""
    raw = np.empty(4 * n + 4096, "u1")
    start = -raw.ctypes.data % 4096
    return raw[start:start + 4 * n].view("float32")


def total(n, p):
    return (np.arange(n, dtype="float32") % 1000) * p + p * (p - 1) // 2


def all_reduce(n, group, mpi):
    source, x = values(n, group.rank), empty(n)
    return Case(x.nbytes, lambda: np.copyto(x, source),
                partial(collectives.all_reduce, x, group, out=x),
                lambda: mpi.Allreduce(IN_PLACE, x), x, total(n, group.size))


def reduce_scatter(n, group, mpi):
    x, m = values(n, group.rank), n // group.size
    piece = empty(m)
    return Case(x.nbytes, lambda: piece.fill(0),
                partial(collectives.reduce_scatter, x, group, out=piece),
                lambda: mpi.Reduce_scatter_block(x, piece), piece,
                total(n, group.size)[m * group.rank:][:m])


def all_gather(n, group, mpi):
    whole, m = empty(n), n // group.size
    piece = empty(m)
    piece[...] = values(n, 0)[m * group.rank:][:m]
    return Case(whole.nbytes, lambda: whole.fill(0),
                partial(collectives.all_gather, piece, group, out=whole),
                lambda: mpi.Allgather(piece, whole), whole, values(n, 0))


def all_to_all(n, group, mpi):
    m, p = n // group.size, group.size
    rows, came = values(n, group.rank).reshape(p, m), empty(n).reshape(p, m)
    expected = np.stack([values(n, r).reshape(p, m)[group.rank] for r in range(p)])
    return Case(rows.nbytes, lambda: came.fill(0),
                partial(collectives.all_to_all, rows, group, out=came),
                lambda: mpi.Alltoall(rows, came), came, expected)


def broadcast(n, group, mpi):
    source, x = values(n, group.rank), empty(n)
    return Case(x.nbytes, lambda: np.copyto(x, source),
                partial(collectives.broadcast, x, group, out=x),
                lambda: mpi.Bcast(x, 0), x, values(n, 0))


def reduce(n, group, mpi):
    x, out = values(n, group.rank), empty(n)
    expected = total(n, group.size) if group.rank == 0 else np.zeros(n, "float32")
    return Case(x.nbytes, lambda: out.fill(0),
                partial(collectives.reduce, x, group, out=out),
                lambda: mpi.Reduce(x, out, root=0), out, expected)


CASES = {f.__name__: f for f in (all_reduce, reduce_scatter, all_gather, all_to_all, broadcast,
                                reduce)}
DONE = {"all_reduce": "in place", "reduce_scatter": "size of the input", "all_gather":
        "size of the output", "all_to_all": "size of a rank's input", "broadcast": "from rank 0",
        "reduce": "to rank 0"}
IN_PLACE = None                             # MPI's constant, once there is an MPI


def reference(group):
    """The MPI communicator under a group, for MPI's own collectives; None without MPI."""
    global IN_PLACE
    try:
        from minidist.ranks.processes import MPI
    except ImportError:
        return None
    IN_PLACE = MPI.IN_PLACE
    return getattr(group.plain.bare, "mpi", None)


# --- Measuring. ---

def measure(collective, nbytes, algorithm, group):
    """Time all contenders on one size -> a list of rows, MPI's own first."""
    mpi, p = reference(group), group.size
    case = CASES[collective](max(p, nbytes // 4 // p * p), group, mpi)
    calls = {} if mpi is None else {"mpi": case.mpi}
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
    finds other things in the caches than who comes after one of ours."""
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
    return Row(collective, name, p, nbytes, float(med) * 1e6, float(low) * 1e6, float(high) * 1e6,
               mpi and mpi * 1e6, mpi and float(mpi / med), float(algbw),
               float(algbw * bus_factor(collective, p)), wrong)


# --- Showing. ---

def header(group):
    """Say what it runs on."""
    mpi = reference(group)
    library = "no MPI" if mpi is None else library_version()
    return (f"# {group.size} ranks on {len(os.sched_getaffinity(0))} cores, {platform.machine()} "
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
    if not options.no_figure:
        path = os.path.join(options.out, "bench_collectives.png")
        flags.write(path, lambda file: fit.draw(rows, file, f"{group.size} ranks"))
        print(f"# picture: {path}")
    if options.json:
        data = {"header": header(group), "rows": [r._asdict() for r in rows], "fit": found}
        flags.write(options.json, lambda file: file.write(json.dumps(data, indent=1).encode()))
    return 0


if __name__ == "__main__":
    from minidist.ranks import launch
    launch.run(main)
