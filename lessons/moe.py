"""MIXTURE OF EXPERTS      How does a model get more parameters without more work per token?

  lifts   compute     E MLPs in the place of one, and each token goes through k of them only
  costs   memory      all E are held, with gradients and optimizer state; and tokens crowd
  code    minidist/moe.py, minidist/engine/functional.py (grouped_linear)
  run     python -m lessons.moe         (one rank is enough; lessons.ep has the experts on several)
"""
import numpy as np

from lessons import counted, kit, routed, setting
from minidist import cost, moe, step
from minidist.engine import functional
from minidist.engine.tensor import Tensor

EXERCISE = [moe.route, moe.balance_loss, moe.expert_order, moe.to_tokens]
ALONE = True
E, ROWS, STEPS, LATE = 8, 8, 80, slice(60, None)
WAYS = {"no balance": {}, "loss": dict(aux=0.05), "bias": dict(bias=0.003)}


def more_for_the_same(lesson):
    """More parameters for the same work

    Of the 12 D^2 parameters of a layer, 8 D^2 are its MLP. Put E of them side by side, and let a
    router send each token to k: parameters grow with E, products with k."""
    lesson.predict("8 experts in the place of each MLP, one for each token: how many times as many "
                   "parameters has a layer, D large?", 5.67, "times",
                   why="(4 + 8 x 8) / 12: attention is not multiplied",
                   mistakes={8: "attention, a third of the layer, stays as it is"})
    rows, gaps, c = [], [], setting.model().config
    for experts, k in (0, 1), (4, 1), (8, 1), (8, 2):
        sizes = cost.Sizes.of(c, B=ROWS, E=experts, k=k)
        forward, backward = counted.step(spread(experts, k), setting.words(ROWS))
        rows.append([f"{experts} experts, {k} each" if experts else "dense",
                     f"{cost.gpt_parameters(sizes):,}", f"{cost.active_parameters(sizes):,}",
                     f"{(forward[0] + backward[0]) / sizes.N / 1e6:.3f}"])
        gaps.append(abs((forward[0] + backward[0]) / cost.gpt_flops(sizes) - 1))
    lesson.table(["4 layers, D = 48", "parameters", "met by a token", "Mflop per token"], rows)
    lesson.check("products of a step, counted against the formula", max(gaps), 0.01)


def a_token_s_way(lesson):
    """A token's way

    One matrix scores E experts for each token; softmax; the k best are chosen, ties to the lower
    number. Their results are added up, each times its gate: so the router gets a gradient. Rows
    are sorted by expert, so that each expert works on one run of them: one product for all."""
    m, x = routed.layer(experts=4, top_k=2, capacity=0.75), sample(6)
    chosen, gates, p = moe.route(Tensor(x @ m.router.data.T), None, 2)
    kept = moe.keep(chosen, gates.data, m.routing)
    lesson.table(["token", "probabilities", "chosen", "gates", "has a place"],
                 [(t, decimals(p.data[t]), f"{a} {b}", decimals(gates.data[t]),
                   " ".join("-+"[int(v)] for v in kept[t])) for t, (a, b) in enumerate(chosen)])
    lesson.fill(f"""
        Capacity 0.75: each expert has {moe.places(6, m.routing)} places, 6 x 2 / 4 x 0.75 rounded
        up. Who finds none (-) gets zero from it, and goes on in the residual stream; the other
        gate stays as it is. Without capacity ("dropless") all are kept.""")


def collapse(lesson):
    """Without balance a few experts get everything

    Who is chosen learns, who learns is chosen more often. Two remedies: a loss that is smallest
    when all are chosen alike, or a bias on the choice alone, moved after each step."""
    lesson.predict("all tokens choose the same of 8 experts, whose capacity is 1.25: what share "
                   "finds no place?", 84.4, "%", why="1.25 / 8 find one",
                   mistakes={15.6: "that is the share that finds one"})
    found = {way: trained(**routing) for way, routing in WAYS.items()}
    header = "balance", "busiest expert's share", "experts in use", "dropped at 1.25", "loss"
    lesson.table(header, [
        [way, f"{busiest(shares):.2f}", int((shares[LATE].mean(0) > 0.02).sum()),
         f"{100 * dropped(shares):.0f} %", f"{loss:.3f}"] for way, (shares, loss) in found.items()])
    lesson.fill(f"""
        Means over the last quarter of {STEPS} steps; an even share is {1 / E:.3f}. Idle experts are
        parameters for nothing; dropped tokens get no MLP; and over ranks all wait for the busiest
        expert's (lessons.ep). A bias that moves too fast drives the crowd from one to the next.""")
    lesson.check("the busiest expert's share with the loss, against without",
                 busiest(found["loss"][0]) / busiest(found["no balance"][0]), 0.7)
    lesson.figure(draw, {way: shares for way, (shares, _) in found.items()})


