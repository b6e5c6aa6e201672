"""What may go wrong in the functions of lessons.dp."""

SPLIT = "batch if batch.targets is None else batch.split(comm.size)[comm.rank]"
START = "p.data[...] = broadcast(p.data, alike_in(comm, p))"
LIMIT = "limits.get(kind, min(first, cap))"
USED = "used = agree([p.grad is not None for p in members], comm)"
SUMS = "[*whole_sums(params, mesh), *piece_sums(params)]"

MUTANTS = {
    "share_rows": [
        ("[comm.rank]", "[0]"),
        (SPLIT, "batch.split(comm.size)[comm.rank]"),                 # also for logits alone
        (SPLIT, "batch"),
        ("comm.size)[comm.rank]", "comm.size + 1)[comm.rank]"),       # some rows are nobody's
        (SPLIT, "batch.take_rows(slice(len(batch.rows) // comm.size * comm.rank, "
                "len(batch.rows) // comm.size * (comm.rank + 1)))"),  # the rest is nobody's
        (SPLIT, "batch.take_tokens(slice(comm.rank, None, comm.size))"),
        ("model.localizers.append(mine)", "model.localizers = [mine]"),
        ("model.localizers.append(mine)", "pass"),
        ("model.localizers.append(mine)", "model.localizers += [mine, mine]"),
        (SPLIT, "batch.take_rows(slice(max(1, len(batch.rows) // comm.size) * comm.rank, "
                "None if comm.rank == comm.size - 1 else "
                "max(1, len(batch.rows) // comm.size) * (comm.rank + 1)))"),   # the last has most
    ],
    "start_equal": [
        ("broadcast(p.data, alike_in(comm, p))", "p.data"),
        ("p.data[...] = ", "p.data = "),                              # not in place
        ("p.data[...] = ", ""),
        (START, "if p.data.ndim > 1:\n            " + START),         # matrices only
        (START, START + "\n        " + START),                        # twice
        (START, "if p.requires_grad:\n            " + START),
        ("alike_in(comm, p))", "alike_in(comm, p), root=comm.size - 1)"),
        ("in model.parameters()", "in model.parameters()[1:]"),
        (START, "p.data[...] = broadcast(p.data.astype('f4'), comm)"),
    ],
    "assign": [
        ("total >= limits", "total > limits"),
        ("total >= limits", "total - size >= limits"),
        (LIMIT, "cap"),                                               # no small first one
        (LIMIT, "limits.get(kind, first)"),                           # first may be the larger
        (LIMIT, "min(first, cap)"),                                   # all are small
        ("kind = kinds[i] if kinds else None", "kind = None"),        # kinds mix
        (LIMIT, "(cap if limits else min(first, cap))"),              # one first for all kinds
        ("return sorted(", "return list("),                           # in the order of closing
        (" + [members for members, _ in still_open.values() if members]", ""),
        (" if members]", "]"),
        ("members, total = [], 0\n", "members, total = [], total - cap\n"),
        ("[*members, i]", "[i, *members]"),
    ],
    "finalize": [
        ("p.grad /= count", "p.grad /= 2 * count"),
        ("p.grad /= count", "p.grad /= count * mesh.world.size"),     # a mean of ranks
        ("            p.grad /= count", "            pass"),
        (SUMS, "whole_sums(params, mesh)"),                           # only the first sums
        (SUMS, "piece_sums(params)"),
        (USED, "used = [p.grad is not None for p in members]"),       # nobody asks the others
        (USED, "used = [True] * len(members)"),                       # zeros in place of None
        (USED, USED + "\n        " + USED),                           # agreed twice
        ("if anywhere:", "if p.grad is not None:"),
        ("p.grad = add_up(p, comm)", "add_up(p, comm)"),
        ("p.grad = add_up(p, comm)", "p.grad = add_up(p, comm) / comm.size"),
        ("for comm, members in", "for comm, members in [(mesh.world, params)] or"),
        ("p.grad = add_up(p, comm)\n", "p.grad = add_up(p, comm)\n"
         "    for p in params:\n        if p.partial and p.grad is not None:\n"
         "            p.grad /= count\n"),                              # divided twice
        (SUMS, SUMS + "[:1]"),
    ],
}
RIGHT = {
    "share_rows": [("[comm.rank]", "[comm.rank - 1]"), ("batch.split(comm.size)[comm.rank]",
                    "batch.take_rows(slice(comm.rank, None, comm.size))")],
    "start_equal": [("p.data[...] = broadcast(p.data, alike_in(comm, p))",
                     "np.copyto(p.data, broadcast(p.data, alike_in(comm, p)))")],
    "assign": [("sorted(closed + [members for members, _ in still_open.values() if members])",
                "sorted([*closed, *(m for m, _ in still_open.values() if m)], key=min)")],
    "finalize": [("p.grad /= count", "p.grad = p.grad / count")],
}
