"""THREE WALLS      What does training run out of first: compute, memory, or bandwidth?

  lifts   nothing     these are the walls; each later lesson moves one of them
  costs   nothing     but every lesson will be paid for at the rates of this one
  code    minidist/cost/model.py
  before  python -m minidist.doctor  (does it run here?)      next  lessons.step
  run     mpirun -n 2 python -m lessons.walls         or: python -m lessons.walls -n 2
"""
import time
from dataclasses import replace

import numpy as np

from lessons import counted, kit
from minidist import cost
from minidist.engine import attention, functional, optim
from minidist.engine.tensor import Tensor

EXERCISE = [cost.linear_work, cost.attention_work, cost.at_least]
B, T, D, H = 8, 256, 384, 6                           # the layers of preset `mini`, 2048 tokens
GROWTH = [(2018, "GPT-1", 0.117e9, "V100", 32e9), (2019, "GPT-2", 1.5e9, "V100", 32e9),
          (2020, "GPT-3", 175e9, "A100", 40e9), (2024, "Llama 3", 405e9, "H100", 80e9)]
# Datasheets: dense bf16 flop/s, bytes, bytes/s of memory, NVLink (half of its two-way figure: 900
# and 1800 GB/s), and a network card of 400 Gbit/s, or 800.
GPUS = {"H100 SXM": (989.4e12, 80e9, 3.35e12, 450e9, 50e9),
        "B200": (2250e12, 192e9, 8e12, 900e9, 100e9)}
PCIE = 64e9
GPT3 = replace(cost.GPT3, B=1)                        # one sequence per GPU


def main(lesson):
    lesson.part("Models grow faster than memory")
    growth(lesson)

    lesson.part("This machine, one thread")
    peak, stream, link = measured(lesson)

    lesson.part("The operations of one step under the roof")
    lesson.source(cost.at_least)
    lesson.say("""
        An operation that computes many flops per byte is held up by compute, one with few by
        memory; between them lies the machine's own ratio, flop/s over bytes/s.""")
    found = lesson.share(operations)
    lesson.gap()
    lesson.table(["forward, float32", "Mflop", "MB", "flop/byte", "wall", "time", "of the roof"],
                 [under_the_roof(*row, peak, stream) for row in found])
    lesson.say("""
        Of the roof: the least time, over the time. Elementwise work is far below its roof: NumPy
        passes over an array many times, and an exp takes longer than one flop. (More than 100 %:
        another program was busy while the peak was measured.)""")
    lesson.figure(draw, peak, stream, found)

    lesson.part("The same three walls on a GPU")
    machines(lesson, peak, stream, link)

    lesson.part("What a technique offers, and what a wire demands")
    offers(lesson)

    lesson.part("Is it right?")
    prove(lesson)
    lesson.part("Break it")
    lesson.break_it(one_flop)
    lesson.takeaway(
        "Ask of every trick: which wall does it move, and in which of the three does one pay?",
        field="roofline (Williams et al. 2009); arithmetic intensity; model FLOPs utilization",
        tries=["how many tokens must a linear layer see to be held up by compute here? on an H100?",
               "which line of screen 5 changes when numbers take 1 byte (fp8), and peak doubles?",
               "write linear_work, attention_work, at_least: --stub mine.py, then --mine mine.py"])


def prove(lesson):
    """Formulas against what the operations really multiply, read and write."""
    lesson.ledger(*lesson.share(counts))
    work = cost.Work(flops=100, bytes=10)
    lesson.check("at least: compute or memory, whatever takes longer",
                 abs(cost.at_least(work, 10, 5) - 10) + abs(cost.at_least(work, 1000, 5) - 2))


# ---- breaks

@kit.breaks(cost, "linear_work")
def one_flop(N, D, F, w=4):
    """A multiply-add counts as one flop.

    Vendors count two: their peak is for products of 2 n^3 flops. Divide one convention by the
    other, and a machine looks half as well used as it is."""
    right = one_flop.original(N, D, F, w)
    return right._replace(flops=right.flops - N * D * F)


@kit.breaks(cost, "attention_work")
def whole_square(B, T, D, w=4, tile=64):
    """Causal attention is charged for the whole T x T square, of which it skips nearly half.

    Megatron-LM and PaLM differ in just this convention: compare utilizations only within one."""
    return whole_square.original(B, T, D, w, tile=T)


@kit.breaks(cost, "linear_work")
def free_weights(N, D, F, w=4):
    """The weights cost no bytes, as if they were always there.

    Nearly right for thousands of tokens; for one token at a time, as in generating text, the
    weights are all that is read, and memory is the only wall."""
    right = free_weights.original(N, D, F, w)
    return right._replace(bytes=right.bytes - w * D * F)


# ---- counting

