"""Closed forms against published figures: parameters, FLOPs, memory, to the digits printed there.

N   Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", tables 1 and 2
K   Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models",
    figures 1 and 7, tables 3 and 5
S   Smith et al. 2022, "Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B"
Z   Rajbhandari et al. 2020, "ZeRO", table 1
L   Grattafiori et al. 2024, "The Llama 3 herd of models", table 4
"""
import pytest

from minidist import cost
from minidist.cost import Sizes

A100, H100, GB, GIB = 312e12, 989.4e12, 1e9, 2 ** 30


def gpt(a, h, layers, B=1):
    """The GPT of N, K and S: learned positions, tied words."""
    return Sizes(B=B, T=2048, D=h, H=a, V=51200, L=layers, w=2)


def with_recomputation(sizes, what="blocks"):
    return cost.gpt_flops(sizes) + cost.recomputed_flops(sizes, what)


# ------------------------------------------------------------------ N, table 1

@pytest.mark.parametrize("billions, a, h, layers, gpus, batch, tflops, pflops", [
    (1.7, 24, 2304, 24, 32, 512, 137, 4.4), (3.6, 32, 3072, 30, 64, 512, 138, 8.8),
    (7.5, 32, 4096, 36, 128, 512, 142, 18.2), (18.4, 48, 6144, 40, 256, 1024, 135, 34.6),
    (39.1, 64, 8192, 48, 512, 1536, 138, 70.8), (76.1, 80, 10240, 60, 1024, 1792, 140, 143.8),
    (145.6, 96, 12288, 80, 1536, 2304, 148, 227.1), (310.1, 128, 16384, 96, 1920, 2160, 155, 297.4),
    (529.6, 128, 20480, 105, 2520, 2520, 163, 410.2), (1008.0, 160, 25600, 128, 3072, 3072, 163,
                                                      502.0)])
def test_parameters_and_flops_of_megatron(billions, a, h, layers, gpus, batch, tflops, pflops):
    sizes = gpt(a, h, layers, batch)
    assert cost.gpt_parameters(sizes) / 1e9 == pytest.approx(billions, abs=0.06)
    printed = 1 + 2048 / (6 * h) + 51200 / (16 * layers * h)
    assert with_recomputation(sizes) == pytest.approx(
        96 * batch * 2048 * layers * h ** 2 * printed, rel=1e-12)
    assert gpus * tflops / 1000 == pytest.approx(pflops, rel=0.012)      # a rate is that of all


# ------------------------------------------------------------------ N, table 2: days, 300B tokens

@pytest.mark.parametrize("h, a, layers, batch, gpus, tflops, days", [
    (12288, 96, 96, 1536, 384, 144, 90), (12288, 96, 96, 1536, 768, 88, 74),
    (12288, 96, 96, 1536, 1536, 44, 74), (20480, 128, 105, 2560, 640, 138, 169),
    (20480, 128, 105, 2240, 1120, 98, 137), (20480, 128, 105, 2240, 2240, 48, 140),
    (12288, 96, 96, 1536, 384, 153, 84), (12288, 96, 96, 1536, 768, 149, 43),
    (12288, 96, 96, 1536, 1536, 141, 23), (20480, 128, 105, 2240, 560, 171, 156),
    (20480, 128, 105, 2240, 1120, 167, 80), (20480, 128, 105, 2240, 2240, 159, 42)])
def test_days_of_training(h, a, layers, batch, gpus, tflops, days):
    """The rates are printed with two or three digits, so the days agree to one."""
    sizes = gpt(a, h, layers, batch)
    steps = 300e9 / sizes.N
    seconds = steps * with_recomputation(sizes) / (gpus * tflops * 1e12)
    assert seconds / 86400 == pytest.approx(days, abs=1.1)


# ------------------------------------------------------------------ S: 530B on 2240 to 3360 GPUs

@pytest.mark.parametrize("gpus, seconds, tflops", [
    (2240, 60.1, 126), (2800, 50.2, 121), (3360, 44.4, 113)])
def test_rates_of_megatron_turing(gpus, seconds, tflops):
    flops = with_recomputation(gpt(128, 20480, 105, 1920))
    assert flops / seconds / gpus / 1e12 == pytest.approx(tflops, abs=0.65)


# ------------------------------------------------------------------ K, tables 3 and 5

