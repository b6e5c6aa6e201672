"""The GPT of minidist/engine/gpt.py in PyTorch: same names, same weights, PyTorch's own operations.

The reference of tests/test_twin.py and the opponent in `python -m minidist.bench engine`.
"""
import torch
from torch.nn import functional as F

from minidist.engine.functional import IGNORE


class Twin:
    """A copy of a model's parameters, and its loss; fused: with PyTorch's fused attention."""

    def __init__(self, model, fused=False):
        self.config, self.fused = model.config, fused
        self.params = {p.name: torch.tensor(p.data, requires_grad=True) for p in model.parameters()}

    def linear(self, x, name):
        return F.linear(x, self.params[name + ".weight"], self.params[name + ".bias"])

    def layer_norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.params[name + ".weight"],
                            self.params[name + ".bias"])

    def attention(self, x, name):
        B, T, D = x.shape
        K, e = self.config.groups, self.config.head_width
        z = self.linear(x, name + ".qkv").view(B, T, K, -1, e)
        share = z.shape[3] - 2
        q = z[..., :share, :].reshape(B, T, K * share, e).transpose(1, 2)
        k, v = (z[..., i, :].transpose(1, 2) for i in (share, share + 1))
        if share > 1:
            k, v = (a.repeat_interleave(share, 1) for a in (k, v))
        attend = scaled_dot_product_attention if self.fused else plain_attention
        y = attend(q, k, v, is_causal=True)
        return self.linear(y.transpose(1, 2).reshape(B, T, D), name + ".proj")

    def mlp(self, x, name):
        return self.linear(F.gelu(self.linear(x, name + ".fc1"), approximate="tanh"), name + ".fc2")

    def block(self, x, i):
        x = x + self.attention(self.layer_norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn")
        return x + self.mlp(self.layer_norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp")

    def embed(self, tokens, stream):
        return (F.embedding(tokens, self.params["embed.wte.weight"])
                + F.embedding(stream, self.params["embed.wpe.weight"]))

    def head(self, x):
        name = "head.out.weight" if "head.out.weight" in self.params else "embed.wte.weight"
        return F.linear(self.layer_norm(x, "head.norm"), self.params[name])

    def loss(self, batch, block=None):
        """The sum of the losses, as model(batch).  block: what stands for self.block"""
        tokens, stream, targets = map(torch.as_tensor, (batch.tokens, batch.stream, batch.targets))
        x = self.embed(tokens, stream)
        for i in range(self.config.layers):
            x = (block or self.block)(x, i)
        return self.score(self.head(x), targets)

    def score(self, logits, targets):
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1),
                               reduction="sum", ignore_index=IGNORE)

    def value_and_gradients(self, batch):
        """-> loss, {name: gradient}, in NumPy"""
        loss = self.loss(batch)
        loss.backward()
        return loss.item(), {name: p.grad.numpy() for name, p in self.params.items()}

    def adamw(self, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        """PyTorch's fused AdamW, which decays matrices only, as optim.AdamW."""
        groups = [{"params": [p for p in self.params.values() if (p.ndim > 1) == decays],
                   "weight_decay": weight_decay if decays else 0.0} for decays in (True, False)]
        return torch.optim.AdamW(groups, lr, betas, eps, fused=True)


scaled_dot_product_attention = F.scaled_dot_product_attention


def plain_attention(q, k, v, is_causal):
    """Attention in four steps, as the paper has it; is_causal: always, here."""
    T = q.shape[-2]
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v
