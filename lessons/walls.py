"""THREE WALLS      What does training run out of first: compute, memory, or bandwidth?

  lifts   nothing     these are the walls; each later lesson moves one of them
  costs   nothing     but every lesson will be paid for at the rates of this one
  code    minidist/cost/model.py
  run     mpirun -n 2 python -m lessons.walls         or: python -m lessons.walls -n 2
"""
from dataclasses import replace

import numpy as np

from lessons import clock, counted, kit, questions
from minidist import cost
from minidist.engine import attention

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



def growth(lesson):
    """Models grow faster than memory"""
    lesson.predict("175B parameters in training: how many GPUs of 40 GB just to hold them?",
                   70, "GPUs", why="16 bytes per parameter",
                   mistakes={9: "2 bytes each: only the weights", 35: "8 bytes each is too little",
                             18: "4 bytes each: only the weights, in float32"})
    flops, _, memory, nvlink, _ = GPUS["H100 SXM"]
    lesson.predict("An H100: flops that it computes while one byte comes from memory?",
                   round(flops / memory), "flops", why="989.4e12 / 3.35e12",
                   mistakes={round(flops / nvlink): "that is a byte over the link"})
    lesson.table(["year", "model", "parameters", "16 bytes each", "GPU", "needed to hold that"],
                 [(year, name, f"{n / 1e9:.3g}B", kit.size(16 * n), f"{gpu}, {kit.size(room)}",
                   f"{max(1, np.ceil(16 * n / room)):.0f}") for year, name, n, gpu, room in GROWTH])
    models, gpus = (f"{GROWTH[-1][i] / GROWTH[0][i]:,.4g} times" for i in (2, 4))
    lesson.fill(f"""
        In six years models grew {models}, a GPU's memory {gpus}. And holding a model is the smaller
        problem: 6 flops per parameter and token must be computed, and what lies on many GPUs must
        talk. Compute, memory, bandwidth: every trick trades one for another.""")


def this_machine(lesson):
    """This machine, one thread"""
    lesson.peak, lesson.stream = lesson.share(lambda: [clock.sgemm(), clock.triad()])
    alpha, beta = clock.link(lesson, 16 << 20)
    rates = [("memory: c = a + b, 64 MB each", lesson.stream)]
    rates += [("link: 16 MB from rank 0 to rank 1", 1 / beta)] if beta else []
    lesson.table(["float32", "measured", "flops per byte"], [
        ("compute: product of two 1024 x 1024 matrices", f"{lesson.peak / 1e9:.1f} Gflop/s", ""),
        *((name, f"{rate / 1e9:.1f} GB/s", f"{lesson.peak / rate:.1f}") for name, rate in rates)])
    lesson.say(f"A message of 8 bytes takes {kit.duration(alpha)}: as long as "
               f"{alpha * lesson.peak:,.0f} flops." if alpha else
               "One rank has no link: start two to measure it.")


def under_the_roof(lesson):
    """The operations of one step under the roof

    An operation takes at least flops / peak, and at least bytes / bandwidth. Whichever is longer
    is its wall: compute where it does many flops per byte, memory where it does few."""
    peak, stream, rows = lesson.peak, lesson.stream, []
    found = lesson.share(operations)
    for name, flops, nbytes, seconds in found:
        roof = cost.at_least(cost.Work(flops, nbytes), peak, stream) / seconds
        rows.append((name, f"{flops / 1e6:.0f}", f"{nbytes / 1e6:.1f}", f"{flops / nbytes:.2f}",
                     "compute" if flops / peak > nbytes / stream else "memory",
                     kit.duration(seconds), f"{roof:.0%}"))
    lesson.table(["forward, float32", "Mflop", "MB", "flop/byte", "wall", "time", "of the roof"],
                 rows)
    share = {row[0]: int(row[-1][:-1]) for row in rows}
    lesson.fill(f"""
        Of the roof: the least time, over the time. Here {max(share, key=share.get)} comes closest
        and {min(share, key=share.get)} stays furthest below: elementwise NumPy passes over an array
        many times."""
                + (" More than 100 %: something was busy while the peak was measured."
                   if max(share.values()) > 100 else ""))
    lesson.figure(draw, peak, stream, found)


def operations():
    """Count and time each operation.  -> [(name, flops, bytes, seconds)]"""
    rows = []
    for name, (op, arrays) in counted.operations(B, T, D, H).items():
        products, others, nbytes = counted.count(op, arrays)
        seconds = clock.best(lambda op=op, a=arrays: op(*a), 3)
        rows.append([name, products + others, nbytes, seconds])
    return rows


def on_a_gpu(lesson):
    """The same walls on a GPU

    Datasheets: dense bf16; NVLink one way, half of what is quoted; network of 400, 800 Gbit/s."""
    lesson.table(["", "Tflop/s", "memory", "TB/s", "link GB/s", "flops per byte: memory", "link",
                  "network"],
                 [(f"{name}, bf16", f"{flops / 1e12:.4g}", kit.size(size), f"{memory / 1e12:.3g}",
                   f"{nvlink / 1e9:.0f}", *(f"{flops / wire:.0f}" for wire in
                                            (memory, nvlink, network)))
                  for name, (flops, size, memory, nvlink, network) in GPUS.items()])
    _, _, memory, nvlink, network = GPUS["H100 SXM"]
    lesson.fill(f"""
        H100: memory is {memory / nvlink:.0f} times as fast as the link, {memory / network:.0f}
        times as fast as the network. That ladder decides what is cut along which wire.""")


def offers(lesson):
    """What a technique offers, and what a wire demands: flops per byte"""
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
        Below the demand the GPU waits, however well messages hide behind work. More tokens per GPU
        help dp and offload, whose bytes stay the same; a wider model helps tp; pp hardly talks.""")


def prove(lesson):
    """Is it right?

    N = B T tokens, w bytes per number; attention takes t queries at a time, skips tiles above."""
    questions.walls(lesson)
    lesson.ledger(*lesson.share(counts), N=T, B=1, T=T, D=D, F=4 * D, w=4, t=attention.TILE)


def counts():
    """Ledger rows: flops and bytes by formula, and as they come."""
    ops = counted.operations(1, T, D, H)
    linear, attend = (counted.count(*ops[name]) for name in ("linear fc1", "attention"))
    want, pairs = cost.linear_work(T, D, 4 * D), cost.attention_work(1, T, D, tile=attention.TILE)
    return [("linear: flops", "2 N D F + N F", want.flops, sum(linear[:2])),
            ("linear: bytes", "w (N D + D F + F + N F)", want.bytes, linear[2]),
            ("attention: flops of the products", "2 B D T (T+t)", pairs.flops, attend[0]),
            ("attention: bytes", "4 w B T D", pairs.bytes, attend[2])]


@kit.breaks(cost, "linear_work")
def one_flop(N, D, F, w=4):
    """A multiply-add counts as one flop.

    Vendors count two: divide one by the other, and a machine looks half as well used as it is."""
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


TAKEAWAY = "Ask of every trick: which wall does it move, and in which of the three does one pay?"
FIELD = "roofline (Williams et al. 2009); arithmetic intensity; model FLOPs utilization"
TRY = ["how many tokens must a linear layer see to be held up by compute here? on an H100?"]
SCREENS = [growth, this_machine, under_the_roof, on_a_gpu, offers, prove, one_flop]

if __name__ == "__main__":
    kit.run(SCREENS)