def prove(lesson):
    """Is it right?

    Each function alone; a whole layer against a loop over tokens; its gradients against slopes."""
    routed.router(lesson)
    for name, routing in ("all kept", {}), ("some dropped", dict(capacity=0.6, drop="position")):
        m, x = routed.layer(bias=0.1, **routing), sample(7)
        y = m(Tensor(x[None])).data[0]
        lesson.check(f"a layer, {name}", kit.difference(y, routed.by_hand(m, x)), 1e-12)
    x, g = Tensor(sample(7)[None], requires_grad=True), np.random.default_rng(1).random((1, 7, 4))
    m(x).backward(g)
    for name, array, grad in (("its input", x.data, x.grad), ("its router", m.router.data,
                                                              m.router.grad)):
        lesson.check(f"gradient of {name}", kit.difference(
            grad, routed.slope(lambda _: routed.by_hand(m, x.data[0])[None], array, g)), 1e-6)
    aux = routed.layer(aux=0.1)
    aux(Tensor(x.data)).backward(np.zeros(x.shape))
    f = aux.counts / aux.counts.sum()
    lesson.check("the balance loss moves the router", kit.difference(aux.router.grad, routed.slope(
        lambda w: 0.1 * 3 * (routed.softmax(x.data[0] @ w.T) @ f).sum(), aux.router.data, 1)), 1e-6)
    c, D = setting.model().config, setting.model().config.width
    model = spread(E, 1)
    lesson.ledger(("parameters", "L (4 D^2+8 D+E (8 D^2+6 D))+(V+T+2) D", cost.gpt_parameters(
        cost.Sizes.of(c, E=E)), sum(p.size for p in model.parameters())),
        ("choices", "B T k", None, int(tokens(model).sum())),
        L=c.layers, D=D, E=E, V=c.vocab, T=c.context, B=ROWS, k=1)


@kit.breaks(moe, "picked")
def garbage(rows, row, kept):
    """A token that was dropped gets the result of whoever stands first, instead of zero.

    Every number is plausible; only tokens without a place are wrong."""
    return rows[row] if len(rows) else garbage.original(rows, row, kept)


@kit.breaks(functional, "add_auxiliary_loss")
def lost_loss(x, loss, name="auxiliary"):
    """The balance loss is computed and never added: what the helper returns was not used.

    It was reported, and even fell a little; the router never heard of it (NeMo, Megatron-LM)."""
    return x


@kit.breaks(moe, "to_tokens")
def renormalised(out, gates, row, kept):
    """Gates are scaled to add up to 1 over the experts that were not dropped.

    A token then leans on one expert as if it had asked for that one alone."""
    total = (gates * kept).sum(1, True)
    return renormalised.original(out, gates * kept / (total + (total.data == 0)), row, kept)


@kit.breaks(moe, "route")
def bias_in_the_gate(logits, bias, k):
    """The bias that evens out the choice is in the gates, too.

    It then changes what the model computes, and not only who computes it."""
    if bias is None:
        return bias_in_the_gate.original(logits, bias, k)
    chosen, _, p = bias_in_the_gate.original(logits, bias, k)
    gates = functional.embedding((p + bias).reshape(-1, 1),
                                 np.arange(len(chosen))[:, None] * p.shape[1] + chosen)
    gates = gates.reshape(*chosen.shape)
    return chosen, gates / gates.sum(1, True), p


def sample(n):
    return np.random.default_rng(2).standard_normal((n, 4))


def decimals(numbers):
    return " ".join(f"{v:.2f}" for v in numbers)


def spread(experts, k):
    """The lessons' GPT, dense or with experts."""
    model = setting.model()
    return moe.replace_mlps(model, moe.MoEConfig(experts, k)) if experts else model


def tokens(model):
    """Run a batch.  -> how many tokens the first layer's experts got"""
    model(setting.words(ROWS))
    return moe.mixtures(model)[0].counts


def trained(**routing):
    """Train one layer with experts.  -> shares of the tokens [steps, E], last loss"""
    model = setting.model(setting.corpus().vocab, layers=1, dtype=np.float32)
    moe.replace_mlps(model, moe.MoEConfig(E, 1, **routing))
    optimizer, shares, losses = setting.ADAMW(model.parameters(), lr=1e-3), [], []
    for t in range(STEPS):
        losses.append(step.train_step(model, setting.text(ROWS, t), optimizer).loss)
        counts = moe.mixtures(model)[0].counts
        shares.append(counts / counts.sum())
    return np.array(shares), float(np.mean(losses[LATE]))


def busiest(shares):
    """The share of a step's tokens that its busiest expert gets, at the end."""
    return shares[LATE].max(1).mean()


def dropped(shares):
    """The share of late tokens beyond a capacity of 1.25."""
    return np.maximum(shares[LATE] - 1.25 / E, 0).sum(1).mean()


def draw(figure, found):
    """Tokens by expert and step; and of the busiest, beside the capacity."""
    tokens = ROWS * setting.CONTEXT
    top, below = figure.subplots(2, len(found), sharex=True)
    for (way, shares), heat, line in zip(found.items(), top, below):
        heat.imshow(shares.T, aspect="auto", vmin=0, vmax=0.6, cmap="magma", interpolation="none")
        heat.set(title=way, ylabel="expert")
        line.plot(tokens * shares.max(1))
        line.axhline(1.25 * tokens / E, color="black", linestyle="--", label="capacity 1.25")
        line.set(xlabel="step", ylabel="tokens of the busiest", ylim=(0, tokens))
        line.legend()


TAKEAWAY = "Parameters without FLOPs: but only as long as all experts are chosen alike."
FIELD = "GShard, Switch, Mixtral, DeepSeek-V3 (bias); Megatron-Core MoE, MegaBlocks (dropless)"
TRY = ["how much more does E = 8, k = 2 keep for backward than dense, in one layer? (4 N D each)"]
SCREENS = [more_for_the_same, a_token_s_way, collapse, prove, lost_loss]

if __name__ == "__main__":
    kit.run(SCREENS)
