"""The planner: estimates beside published steps, plans that fit, refusals with numbers."""
import json
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest

from minidist import BadInput, cost, estimate, plan, published, search
from minidist.estimate import CARDS, Job, Shares
from minidist.ranks import launch
from minidist.request import MODELS

A100 = CARDS["a100"]
GPT3 = MODELS["gpt3"]


# ------------------------------------------------------------------ estimates

@pytest.mark.parametrize("name", published.RUNS)
def test_estimates_of_runs_that_were_not_fitted(name):
    """Three shares fitted to every second run; others within 10 % in the median, 25 at worst."""
    card, runs = CARDS[name], published.RUNS[name]
    fitted = published.fit(runs[::2], card)
    assert fitted == pytest.approx(card.shares, abs=5e-4)
    errors = [abs(estimate.seconds(run.job, card, fitted).all / run.seconds - 1)
              for run in runs[1::2]]
    assert len(errors) == len(runs) // 2 and statistics.median(errors) < 0.10
    assert max(errors) < 0.25


def test_flops_are_those_of_the_closed_forms():
    job = replace(GPT3, again="blocks", dp=4, rows=2)
    sizes = replace(job.sizes, B=job.B)
    assert estimate.model_flops(job) == cost.gpt_flops(sizes)
    assert estimate.flops(job) == pytest.approx(
        cost.gpt_flops(sizes) + cost.recomputed_flops(sizes), rel=1e-12)
    assert estimate.flops(replace(job, again="attention")) == pytest.approx(
        cost.gpt_flops(sizes) + cost.recomputed_flops(sizes, "attention"), rel=1e-12)
    llama = MODELS["llama3-405b"]
    assert estimate.model_flops(llama) / (llama.B * llama.T) == pytest.approx(
        6 * (405.85e9 - 128256 * 16384) + 12 * 126 * 16384 * 8192)


def test_limits():
    """Links without end leave products and bubble; no products leave what is sent."""
    job, all_of_it = replace(GPT3, tp=8, pp=8, dp=2, again="blocks"), Shares(1, 1, 1)
    fast = replace(A100, hbm=1e30, node=1e30, network=1e30)
    ideal = estimate.flops(job) / job.cards / A100.peak
    assert estimate.seconds(job, fast, all_of_it).all == pytest.approx(ideal * (1 + 7 / 768))
    sent = estimate.seconds(job, replace(A100, peak=1e30, hbm=1e30, node=1e30), all_of_it)
    assert sent.all == pytest.approx((estimate.sent_to_stages(job) +
                                      estimate.sent_to_replicas(job)) / A100.network)
    slower = replace(A100, network=A100.network / 2).seconds(job)
    assert slower.all > A100.seconds(job).all


def test_bytes_sent_are_those_of_the_closed_forms():
    """On rings, in 16 bits; the estimate of tp leaves words and loss out: 2 D + 3 a token."""
    job = Job(L=4, D=64, H=4, V=128, T=32, B=8, tp=4, rows=8)
    ends = 2 * 3 / 4 * 2 * 8 * 32 * (2 * 64 + 3)
    assert estimate.sent_in_layers(job) + ends == sum(
        price.bytes for price in cost.tp(job.sizes, cost.Group(4)))
    job = replace(job, tp=1, dp=4)
    plain = cost.Group(4).all_reduce(job.parameters, 4).bytes
    assert estimate.sent_to_replicas(job) == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_those_of_the_zero_paper(zero):
    job = replace(GPT3, dp=64, zero=zero)
    held = estimate.held(job)
    one_layer = 2 * job.parameters / job.L * (zero == 3)     # gathered
    assert held.P + held.G + held.O - one_layer == pytest.approx(
        cost.zero_memory(job.parameters, 64, zero))


def test_activations_are_those_of_the_textbook():
    job = Job(96, 12288, 96, 51200, 2048, 64, tp=8, pp=8, v=3)
    assert estimate.held(job).A / 2 ** 30 == pytest.approx(66.84, abs=0.01)
    best = replace(job, sp=True, again="attention")
    assert estimate.held(best).A / 2 ** 30 == pytest.approx(12.35, abs=0.01)


# ------------------------------------------------------------------ plans

@pytest.mark.parametrize("job, card, cards", [
    (GPT3, "a100", 1024), (MODELS["llama3-70b"], "h100", 64),
    (MODELS["llama3-8b"], "a100", 16), (Job(24, 2304, 24, 51200, 2048, 512), "v100", 32)])
