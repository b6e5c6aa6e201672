"""Buckets: many small gradients in a few flat buffers, one all_reduce for each buffer.

    bucket   [ grad of p7 | grad of p6 | grad of p5 | u7 u6 u5 ]

A message costs a latency however small it is, so gradients travel together. Yet the first
bucket must not wait for the last gradient, or nothing is left to overlap with: the first is
small (1 MiB), the others larger (25 MiB). The numbers and the rule are PyTorch's: append, and
close the bucket once it has *reached* its limit, so that it may exceed it by one tensor.

u is 1 for a parameter that has a gradient and 0 otherwise. It travels in the same message, so
after the sum every rank knows, for free, which parameters were used anywhere.

Lesson: mpirun -n 4 python -m lessons.dp
Paper:  Li et al. 2020, "PyTorch distributed: experiences on accelerating data parallel training"
"""
import numpy as np

FIRST, CAP = 1 << 20, 25 << 20                          # bytes: 1 MiB, 25 MiB


def assign(sizes, kinds=None, cap=CAP, first=FIRST):
    """Deal tensors of these sizes (bytes) into buckets, in order.  -> lists of indices

    kinds[i]: what must not mix, such as the dtype; every kind has its own first bucket."""
    closed, still_open, limits = [], {}, {}
    for i, size in enumerate(sizes):
        kind = kinds[i] if kinds else None
        members, total = still_open.get(kind, ([], 0))
        members, total = [*members, i], total + size
        if total >= limits.get(kind, min(first, cap)):
            closed.append(members)
            limits[kind] = cap
            members, total = [], 0
        still_open[kind] = members, total
    return sorted(closed + [members for members, _ in still_open.values() if members])


class Bucket:
    """The gradients of some parameters, one after another in one flat buffer."""

    def __init__(self, params):
        self.params = params
        sizes = [p.data.size for p in params]
        ends = np.cumsum(sizes)
        self.flat = np.zeros(ends[-1] + len(params), params[0].dtype)
        self.used = self.flat[ends[-1]:]
        self.views = {p.name: self.flat[end - p.data.size:end].reshape(p.shape)
                      for p, end in zip(params, ends)}
        self.waiting = set()

    def open(self):
        """Expect every gradient anew."""
        self.waiting = {p.name for p in self.params}
        self.used[...] = 0

    def put(self, p):
        """Take p's gradient in; from now on p.grad is a view of this buffer."""
        if p.name not in self.waiting:
            raise RuntimeError(f"{p.name} got a second gradient in one backward: its bucket may "
                               "be on its way already")
        self.waiting.remove(p.name)
        view = self.views[p.name]
        view[...] = p.grad
        self.used[self.params.index(p)] = 1
        p.grad = view

    def close(self):
        """Count what never came as zero, unless an earlier micro-batch left a gradient."""
        for p in self.params:
            if p.name in self.waiting:
                if p.grad is None:
                    self.views[p.name][...] = 0
                else:
                    self.put(p)
        self.waiting = set()

    def hand_out(self):
        """Give every parameter its sum; None if no rank had a gradient for it."""
        for p, users in zip(self.params, self.used):
            p.grad = self.views[p.name] if users else None


def build(params, cap=CAP, first=FIRST):
    """Put parameters, in the order in which their gradients come, into buckets."""
    kinds = [p.dtype for p in params]
    lists = assign([p.data.nbytes for p in params], kinds, cap, first)
    return [Bucket([params[i] for i in members]) for members in lists]
