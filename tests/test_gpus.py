"""What a GPU holds with each technique on: the closed forms beside cost.step's, and the papers'."""
from dataclasses import replace

import pytest

from lessons import gpus
from minidist import cost


@pytest.mark.parametrize("sizes", [gpus.ONE_B, gpus.GPT3])
def test_states_equal_what_cost_predicts_of_a_step(sizes):
    """In numbers of one width: P and G of 2 bytes, O of 12; what tp leaves whole is under 2 %."""
    table, sizes = gpus.ledger(sizes), replace(sizes, w=2, B=gpus.p)

    def states(**layout):
        return sum(cost.step(sizes, cost.Layout(state=6, **layout)).held[:3])

    assert table["fp16, masters in fp32"][0] == states()
    assert table["tp 4, with sp"][0] == pytest.approx(states(tp=4, sequence="again"), rel=0.02)
    zero = [states(dp=4, zero=stage) for stage in (1, 2, 3)]
    assert table["ZeRO 1, 2, 3 over 4"][0][1:] == pytest.approx(zero[1:], rel=1e-3)
    gradients = 2 * cost.gpt_parameters(sizes)             # stage 1 pads them to equal pieces
    assert table["ZeRO 1, 2, 3 over 4"][0][0] == pytest.approx(zero[0], abs=1e-3 * gradients)


def test_activations_by_the_paper():
    """Korthikanti et al. 2022: tp and sp divide all; selective leaves 34 s b h; blocks 2 s b h."""
    table, s = gpus.ledger(gpus.GPT3), gpus.GPT3
    whole = table["fp16, masters in fp32"][1]
    assert whole == 96 * s.N * s.D * (34 + 5 * s.H * s.T / s.D)
    assert table["tp 4, with sp"][1] == whole / 4
    selective, blocks = table["recompute attention; blocks"][1]
    assert selective == pytest.approx(whole * 34 / 114)
    assert blocks == 96 * 2 * s.N * s.D + whole / 96
    assert 1.8 < table["fp32"][1] / whole < 2


def test_every_technique_is_there_and_fits_the_screen():
    rows = gpus.ledgers(gpus.ONE_B, gpus.GPT3)
    names = " ".join(row[0] for row in rows)
    assert all(word in names for word in ("fp16", "ZeRO 1, 2, 3", "tp", "pp", "recompute",
                                          "offload"))
    assert rows[1][1:] == ["16.25", "9.56", "2,794", "275"]
