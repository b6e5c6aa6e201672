"""Buckets: many small gradients in a few flat buffers, one collective for each buffer.

    summed by all_reduce        [ grad of p7 | grad of p6 | grad of p5 | u7 u6 u5 ]

    summed by reduce_scatter    [ piece 0 of p7 | of p6 | of p5 | u7 u6 u5 ]   row 0, for rank 0
                                [ piece 1 of p7 | of p6 | of p5 | u7 u6 u5 ]   row 1, for rank 1

A message costs a latency however small it is, so gradients travel together. Yet the first
bucket must not wait for the last gradient, or nothing is left to overlap with: the first is
small (1 MiB), the others larger (25 MiB). The numbers and the rule are PyTorch's: append, and
close the bucket once it has *reached* its limit, so that it may exceed it by one tensor.

u is 1 for a parameter that has a gradient and 0 otherwise. It travels in the same message, so
after the sum every rank knows, for free, which parameters were used anywhere.

A gradient is complete when it has been delivered once by each backward pass of the step,
whoever delivers it: the backward itself, or the weight pass that a backward has put off.

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
    """The gradients of some parameters, one after another in one flat buffer.

    ranks: rows of the buffer; 1 for an all_reduce, p for a reduce_scatter, where row r holds piece
    r of every gradient (as placement.Flat cuts it, padded with zeros)."""

    def __init__(self, params, ranks=1):
        self.params = params
        sizes = [-(-p.data.size // ranks) for p in params]
        ends = np.cumsum(sizes)
        self.flat = np.zeros(ranks * (ends[-1] + len(params)), params[0].dtype)
        self.rows = self.flat.reshape(ranks, -1)
        self.used = self.rows[:, ends[-1]:]
        self.columns = {p.name: slice(end - size, end) for p, size, end in zip(params, sizes, ends)}
        self.waiting = {}                                # name -> deliveries still to come

    def open(self, passes=1):
        """Expect every gradient anew, once from each backward pass.  Or {name: how often}"""
        often = passes if isinstance(passes, dict) else {}
        self.waiting = {p.name: often.get(p.name, passes) for p in self.params}
        self.used[...] = 0

    def deliver(self, p):
        """Count a delivery of p's gradient, and take it in once it is the last one."""
        left = self.waiting.get(p.name, 0) - 1
        if left < 0:
            raise RuntimeError(f"{p.name} got a gradient after the last one that was expected: its "
                               "bucket may be on its way already; say how many backward passes "
                               "there are, with model.summing(passes)")
        self.waiting[p.name] = left
        if left == 0:
            self.put(p)

    def put(self, p):
        """Take p's gradient in; p.grad is a view of this buffer now, or None if it has rows."""
        grad, rows = p.grad.reshape(-1), self.rows[:, self.columns[p.name]]
        for row, start in zip(rows, range(0, rows.size, rows.shape[1] or 1)):
            piece = grad[start:start + row.size]
            row[:piece.size], row[piece.size:] = piece, 0
        self.used[:, self.params.index(p)] = 1
        p.grad = rows[0].reshape(p.shape) if len(rows) == 1 else None
        del self.waiting[p.name]

    def close(self):
        """Take in what came less often than expected; what never came counts as zero."""
        for p in self.params:
            if p.name in self.waiting and p.grad is not None:
                self.put(p)
            elif p.name in self.waiting:
                self.rows[:, self.columns[p.name]] = 0
        self.waiting = {}

    def hand_out(self, row=None):
        """Give every parameter its sum, or my piece of it; None if no rank had a gradient for it.

        row: what reduce_scatter has left me; without it the one row is the sum, in p's shape."""
        mine = self.rows[0] if row is None else row
        for p, users in zip(self.params, mine[-len(self.params):]):
            piece = mine[self.columns[p.name]]
            p.grad = (piece.reshape(p.shape) if row is None else piece) if users else None

    def holds(self, p):
        """Is p.grad a view of this buffer: the sum of an earlier step?"""
        return p.grad is not None and np.may_share_memory(p.grad, self.flat)


def build(params, cap=CAP, first=FIRST, ranks=1):
    """Put parameters, in the order in which their gradients come, into buckets."""
    kinds = [p.dtype for p in params]
    lists = assign([p.data.nbytes for p in params], kinds, cap, first)
    return [Bucket([params[i] for i in members], ranks) for members in lists]
