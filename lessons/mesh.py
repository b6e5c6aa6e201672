"""DEVICE MESH      Each rank in a TP, a DP and a PP group: which ranks should be neighbours?

  lifts   bandwidth   what talks most gets the fastest wire; no byte less is sent
  costs   nothing     the same messages, the same numbers; but two numbering systems to confuse
  code    minidist/mesh.py
  before  lessons.tp, lessons.dp  (two of the axes)           next  lessons.plan
  run     mpirun -n 4 python -m lessons.mesh        or: python -m lessons.mesh -n 4
"""
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from lessons import kit
from minidist import cost, dp, mesh, placement, step, tp, verify
from minidist.collectives import all_reduce, chosen
from minidist.engine import gpt, optim
from minidist.engine.data import random_batch
from minidist.ranks.comm import run_threads

EXERCISE = [mesh.coordinates, mesh.groups]
CUBE = dict(pp=2, dp=2, cp=1, tp=2)                   # 8 ranks
SQUARE = dict(dp=2, tp=2)                             # 4 ranks, on 2 nodes
VOCAB, ROWS, STEPS = 29, 48, 2
NVLINK, NETWORK = 450e9, 50e9                         # bytes per second, each way: an H100's
SLOWER = 5000                                         # than these, in software
SWAPPED = ("tp", "cp", "dp", "pp")
LAYOUT = dict(tp=8, pp=8, dp=16)                      # 1024 GPUs, 8 on a node