def inputs(rows, seed=0):
    """Random arrays for each operation.  {name: (function of arrays -> what it writes, arrays)}"""
    rng, heads = np.random.default_rng(seed), (rows, H, T, D // H)

    def some(*shape):
        return rng.standard_normal(shape, np.float32)

    def run(op):
        return lambda *arrays: [op(*map(Tensor, arrays)).data]

    return {"layer_norm": (run(functional.layer_norm), [some(rows * T, D), some(D), some(D)]),
            "linear fc1": (run(functional.linear),
                           [some(rows * T, D), some(4 * D, D), some(4 * D)]),
            "gelu": (run(functional.gelu), [some(rows * T, 4 * D)]),
            "attention": (run(functional.scaled_dot_product_attention),
                          [some(*heads) for _ in "qkv"]),
            "AdamW, 4M parameters": (update, [some(2048, 2048) ** 2 for _ in "wgmv"])}


def update(w, g, *moments):
    """AdamW's second update of parameters w."""
    p = Tensor(w, requires_grad=True)
    p.name, p.decay, p.grad = "w", True, g
    optimizer = optim.AdamW([p], 1e-3)
    optimizer.state["w"], optimizer.t = moments, 1
    optimizer.step()
    return [w, *moments]


def counts(rows=1):
    """Ledger rows: flops and bytes by formula, and as they come."""
    ops = inputs(rows)
    linear, attend = (counted.count(*ops[name]) for name in ("linear fc1", "attention"))
    want, pairs = cost.linear_work(rows * T, D, 4 * D), cost.attention_work(rows, T, D,
                                                                            tile=attention.TILE)
    return [("linear: flops", "2 N D F + N F", want.flops, sum(linear[:2])),
            ("linear: bytes", "inputs, weights, result", want.bytes, linear[2]),
            ("attention: flops of the products", "4 D/H per visible pair", pairs.flops, attend[0]),
            ("attention: bytes", "q, k, v, result", pairs.bytes, attend[2])]


def operations():
    """Count and time each operation.  -> [(name, flops, bytes, seconds)]"""
    rows = []
    for name, (op, arrays) in inputs(B).items():
        products, others, nbytes = counted.count(op, arrays)
        rows.append([name, products + others, nbytes, best(lambda op=op, a=arrays: op(*a), 3)])
    return rows


# ---- measuring

def best(work, tries=5):
    """The shortest of some times: the machine has other things to do as well."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measured(lesson):
    """Show what this machine can do.  -> flop/s, bytes/s of memory, and between ranks (or None)"""
    peak, stream = lesson.share(lambda: [sgemm(), triad()])
    pair = lesson.comm.split(0 if lesson.comm.rank < 2 else None, name="pair")
    if pair is None:
        time.sleep(0.5)                               # a rank that waits awake takes a core
    latency, link = lesson.collect(between(pair) if pair and pair.size == 2 else [0, None])[0]
    rows = [("compute: product of two 1024 x 1024 matrices", f"{peak / 1e9:.1f} Gflop/s", ""),
            ("memory: c = a + b, 64 MB each", f"{stream / 1e9:.1f} GB/s", f"{peak / stream:.1f}")]
    if link:
        rows.append(("link: 16 MB from rank 0 to rank 1", f"{link / 1e9:.1f} GB/s",
                     f"{peak / link:.1f}"))
    lesson.table(["float32", "measured", "flops per byte"], rows)
    lesson.say(f"A message of 8 bytes takes {kit.duration(latency)}: as long as "
               f"{latency * peak:,.0f} flops." if link else
               "One rank has no link: start two to measure it.")
    return peak, stream, link


def sgemm(n=1024):
    a, b = np.ones((2, n, n), np.float32)
    out = np.empty((n, n), np.float32)
    return 2 * n ** 3 / best(lambda: np.matmul(a, b, out=out), 12)


def triad(n=16 << 20):
    a, b, out = np.ones((3, n), np.float32)
    return 3 * out.nbytes / best(lambda: np.add(a, b, out=out))


def between(pair, nbytes=16 << 20):
    """Play ping-pong.  -> seconds of a small message, bytes per second of a large one"""
    found = []
    for n in (8, nbytes):
        x = np.ones(n, np.uint8)

        def rally(x=x):
            for turn in (0, 1):
                (pair.send if turn == pair.rank else pair.recv)(x, 1 - pair.rank)

        found.append(best(rally, 20 if n == 8 else 5) / 2)
    return [found[0], nbytes / found[1]]


# ---- the screens

def growth(lesson):
    rows = [(year, name, f"{n / 1e9:.3g}B", kit.size(16 * n), f"{gpu}, {kit.size(memory)}",
             f"{max(1, np.ceil(16 * n / memory)):.0f}") for year, name, n, gpu, memory in GROWTH]
    lesson.table(["year", "model", "parameters", "16 bytes each", "GPU", "needed to hold that"],
                 rows)
    models, gpus = (f"{GROWTH[-1][i] / GROWTH[0][i]:,.4g} times" for i in (2, 4))
    lesson.say(f"""
        In six years models grew {models}, a GPU's memory {gpus}. And holding a model is
        the smaller problem: 6 flops per parameter and token must be computed, and what lies on many
        GPUs must talk. Compute, memory, bandwidth: every trick trades one for another.""")


def under_the_roof(name, flops, nbytes, seconds, peak, stream):
    """Cells of one operation: which wall is it under, and how close does it come?"""
    work = cost.Work(flops, nbytes)
    wall = "compute" if flops / peak > nbytes / stream else "memory"
    return (name, f"{flops / 1e6:.0f}", f"{nbytes / 1e6:.1f}", f"{flops / nbytes:.2f}", wall,
            kit.duration(seconds), f"{cost.at_least(work, peak, stream) / seconds:.0%}")


def machines(lesson, peak, stream, link):
    """One row per machine: its walls, and how many flops one byte must be worth."""
    rows = [("this thread, float32", f"{peak / 1e12:.3g}", "", f"{stream / 1e12:.3g}",
             f"{link / 1e9:.3g}" if link else "", f"{peak / stream:.0f}",
             f"{peak / link:.0f}" if link else "", "")]
    rows += [(f"{name}, bf16", f"{flops / 1e12:.4g}", kit.size(size), f"{memory / 1e12:.3g}",
              f"{nvlink / 1e9:.0f}", f"{flops / memory:.0f}", f"{flops / nvlink:.0f}",
              f"{flops / network:.0f}")
             for name, (flops, size, memory, nvlink, network) in GPUS.items()]
    lesson.table(["", "Tflop/s", "memory", "TB/s", "link GB/s", "flops per byte: memory", "link",
                  "network"], rows)
    flops, _, memory, nvlink, network = GPUS["H100 SXM"]
    ladder = f"{memory / nvlink:.0f} times as fast as the link, {memory / network:.0f} times as"
    lesson.predict("H100: flops in the time in which one byte comes from memory?",
                   round(flops / memory), "", why="989.4 Tflop/s over 3.35 TB/s",
                   mistakes={round(flops / nvlink): "that is a byte over the link"})
    lesson.say(f"""
        From datasheets: dense bf16; NVLink one way, half of the 900 and 1800 GB/s that are quoted;
        network 400 and 800 Gbit/s. H100: memory is {ladder}
        fast as the network. That ladder decides what is cut along which wire.""")


def offers(lesson):
    """Flops per byte that each technique has, for GPT-3 in 16 bits, beside what wires demand."""
    flops, _, memory, nvlink, network = GPUS["H100 SXM"]
    P, width, length = cost.gpt_parameters(GPT3), GPT3.D, GPT3.T
    tensor = cost.tp(GPT3, cost.Group(8))
    gradients = cost.Group(8).all_reduce(P, 2).bytes
    linear = cost.linear_work(length, width, 4 * width, 2)
    step = 6 * P * length                             # of one sequence
    table = [("one linear layer", "memory", linear.flops / linear.bytes, memory),
             ("AdamW", "memory", 13 / 28, memory),
             ("dp=8: 2(p-1)/p of the gradients", "NVLink", step / gradients, nvlink),
             ("the same", "network", step / gradients, network),
             ("tp=8: 4 all_reduces per layer", "NVLink", step / 8 / sum(w.bytes for w in tensor),
              nvlink),
             ("the same", "network", step / 8 / sum(w.bytes for w in tensor), network),
             ("pp=8: activations, and back", "network", step / 8 / (4 * length * width), network),
             ("offload: gradients down, weights up", "PCIe", step / (2 * P * 2), PCIE)]
    lesson.table(["GPT-3, 2048 tokens on each GPU", "over", "offers", "H100 demands",
                  "of peak, at best"],
                 [(name, wire, f"{offer:.4g}", f"{flops / speed:.0f}",
                   f"{min(1, offer * speed / flops):.0%}") for name, wire, offer, speed in table])
    lesson.say("""
        Flops per byte. Below the demand the GPU waits, however well messages hide behind work. More
        tokens per GPU help dp and offload, whose bytes stay the same; a wider model helps tp; pp
        hardly talks. This is why tp stays inside a machine, and why batches are large.""")


def draw(figure, peak, stream, found):
    """Rooflines of three machines; our operations under ours."""
    axes = figure.subplots()
    x = np.logspace(-1.5, 4, 200)
    roofs = {"this thread": (peak, stream)}
    roofs.update({name: (flops, memory) for name, (flops, _, memory, _, _) in GPUS.items()})
    for name, (flops, memory) in roofs.items():
        axes.loglog(x, np.minimum(flops, x * memory) / 1e9, label=f"{name}: ridge at "
                    f"{flops / memory:.0f} flop/byte")
    for name, flops, nbytes, seconds in found:
        axes.loglog(flops / nbytes, flops / seconds / 1e9, "ko", markersize=4)
        axes.annotate("  " + name.split(",")[0], (flops / nbytes, flops / seconds / 1e9),
                      va="top", rotation=-45, rotation_mode="anchor")
    axes.set(xlabel="flops per byte of memory traffic", ylabel="Gflop/s",
             title="Rooflines: left of the ridge memory is the wall, right of it compute")
    axes.legend(loc="upper left")


if __name__ == "__main__":
    kit.run(main)
