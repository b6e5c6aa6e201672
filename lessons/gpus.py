"""The article's two models, and what a GPU holds of them with each technique switched on."""
from dataclasses import replace

from minidist import cost

GPT3 = replace(cost.GPT3, B=1)                                # one sequence
ONE_B = cost.Sizes(D=2048, L=20, T=2048, V=2048, H=16)        # 12 L D^2 = 1.0e9
GPU = 80e9                                                    # an H100
p = 4                                                         # GPUs that share what can be cut


def ledgers(*models):
    """List a row for each technique: its name, then P + G + O and A of each model, in GB."""
    found = [ledger(sizes) for sizes in models]
    return [[name, *(gigabytes(cell) for each in found for cell in each[name])]
            for name in found[0]]


def ledger(sizes):
    """Bytes on a GPU with one sequence: P + G + O, and A as Korthikanti et al. 2022 count it.

    -> {technique: (P + G + O, A)}, each alone beside fp16 with masters"""
    n, numbers = cost.gpt_parameters(sizes), sizes.L * sizes.N * sizes.D
    P, G, state = (n * each for each in cost.state_bytes("fp16"))
    layer, all_of_it = cost.textbook_activations(sizes), P + G + state
    A = sizes.L * layer
    zero = [cost.zero_memory(n, p, stage) for stage in (1, 2, 3)]
    return {"fp32": (n * sum(cost.state_bytes()), wide(sizes)),
            "fp16, masters in fp32": (all_of_it, A),
            f"ZeRO 1, 2, 3 over {p}": (zero, A),
            f"tp {p}, with sp": (all_of_it / p, A / p),
            f"pp {p}, {p} micro-batches": (all_of_it / p, A),    # of each, a stage's L/p layers
            "recompute attention; blocks": (all_of_it, [34 * numbers, 2 * numbers + layer]),
            f"offload O; P too, ZeRO 3 over {p}": ([P + G, G / p], A),
            f"all, with ZeRO 1: {p ** 3} GPUs": (
                (P + G) / p ** 2, (2 * numbers + layer) / p)}


def wide(sizes):
    """Bytes of A in fp32: 16 numbers of 16 bits and 2 masks make 34, 2 and 1 make the 5."""
    return sizes.L * (66 * sizes.N * sizes.D + 9 * sizes.H * sizes.T * sizes.N)


def gigabytes(cell):
    """Write bytes in GB; several, one after the other."""
    numbers = [x / 1e9 for x in (cell if isinstance(cell, list) else [cell])]
    return ", ".join(f"{x:.2f}" if x < 100 else f"{x:,.0f}" for x in numbers)