def test_what_is_found_fits_and_is_sorted(job, card, cards):
    found = search.plans(job, CARDS[card], cards)
    times = [took.all for took, _ in found]
    assert times == sorted(times)
    for took, each in found:
        assert each.cards == cards and each.tp <= 8 and each.H % each.tp == 0
        assert each.L % (each.pp * each.v) == 0 and each.B == (
            each.microbatches * each.rows * each.dp)
        assert estimate.held(each).all <= search.ROOM * CARDS[card].memory
        assert 0 < estimate.mfu(each, CARDS[card], took.all) < 0.7


def test_a_small_model_is_replicated_and_a_large_one_cut():
    small = search.plans(Job(17, 2176, 17, 50257, 2048, 512), A100, 8)[0][1]
    assert (small.tp, small.pp, small.dp) == (1, 1, 8)
    large = search.plans(GPT3, A100, 1024)[0][1]
    assert large.tp > 1 and large.pp > 1
    roomy = search.plans(GPT3, replace(A100, memory=1e14), 64)[0][1]
    assert (roomy.tp, roomy.again) == (1, None)


def test_the_tree_says_yes_and_no():
    lines = plan.tree(Job(17, 2176, 17, 50257, 2048, 512), A100, 8)
    assert [line.endswith("yes") for line in lines[1:4]] == [True] * 3 and "replicate" in lines[4]
    lines = plan.tree(MODELS["llama3-8b"], A100, 8)
    assert "Do P + G + O? 16 x 8.0e9 = 128 GB: no" in lines[2]
    lines = plan.tree(MODELS["llama3-405b"], A100, 8)
    assert lines[1].endswith("no") and "a layer must be cut" in lines[4]
    lines = plan.tree(Job(24, 4096, 32, 50257, 512, 512), A100, 8)
    assert "ZeRO" in lines[4]


# ------------------------------------------------------------------ the command

def run(*argv):
    return subprocess.run([sys.executable, "-m", "minidist.plan", *argv], text=True,
                          capture_output=True)


def test_the_command_shows_a_plan_and_what_lost(tmp_path):
    path = tmp_path / "plans.json"
    done = run("--model", "gpt3", "--cards", "1024", "--json", str(path))
    assert done.returncode == 0 and done.stdout.count("instead") == 3, done.stderr
    for word in "plan step holds sends bubble see".split():
        assert f"\n{word:11}" in done.stdout
    data = json.loads(path.read_text())
    assert f"plan       {data[0]['plan']}\n" in done.stdout and data[0]["held"]["P"] > 1e9
    shown = run("--published").stdout
    assert shown.count("  fitted\n") == 11 + 6 and shown.count("  tried\n") == 10 + 6
    assert shown.count("tried: median") == shown.count("0's figures") == 2


REFUSED = [
    ([], "how many cards"), (["--cards", "8"], "say which model"),
    (["--cards", "8", "--model", "gpt3", "--params", "7e9"], "say which model"),
    (["--cards", "8", "--params", "0"], "out of range"),
    (["--cards", "0", "--model", "gpt3"], "out of range"),
    (["--cards", "8", "--model", "gpt5"], "invalid choice"),
    (["--cards", "8", "--model", "gpt3", "--heads", "7"], "do not divide a width"),
    (["--cards", "8", "--model", "deepseek-v3", "--width", "512"], "what is known of deepseek"),
    (["--cards", "1021", "--model", "gpt3"], "do not divide over 1021 cards"),
    (["--cards", "8", "--model", "gpt3", "--card", "b9000"], "b9000 is nothing that"),
    (["--cards", "8", "--model", "gpt3", "--network", "0"], "out of range"),
    (["--cards", "8", "--model", "gpt3", "--try"], "give it --preset"),
    (["--cards", "8", "--model", "llama3-405b"], "GB too much; use --cards 128")]


def test_what_is_measured_starts_its_own_ranks(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan", "--calibrate", "here.json"])
    monkeypatch.setattr(plan.environment, "launched", lambda: True)
    with pytest.raises(BadInput, match="leave out -n and mpirun"):
        plan.main()


@pytest.mark.parametrize("argv, words", REFUSED)
def test_what_cannot_be_is_one_sentence_and_status_2(argv, words, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["plan", *argv])
    with pytest.raises(SystemExit) as ending:
        launch.run(plan.main)
    said = capfd.readouterr().err.strip()
    assert ending.value.code == 2 and words in said and "\n" not in said and "Trace" not in said