@pytest.mark.parametrize("a, h, layers, gpus, batch, seconds, mfu", [
    (64, 6144, 48, 8, 4, 1.10, 41.5), (96, 12288, 96, 64, 64, 13.75, 51.4),
    (128, 20480, 105, 280, 280, 37.83, 56.0), (160, 25600, 128, 512, 512, 71.49, 56.3)])
def test_utilisation_with_selective_recomputation(a, h, layers, gpus, batch, seconds, mfu):
    """MFU counts the model's FLOPs.  HFU there adds more for the repeated attention than we do."""
    found = cost.gpt_flops(gpt(a, h, layers, batch)) / (gpus * A100 * seconds)
    assert 100 * found == pytest.approx(mfu, abs=0.2)


# ------------------------------------------------------------------ K, figure 1 and 7

CASES = {"22B": (gpt(64, 6144, 48, 4), 8, 1, 1), "175B": (gpt(96, 12288, 96, 1), 8, 8, 3),
         "530B": (gpt(128, 20480, 105, 1), 8, 35, 3), "1T": (gpt(160, 25600, 128, 1), 8, 64, 1)}


@pytest.mark.parametrize("name, kept, selective, states", [
    ("22B", 59.25, 9.5625, 45.56), ("175B", 66.84, 12.35, 45.56), ("530B", 114.02, 23.08, 31.64),
    ("1T", 131.25, 26.5625, 32.96)])
def test_memory_of_activations_and_states(name, kept, selective, states):
    """The first stage holds the activations of L layers in all, and more if it is interleaved."""
    sizes, t, p, v = CASES[name]
    layers = sizes.L * (1 + (p - 1) / (p * v) if v > 1 else 1)
    plain = layers * cost.textbook_activations(sizes, t)
    best = layers * cost.textbook_activations(sizes, t, sequence=True, again="attention")
    assert (plain / GIB, best / GIB) == (pytest.approx(kept, abs=0.006),
                                         pytest.approx(selective, abs=0.006))
    assert 18 * 12 * sizes.L * sizes.D ** 2 / (t * p) / GIB == pytest.approx(states, abs=0.006)


@pytest.mark.parametrize("name, sp, selective, both, full", [
    ("22B", 66.8, 49.4, 16.1, 7.6), ("175B", 62.0, 56.5, 18.5, 8.7),
    ("530B", 58.3, 61.9, 20.2, 9.5), ("1T", 58.3, 61.9, 20.2, 9.5)])
def test_shares_of_what_tensor_parallelism_keeps(name, sp, selective, both, full):
    sizes, t, *_ = CASES[name]
    base = cost.textbook_activations(sizes, t)
    for share, options in ((sp, dict(sequence=True)), (selective, dict(again="attention")),
                           (both, dict(sequence=True, again="attention")),
                           (full, dict(again="blocks"))):
        found = cost.textbook_activations(sizes, t, **options)
        assert 100 * found / base == pytest.approx(share, abs=0.06), options


# ------------------------------------------------------------------ Z, table 1; L, table 4

@pytest.mark.parametrize("ranks, row_7b, row_128b, row_1t", [
    (1, (120, 120, 120), (2048,) * 3, (16000,) * 3),
    (4, (52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    (16, (35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    (64, (31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    (256, (30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    (1024, (30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6))])
def test_memory_of_zero(ranks, row_7b, row_128b, row_1t):
    for parameters, row in ((7.5e9, row_7b), (128e9, row_128b), (1e12, row_1t)):
        for stage, printed in enumerate(row, 1):
            found = cost.zero_memory(parameters, ranks, stage) / GB
            assert found == pytest.approx(printed, abs=0.05 if printed < 100 else 1), stage


@pytest.mark.parametrize("tflops, percent", [(430, 43), (400, 41), (380, 38)])
def test_parameters_and_utilisation_of_llama(tflops, percent):
    """Grouped heads, three matrices in the MLP, words and head apart, no biases."""
    layers, h, hidden, a, kv, V = 126, 16384, 53248, 128, 8, 128256
    attention = 2 * h * h + 2 * h * (h // a) * kv
    parameters = layers * (attention + 3 * h * hidden + 2 * h) + 2 * V * h + h
    assert parameters / 1e9 == pytest.approx(405.85, abs=0.01)
    assert 100 * tflops * 1e12 / H100 == pytest.approx(percent, abs=0.65)
