"""What may go wrong in the functions of lessons.ep."""

MUTANTS = {
    "exchange_counts": [
        ("reshape(comm.size, mine)", "reshape(comm.size, mine)[:, ::-1]"),    # experts backwards
        ("reshape(comm.size, mine)", "reshape(comm.size, mine)[::-1]"),       # ranks backwards
        ("reshape(comm.size, mine)", "reshape(mine, comm.size).T"),
        ("runs(counts, held)", "runs(counts[::-1], held)"),
        ("runs(counts, held)", "runs(0 * counts, held)"),
        ("runs(counts, held)", "[run for run in runs(counts, held)[::-1]]"),  # to another rank
        ("np.array(came, int)", "np.cumsum(came, 0)"),
        ("np.array(came, int)", "np.array(came, float)"),
    ],
    "dispatch": [
        ("permuted(rows, by_expert(came))", "rows"),                          # in order of ranks
        ("permuted(rows, by_expert(came))", "permuted(rows, np.argsort(by_expert(came)))"),
        ("came.sum(0)", "came.sum(1)"),
        ("came.sum(0)", "came.max(0)"),
        ("rows = all_to_all(rows,", "rows = all_to_all(Tensor(rows.data),"),  # off the tape
        ("rows = all_to_all(rows,", "rows = all_to_all(rows * 2.0,"),
        ("by_expert(came))", "by_expert(came)[::-1])"),
        ("sums(counts, held), came.sum(1).tolist())", "came.sum(1).tolist(), sums(counts, held))"),
    ],
    "combine": [
        ("permuted(y, np.argsort(by_expert(came)))", "y"),                    # in order of experts
        ("np.argsort(by_expert(came))", "by_expert(came)"),                   # twice the same way
        ("np.argsort(by_expert(came))", "np.argsort(by_expert(came))[::-1]"),
        ("came.sum(1).tolist(), sums(counts, held))", "sums(counts, held), came.sum(1).tolist())"),
        ("return all_to_all(y,", "return all_to_all(Tensor(y.data),"),
        ("return all_to_all(y,", "return all_to_all(y * 2.0,"),
        ("return all_to_all(y,", "return 1.0 / comm.size * all_to_all(y,"),
        ("came.sum(1)", "came.sum(0)"),
    ],
}
