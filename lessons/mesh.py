"""DEVICE MESH      Each rank in a TP, a DP and a PP group: which ranks should be neighbours?

  lifts   bandwidth   what talks most gets the fastest wire; no byte less is sent
  costs   nothing     the same messages, the same numbers; but two numbering systems to confuse
  code    minidist/mesh.py
  run     mpirun -n 4 python -m lessons.mesh        or: python -m lessons.mesh -n 4
"""
from dataclasses import replace
from functools import partial

import numpy as np

from lessons import clock, kit, pictures, questions, setting
from minidist import cost, dp, mesh, placement, pp, step, tp, verify
from minidist.collectives import all_reduce
from minidist.ranks.comm import run_threads

EXERCISE = [mesh.coordinates, mesh.groups]
CUBE, SQUARE = dict(pp=2, dp=2, tp=2), dict(dp=2, tp=2)     # 8 thread ranks; 4, on 2 nodes of 2
ROWS = 48
NVLINK, NETWORK = 450e9, 50e9                         # bytes per second, each way: an H100's
SLOWER = 5000                                         # than these, in software
ORDERS = {"tp innermost": mesh.ORDER, "dp innermost": ("tp", "cp", "dp", "pp")}
LAYOUT = dict(tp=8, pp=8, dp=16)                      # 1024 GPUs, 8 on a node


def three_coordinates(lesson):
    """Three coordinates instead of one rank

    Ranks are numbered row by row, the last axis fastest: eight of them in a mesh of three axes."""
    lesson.predict("1024 ranks, pp=8 x dp=16 x tp=8: which rank is pp 3, dp 5, tp 7?", 431, "",
                   why="(3 x 16 + 5) x 8 + 7", mistakes={
                       491: "that is with tp outermost", 479: "the sizes further in multiply"})
    lesson.say("\n".join(mesh.picture(CUBE)))
    lesson.say("""
        Every rank makes every group, in the same order, or the job hangs. Inside a group its rank
        is its coordinate. A sum in tp adds the two neighbours, a sum in dp every second rank.""")