def main(lesson):
    lesson.part("Three coordinates instead of one rank")
    lesson.say("Eight ranks, numbered row by row, the last axis fastest:\n")
    lesson.say("\n".join(mesh.picture(CUBE)))
    lesson.source(mesh.groups)
    lesson.say("""
        The axes of one group go last; what is left tells the groups apart. Every rank makes every
        group, in the same order, or the job hangs. Inside, a rank is its coordinate.""")

    lesson.part("Who sums with whom?")
    lesson.say("Every rank puts its number in the world into a sum, once in each of its groups:\n")
    eight = lesson.share(lambda: run_threads(8, partial(sums, sizes=CUBE)))
    lesson.table(["rank", "pp dp tp", "sum in tp", "in dp", "in pp", "rank inside pp dp tp"],
                 [[r, " ".join(map(str, at)), *found, " ".join(map(str, inside))]
                  for r, (at, found, inside) in enumerate(eight)])
    launched(lesson)

    lesson.part("How much does each axis talk?")
    ledger = on_four(lesson, traffic)
    lesson.say(f"dp=2 x tp=2, one step of the small GPT on {ROWS} rows; what rank 0 sends:\n")
    lesson.ledger(*ledger)
    lesson.gap()
    lesson.say("And GPT-3 on 1024 GPUs, 16-bit numbers, by the same formulas, per GPU and step:\n")
    table, ratio = big()
    lesson.table(["axis", "when", "sent", "NVLink, 450 GB/s", "network, 50 GB/s"], table)
    lesson.predict("GPT-3: how many times as much does tp send as dp?", round(ratio), "times",
                   why="dp sends its weights once per step; tp its activations 4 times per layer")

    lesson.part("So who gets the fast wire?")
    two_orders(lesson)

    lesson.part("Is it right?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(world_rank)
    lesson.takeaway(
        "A mesh saves no byte: it decides which wire the bytes take. Innermost what talks most.",
        field="torch init_device_mesh (outermost axis first); Megatron-LM order tp-cp-ep-dp-pp "
              "(fastest first: the same mesh); Llama 3 puts dp outermost, outside pp",
        tries=["16 GPUs, 4 on a node, tp=8: which bytes cross now? python -m minidist.mesh --tp 8",
               "write coordinates and groups: --stub mine.py, then --mine mine.py"])


def prove(lesson):
    """Sums in all groups of 8 ranks and of the launched ones; training on a square of 4."""
    eight = np.array([found for _, found, _ in lesson.share(
        lambda: run_threads(8, partial(sums, sizes=CUBE)))])       # in tp, dp, pp
    by_hand = [[1, 2, 4], [1, 4, 6], [5, 2, 8], [5, 4, 10],
               [9, 10, 4], [9, 12, 6], [13, 10, 8], [13, 12, 10]]
    lesson.check("8 ranks: all sums, against a table made by hand", np.abs(eight - by_hand).max())
    four = on_four(lesson, partial(sums, sizes=SQUARE), everyone=True)
    lesson.check("4 ranks: tp sums 1 1 5 5, dp sums 2 4 2 4", np.abs(
        np.array([found[:2] for _, found, _ in four]) - [[1, 2], [1, 4], [5, 2], [5, 4]]).max())
    lesson.check("a rank inside its groups is its coordinate",
                 max(at != inside for at, _, inside in four))
    lesson.ledger(("bytes out of a node per step", "dp's gradients", on_four(lesson, dp_bytes),
                   crossing(on_four(lesson, sent))))
    found = on_four(lesson, trained)
    lesson.verdict(SimpleNamespace(**found, line=lambda: found["text"]))


# ---- breaks

@kit.breaks(dp, "share_rows")
def world_rank(model, comm):
    """Each rank takes its rows by its number in the world, not by its number in the dp group.

    Right as long as dp is the only axis. With tp beside it, partners of one layer work on
    different rows, and add up what does not belong together (verl #508, torchrec #4601)."""
    mine = comm.ranks[comm.rank] % comm.size             # comm.ranks: numbers in the world
    model.localizers.append(lambda batch: batch.split(comm.size)[mine])


@kit.breaks(mesh, "ordered")
def innermost_first(sizes, order=mesh.ORDER):
    """The order of the axes is read from the wrong end: tp becomes the outermost axis.

    Training is right to the last bit, only slower: tp now crosses the network. Megatron-LM writes
    the fastest axis first, PyTorch last: who copies an order from one to the other gets this."""
    return innermost_first.original(sizes, order[::-1])


@kit.breaks(mesh, "coordinates")
def modulo(rank, sizes):
    """Every coordinate is rank modulo size, also where an axis further in should divide first.

    Ranks 0 and 2 believe that they are the same replica; nobody is replica 1 with tp 0."""
    return {axis: rank % size for axis, size in sizes.items()}


# ---- what ranks do; each returns something small

def sums(comm, sizes):
    """My coordinates, the sum of world ranks in each of my groups, my rank inside them."""
    grid = mesh.DeviceMesh(comm, **sizes)
    axes = [axis for axis in ("pp", "dp", "tp") if sizes.get(axis)]
    number = np.array([comm.rank])
    return ([grid.coords[axis] for axis in axes],
            [int(all_reduce(number, grid[axis])[0]) for axis in reversed(axes)],
            [grid[axis].rank for axis in axes])


def plain():
    return gpt.GPT(gpt.preset("lesson", VOCAB), dtype=np.float64)


def spread(model, grid):
    """tp inside, dp around it: two functions, one after the other."""
    return dp.parallelize(tp.parallelize(model, grid["tp"]), grid["dp"])


def pass_through(model, grid, batch):
    """Forward, backward, and the sums that finish the gradients."""
    step.accumulate(model, [model.localize(batch)])
    placement.finalize(model.parameters(), grid, batch.count)


def batch_at(t=0):
    return random_batch(VOCAB, 16, ROWS, seed=0, step=t, ragged=False)


def sent(comm, order=mesh.ORDER):
    """One step on the square.  -> [(axis, bytes that I send in it)]"""
    grid = mesh.DeviceMesh(comm, **SQUARE, order=order)
    model = spread(plain(), grid)
    with comm.counting() as counted:
        pass_through(model, grid, batch_at())
    return [(axis, counted.by_group[axis].bytes) for axis in ("tp", "dp")]


def dp_bytes(comm):
    """What cost says of the gradients that a rank holds."""
    grid = mesh.DeviceMesh(comm, **SQUARE)
    held = [p.data.size for p in spread(plain(), grid).parameters()]
    return cost.dp(held, cost.Group(2, grid.coords["dp"], chosen), 8).bytes


def traffic(comm):
    """Ledger rows of both axes."""
    counted, sizes = dict(sent(comm)), cost.Sizes.of(plain().config, B=ROWS // 2, w=8)
    tensor = cost.tp(sizes, cost.Group(2, 0, chosen))
    return [("tp: activations, 4 times per layer", "cost.tp", sum(way.bytes for way in tensor),
             counted["tp"]),
            ("dp: gradients, once", "cost.dp", dp_bytes(comm), counted["dp"])]


def crossing(sent_by_axis):
    """Bytes that leave a node of two ranks: those of the axis whose groups are not inside one."""
    sizes = mesh.ordered({"pp": 1, "cp": 1, **SQUARE})
    return sum(n for axis, n in sent_by_axis if mesh.groups(sizes, axis) != [[0, 1], [2, 3]])


def trained(comm):
    """Train on the square and in one process.  -> the verdict's fields"""
    grid = mesh.DeviceMesh(comm, **SQUARE)
    verdict = verify.train(plain, lambda params: optim.SGD(params, lr=0.5), spread, grid,
                           [batch_at(t).take_rows(slice(6)) for t in range(STEPS)])
    return dict(equal=bool(verdict.equal), worst=float(verdict.worst), bound=verdict.bound,
                text=verdict.line())


def timed(comm, order):
    """Run a step with a link of its own for each axis.  -> seconds, [(axis, start, end)]"""
    grid, found = mesh.DeviceMesh(comm, **SQUARE, order=order), []
    model = spread(plain(), grid)
    for axis in SQUARE:
        inside = grid[axis].ranks[0] // 2 == grid[axis].ranks[1] // 2
        grid[axis].link(bandwidth=(NVLINK if inside else NETWORK) / SLOWER)
    for _ in range(3):
        model.zero_grad()
        comm.barrier()
        with comm.recording() as events:
            start = time.perf_counter()
            pass_through(model, grid, batch_at())
            end = time.perf_counter()
        found.append((end - start, [(e.group, e.start - start, e.end - start)
                                    for e in events if e.kind == "recv" and e.group in SQUARE]))
    return min(found)


# ---- the screens

def on_four(lesson, work, everyone=False):
    """Let the job's ranks work if they are four, else four thread ranks.  -> rank 0's result"""
    if lesson.comm.size == 4:
        results = lesson.collect(work(lesson.comm))
    else:
        results = lesson.share(lambda: run_threads(4, work))
    return results if everyone else results[0]


def launched(lesson):
    """The same for the ranks of this job, two of them to a tp group if their number is even."""
    p = lesson.comm.size
    sizes = dict(dp=p // 2, tp=2) if p % 2 == 0 else dict(dp=p, tp=1)
    grid = mesh.DeviceMesh(lesson.comm, **sizes)
    at, found, _ = sums(lesson.comm, sizes)
    lesson.gap()
    lesson.say(f"The ranks of this job, {grid.describe()}:\n")
    lesson.rows(["dp tp", "sum in tp", "in dp"], [" ".join(map(str, at)), *found])


def big():
    """What one GPU of LAYOUT sends per step on each axis.  -> rows, tp / dp"""
    t, s, d = LAYOUT.values()
    replica = replace(cost.GPT3, B=cost.GPT3.B // d)
    ways = cost.tp(replace(replica, L=replica.L // s), cost.Group(t))
    gradients = cost.gpt_parameters(cost.GPT3) // (t * s)
    found = {"tp": ("4 times per layer, and nothing to hide behind", sum(w.bytes for w in ways)),
             "pp": ("at two borders: activations, gradients", 2 * replica.N * replica.D * 2),
             "dp": ("once, behind backward", cost.Group(d).all_reduce(gradients, 2).bytes)}
    table = [[f"{axis}={LAYOUT[axis]}", when, kit.size(n),
              kit.duration(n / NVLINK), kit.duration(n / NETWORK)]
             for axis, (when, n) in found.items()]
    return table, found["tp"][1] / found["dp"][1]


def two_orders(lesson):
    """Time the same step with tp innermost, and with dp innermost."""
    orders = {"tp innermost": mesh.ORDER, "dp innermost": SWAPPED}
    lesson.say(f"""
        Two nodes of two ranks. Links in software, {SLOWER} times slower than these: 90 MB/s
        inside a node, 10 MB/s between nodes. The same model, batch and messages, twice:
        """)
    runs, table = {}, []
    for name, order in orders.items():
        took, waits = runs[name] = on_four(lesson, partial(timed, order=order))
        spent = [sum(end - start for axis, start, end in waits if axis == one) for one in SQUARE]
        counted = dict(on_four(lesson, partial(sent, order=order)))
        across = counted["dp" if order is mesh.ORDER else "tp"]
        table.append([name, kit.size(sum(counted.values())), kit.size(across), kit.duration(took),
                      *map(kit.duration, reversed(spent))])
    lesson.table(["order", "a rank sends", "out of its node", "step", "waiting: tp", "dp"], table)
    lesson.figure(draw, runs)


def draw(figure, runs):
    panels = figure.subplots(len(runs), 1, sharex=True)
    for axes, (name, (took, waits)) in zip(panels, runs.items()):
        axes.broken_barh([(0, 1e3 * took)], (0, 1), color="lightgray")
        for axis, color in (("tp", "tab:orange"), ("dp", "tab:green")):
            spans = [(1e3 * start, 1e3 * (end - start)) for one, start, end in waits if one == axis]
            axes.broken_barh(spans, (0, 1), color=color, label=f"waiting for {axis}")
        axes.set_title(f"{name}: {1e3 * took:.0f} ms", loc="left")
        axes.set_yticks([0.5], ["rank 0"])
    panels[0].legend(loc="upper right")
    panels[-1].set_xlabel("ms of one step; gray: computing")


if __name__ == "__main__":
    kit.run(main)
