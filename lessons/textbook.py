"""What a textbook would compute, slowly: references that share nothing with the library."""
import numpy as np

from lessons.tables import difference
from minidist.engine import tensor


def gradients(model):
    return {p.name: p.grad.copy() for p in model.parameters()}


def apart(grads, reference):
    """The worst relative difference of two sets of gradients."""
    return max(difference(g, reference[name]) for name, g in grads.items())


def slopes(model, batch, grads, e=1e-5):
    """Move each parameter along a random u: does the loss change by g . u?  -> worst error"""
    rng, worst = np.random.default_rng(0), 0.0
    for p in model.parameters():
        u, at, ends = rng.standard_normal(p.shape), p.data.copy(), []
        with tensor.no_grad():
            for sign in (1, -1):
                p.data[...] = at + sign * e * u
                ends.append(model(batch).item())
        p.data[...] = at
        gap = abs((ends[0] - ends[1]) / (2 * e) - np.vdot(grads[p.name], u))
        worst = max(worst, gap / (np.linalg.norm(grads[p.name]) * np.linalg.norm(u)))
    return worst


def adamw(w, g, moments, t, rate, betas, eps, decay):
    """AdamW's update of w as the paper writes it.  moments: (m, v)  -> update, (m, v)"""
    m = betas[0] * moments[0] + (1 - betas[0]) * g
    v = betas[1] * moments[1] + (1 - betas[1]) * g * g
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return -rate * (m_hat / (np.sqrt(v_hat) + eps) + decay * w), (m, v)


def divisors(make_model, batch, p, *makers):
    """Divide the gradients of p shares in three ways: size and error of the first gradient, loss.

    makers: optimizers that take four steps each.  -> rows of a table"""
    shares, count = batch.split(p), batch.count
    ways = {"the sum over all tokens, / all targets": [1 / count] * p,
            "the sum of the ranks' means": [1 / share.count for share in shares],
            "the mean of the ranks' means": [1 / share.count / p for share in shares]}
    rows, right = [], None
    for name, weights in ways.items():
        first, after = zip(*(weighted(make_model(), make, shares, weights) for make in makers))
        right = first[0] if right is None else right
        off = [np.linalg.norm(x) / np.linalg.norm(right) for x in (first[0], first[0] - right)]
        rows.append([name, *(f"{x:.2f}" for x in (*off, *(loss / count for loss in after)))])
    return rows


def weighted(model, make, shares, weights, steps=4):
    """Train one process on weighted shares.  -> its first gradient, its last loss"""
    optimizer, grads = make(model.parameters()), []
    for _ in range(steps):
        model.zero_grad()
        for share, weight in zip(shares, weights):
            (model(share) * weight).backward()
        grads.append(np.concatenate([p.grad.reshape(-1) for p in model.parameters()]))
        optimizer.step()
    return grads[0], sum(model(share).item() for share in shares)
