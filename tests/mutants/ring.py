"""What may go wrong in the functions of lessons.ring."""

SHIFT = "comm.shift(chunks[comm.rank - step], into=incoming[:mine.size])"
FOR = "for step in range(1, comm.size):"
LEFT = """for step in range(1, comm.size):
        out, mine = (chunks[(comm.rank + i) % comm.size] for i in (step, step + 1))
        op(mine, comm.sendrecv(out, (comm.rank - 1) % comm.size, incoming[:mine.size],
                               (comm.rank + 1) % comm.size), out=mine)
    for step in ():"""
LEFT_AGAIN = """for step in range(comm.size - 1):
        comm.sendrecv(chunks[(comm.rank + step) % comm.size], (comm.rank - 1) % comm.size,
                      chunks[(comm.rank + step + 1) % comm.size], (comm.rank + 1) % comm.size)
    for step in ():"""
TO_ALL = """pieces = []
    total = x.copy()
    for k in range(1, comm.size):
        op(total, comm.sendrecv(x, (comm.rank + k) % comm.size, np.empty_like(x),
                                (comm.rank - k) % comm.size), out=total)
    x[...] = total
    return"""

MUTANTS = {
    "reduce_scatter": [
        ("comm.rank - step - 1", "comm.rank - step"),
        ("chunks[comm.rank - step - 1]", "chunks[(comm.rank + step) % comm.size]"),
        ("chunks[comm.rank - step],", "chunks[comm.rank],"),          # always my own
        ("op(mine, ", "np.add(mine, "),                               # op ignored
        ("op=np.add", "op=np.maximum"),
        ("out=mine)", "out=mine.copy())"),
        ("chunks[0].dtype", "np.float64"),                            # whatever the dtype
        ("max(chunk.size for chunk in chunks)", "chunks[0].size"),    # chunk 0 is the longest
        ("incoming[:mine.size]", "incoming"),                         # all are as long
        ("range(1, comm.size)", "range(1, comm.size - 1)"),           # one hop too few
        ("range(1, comm.size)", "range(comm.size - 1)"),              # chunk r+1 on rank r
        ("op(mine, " + SHIFT + ", out=mine)", "mine[...] = " + SHIFT),
        ("range(1, comm.size)", "range(1, comm.size + 1)"),
    ],
    "all_gather": [
        ("range(comm.size - 1)", "range(comm.size - 2)"),
        ("chunks[comm.rank - step],", "chunks[comm.rank],"),
        ("chunks[comm.rank - step],", "chunks[comm.rank - step - 1],"),
        ("into=chunks[comm.rank - step - 1]", "into=chunks[comm.rank - step - 1].copy()"),
        ("into=chunks[comm.rank - step - 1]",
         "into=np.empty(chunks[comm.rank - step - 1].size)"),         # float64, and not kept
        ("chunks[comm.rank - step], into=chunks[comm.rank - step - 1]",
         "chunks[comm.rank - step - 1], into=chunks[comm.rank - step - 2]"),
        ("range(comm.size - 1)", "range(comm.size)"),
        ("into=chunks[comm.rank - step - 1]", "into=chunks[comm.rank - 1]"),
        ("comm.shift(", "comm.shift(0 * "),
    ],
    "all_reduce": [
        ("all_gather(pieces, comm)", "pass"),
        ("reduce_scatter(pieces, comm, op)", "pass"),
        ("reduce_scatter(pieces, comm, op)", "reduce_scatter(pieces, comm)"),     # op not passed on
        ("op=np.add", "op=np.maximum"),
        ("comm, op)\n    all_gather", "comm, op)\n    x //= comm.size\n    all_gather"),    # a mean
        ("cut(x, ", "cut(x.copy(), "),                                # not in place
        ("cost.chunks(x.size, comm.size)", "[x.size // comm.size] * comm.size"),  # the rest is lost
        ("    all_gather(", "    reduce_scatter(pieces, comm, op)\n    all_gather("),
        ("all_gather(pieces, comm)", "all_gather(pieces[::-1], comm)"),
        ("pieces = cut(x, cost.chunks(x.size, comm.size))", TO_ALL),  # p - 1 times the bytes
        ("cut(x, ", "cut(x.astype(float), "),
    ],
}
RIGHT = {
    "reduce_scatter": [(FOR, LEFT), (FOR, "import operator\n    " + FOR.replace(
        "range(1, comm.size)", "map(operator.index, np.arange(1, comm.size))"))],
    "all_gather": [("for step in range(comm.size - 1):", LEFT_AGAIN)],
    "all_reduce": [("cut(x, cost.chunks(x.size, comm.size))", "np.array_split(x, comm.size)")],
}