def how_much_each_talks(lesson):
    """How much does each axis talk?"""
    t, s, d = LAYOUT.values()
    replica = replace(cost.GPT3, B=cost.GPT3.B // d)
    ways = cost.tp(replace(replica, L=replica.L // s), cost.Group(t))
    G = cost.gpt_parameters(cost.GPT3) // (t * s)
    found = {"tp": ("4 times per layer, and nothing to hide behind", sum(w.bytes for w in ways)),
             "pp": ("at two borders: activations, gradients", 2 * replica.N * replica.D * 2),
             "dp": ("gradients, once, behind backward", cost.Group(d).all_reduce(G, 2).bytes)}
    lesson.predict("GPT-3 on 1024 GPUs: how many times as many bytes on tp as on dp?",
                   round(found["tp"][1] / found["dp"][1]), "times",
                   why="activations 4 times per layer, gradients once per step")
    lesson.say(f"B = {cost.GPT3.B} rows; T = 2048, D = 12288, 96 layers; per GPU and step:")
    lesson.table(["axis", "when", "sent", "NVLink, 450 GB/s", "network, 50 GB/s"],
                 [(f"{axis}={LAYOUT[axis]}", when, kit.size(n), kit.duration(n / NVLINK),
                   kit.duration(n / NETWORK)) for axis, (when, n) in found.items()])
    lesson.say(f"""
        The small GPT on eight ranks, pp=2 x dp=2 x tp=2: {ROWS} rows, m micro-batches. Rank 0 has
        l layers and the words, P parameters in F arrays, W of them the tied words:""")
    counted = dict(lesson.share(lambda: run_threads(8, sent, CUBE))[0])
    s = cost.Sizes.of(setting.model().config, B=ROWS // 2, w=8)
    held = [numbers for numbers, _ in cost.tp_shapes(s, cost.Group(2), stage=cost.Group(2))]
    lesson.ledger(("tp: activations", "2(p-1)/p 8 N D (4 l + 1)", None, counted["tp"]),
                  ("pp: border; words", "8 N D + 32 m + 2(p-1)/p (8 W + 4)", None, counted["pp"]),
                  ("dp: gradients", "2(p-1)/p (8 P + 4 F)", None, counted["dp"]),
                  **setting.letters(s, "ND", p=2, m=2, l=2, P=sum(held), F=len(held), W=held[0]))


def who_gets_the_fast_wire(lesson):
    """So who gets the fast wire?

    Two nodes of two ranks; 90 MB/s inside a node, 10 MB/s between nodes: NVLink and a network card,
    both 5000 times slower, in software. The same model, batch and messages, in two orders:"""
    runs, table, least = {}, [], {}
    for name, order in ORDERS.items():
        took, waits = runs[name] = on_four(lesson, partial(timed, order=order))
        counted = dict(on_four(lesson, partial(sent, order=order)))
        across = counted["dp" if order is mesh.ORDER else "tp"]
        inside = sum(counted.values()) - across
        least[name] = (inside / NVLINK + across / NETWORK) * SLOWER
        table.append([name, kit.size(inside + across), kit.size(across),
                      kit.duration(least[name]), kit.duration(took)])
    lesson.table(["order", "a rank sends", "out of its node", "on the wires, by the model",
                  "step, measured"], table)
    gain, seen = (max(x) / min(x) for x in (list(least.values()), [t for t, _ in runs.values()]))
    lesson.fill(f"""
        By the link model, bytes over bandwidth, tp innermost spends {gain:.1f} times less on the
        wires. In this run {min(runs, key=lambda name: runs[name][0])} was faster, {seen:.1f} times
        in all.""")
    lesson.figure(pictures.timelines, {name: (took, [(color, f"waiting for {axis}", [
        (start, end) for one, start, end in waits if one == axis]) for axis, color in
        (("tp", "tab:orange"), ("dp", "tab:green"))]) for name, (took, waits) in runs.items()},
        "one step on four ranks, what rank 0 waits for")


def prove(lesson):
    """Is it right?

    Sums of world ranks in every group, against tables made by hand; bytes that leave a node;
    training on the cube, three strategies at once, against one process."""
    questions.grid(lesson)
    eight = np.array([found for _, found, _ in lesson.share(
        lambda: run_threads(8, partial(sums, sizes=CUBE)))])       # in tp, dp, pp
    by_hand = [[1, 2, 4], [1, 4, 6], [5, 2, 8], [5, 4, 10],
               [9, 10, 4], [9, 12, 6], [13, 10, 8], [13, 12, 10]]
    lesson.check("8 ranks: all sums", np.abs(eight - by_hand).max())
    four = on_four(lesson, partial(sums, sizes=SQUARE), everyone=True)
    lesson.check("4 ranks: tp sums 1 1 5 5, dp sums 2 4 2 4", np.abs(
        np.array([found[:2] for _, found, _ in four]) - [[1, 2], [1, 4], [5, 2], [5, 4]]).max())
    lesson.check("a rank inside its groups is its coordinate",
                 max(at != inside for at, _, inside in four))
    P = cost.tp_parameters(cost.Sizes.of(setting.model().config), cost.Group(2))
    lesson.ledger(("bytes out of a node: dp's gradients", "8 P + 4 F", None,
                   crossing(on_four(lesson, sent))), P=P, F=52)
    lesson.verdict(lesson.share(lambda: run_threads(8, trained))[0])


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


def sums(comm, sizes):
    """My coordinates, the sum of world ranks in each of my groups, my rank inside them."""
    grid = mesh.DeviceMesh(comm, **sizes)
    axes = [axis for axis in ("pp", "dp", "tp") if sizes.get(axis)]
    number = np.array([comm.rank])
    return ([int(grid.coords[axis]) for axis in axes],
            [int(all_reduce(number, grid[axis])[0]) for axis in reversed(axes)],
            [grid[axis].rank for axis in axes])


def spread(model, grid):
    """tp inside, pp of what is left, dp around it: functions, one after the other."""
    tp.parallelize(model, grid["tp"])
    return dp.parallelize(pp.split(model, grid["pp"]) if grid["pp"].size > 1 else model, grid["dp"])


def pass_through(model, grid):
    """Forward, backward, and the sums that finish the gradients."""
    batch, passes = setting.words(ROWS), getattr(model, "passes", step.accumulate)
    passes(model, model.localize(batch).split(grid.sizes["pp"]))
    placement.finalize(model.parameters(), grid, batch.count)


def sent(comm, sizes=SQUARE, order=mesh.ORDER):
    """One step on a mesh.  -> [(axis, bytes that I send in it)]"""
    grid = mesh.DeviceMesh(comm, **sizes, order=order)
    model = spread(setting.model(), grid)
    with comm.counting() as counted:
        pass_through(model, grid)
    return [(axis, counted.by_group[axis].bytes) for axis in sizes]


def crossing(sent_by_axis):
    """Bytes that leave a node of two ranks: those of the axis whose groups are not inside one."""
    sizes = mesh.ordered({"pp": 1, "cp": 1, **SQUARE})
    return sum(n for axis, n in sent_by_axis if mesh.groups(sizes, axis) != [[0, 1], [2, 3]])


def trained(comm):
    """Train on the cube and in one process.  -> the verdict's fields"""
    batches = [setting.words(6, t) for t in range(2)]
    return setting.fields(verify.train(setting.shallow, setting.SGD, spread, mesh.DeviceMesh(
        comm, **CUBE), batches, num_microbatches=2))


def timed(comm, order):
    """Run a step with a link of its own for each axis.  -> seconds, [(axis, start, end)]"""
    grid = mesh.DeviceMesh(comm, **SQUARE, order=order)
    model = spread(setting.model(), grid)
    for axis in SQUARE:
        inside = grid[axis].ranks[0] // 2 == grid[axis].ranks[1] // 2
        grid[axis].link(bandwidth=(NVLINK if inside else NETWORK) / SLOWER)

    def work():
        model.zero_grad()
        pass_through(model, grid)

    return clock.fastest(comm, work)


def on_four(lesson, work, everyone=False):
    """Let the job's ranks work if they are four, else four thread ranks.  -> rank 0's result"""
    if lesson.comm.size == 4:
        results = lesson.collect(work(lesson.comm))
    else:
        results = lesson.share(lambda: run_threads(4, work))
    return results if everyone else results[0]


TAKEAWAY = "A mesh saves no byte: it decides which wire bytes take. Innermost what talks most."
FIELD = ("torch init_device_mesh (outermost axis first); Megatron-LM order tp-cp-ep-dp-pp (fastest "
         "first: the same mesh); Llama 3 puts dp outermost, outside pp")
TRY = ["16 GPUs, 4 on a node: which axes cross in pp=2 x dp=2 x tp=4, and which in tp=8 x dp=2?"]
SCREENS = [three_coordinates, how_much_each_talks, who_gets_the_fast_wire, prove, world_rank]

if __name__ == "__main__":
    kit.run(SCREENS)
