"""What a table of times says about the machine: latency, bandwidth, cost of adding; and a picture.

    time = steps x alpha + bytes sent x beta + bytes added x gamma          (cost.messages.terms)

Every row of an algorithm with known terms is one equation; each is divided by its time, so that a
microsecond counts as much among ten as a millisecond among ten thousand.
"""
import numpy as np

from minidist.collectives.choice import ALPHA, AUTOMATIC, BETA, GAMMA, chosen
from minidist.cost.messages import terms
from minidist.published import not_negative

FIXED = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA}


def fit(rows):
    """Fit the three constants to the rows -> {"alpha", "beta", "gamma", "error"}, or None."""
    rows = [r for r in rows if r.algorithm in AUTOMATIC.get(r.collective, ()) and r.ranks > 1
            and len(AUTOMATIC[r.collective]) > 1]
    if len(rows) < 3:
        return None
    times = np.array([r.t_med_us for r in rows]) * 1e-6
    matrix = np.array([terms(r.collective, r.algorithm, r.ranks, r.bytes) for r in rows])
    constants = not_negative(matrix / times[:, None], np.ones(len(rows)))
    error = np.median(abs(matrix @ constants / times - 1))
    return {**dict(zip(FIXED, map(float, constants))), "error": float(error)}


def report(fit, rows):
    """Say what was fitted, and at which sizes its choice, or the clock's, is not the fixed one."""
    if fit is None:
        return "# too few rows for a fit"
    lines = ["", "# fit             alpha (us/step)  1/beta (GB/s sent)  1/gamma (GB/s added)",
             "# this run     " + figures(fit) + f"   median error {100 * fit['error']:.0f} %",
             "# the choice's " + figures(FIXED)]
    constants = tuple(fit[name] for name in FIXED)
    for collective, p, nbytes in sorted({(r.collective, r.ranks, r.bytes) for r in rows}):
        ours, fitted = chosen(collective, nbytes, p), chosen(collective, nbytes, p, constants)
        if ours != fitted:
            lines.append(f"# {collective} of {nbytes} bytes: the choice is {ours}, the fit's would "
                         f"be {fitted}; fastest was {fastest(rows, collective, nbytes)}")
    return "\n".join(lines)


def figures(c):
    rates = [f"{1e-9 / c[name]:.2f}" if c[name] else "-" for name in ("beta", "gamma")]
    return f"{c['alpha'] * 1e6:>17.1f}{rates[0]:>20}{rates[1]:>22}"


def fastest(rows, collective, nbytes):
    """Name of the algorithm that the clock prefers."""
    ours = [r for r in rows if (r.collective, r.bytes) == (collective, nbytes)
            and r.algorithm != "mpi" and not r.algorithm.startswith("auto:")]
    return min(ours, key=lambda r: r.t_med_us).algorithm if ours else "not measured"


def draw(figure, rows, title):
    """Draw time and bus bandwidth against size, a line for each algorithm."""
    names = list(dict.fromkeys(r.collective for r in rows))
    axes = figure.subplots(len(names), 2, squeeze=False)
    for name, (left, right) in zip(names, axes):
        for algorithm, points in curves(rows, name).items():
            style = {"color": "black", "linestyle": "--"} if algorithm == "mpi" else {}
            sizes = [r.bytes for r in points]
            left.loglog(sizes, [r.t_med_us for r in points], label=algorithm, marker=".", **style)
            right.semilogx(sizes, [r.busbw_GBps for r in points], marker=".", **style)
        left.set(title=f"{name}, {title}", ylabel="time (us)", xlabel="bytes")
        right.set(title="bus bandwidth", ylabel="GB/s", xlabel="bytes", ylim=(0, None))
        left.legend(fontsize=7)


def curves(rows, collective):
    """{algorithm: its rows by size}, the automatic choice as one."""
    found = {}
    for r in rows:
        if r.collective == collective:
            found.setdefault(r.algorithm.partition(":")[0], []).append(r)
    return found
