"""What may go wrong in the functions of lessons.pp."""

MUTANTS = {
    "one_f_one_b": [
        ("p - rank - 1", "p - rank"),
        ("p - rank - 1", "rank"),
        ('yield "B", i\n', 'yield "B", warmup + i\n'),
        ('"F", warmup + i', '"F", i'),
        ("range(m - warmup, m))", "range(m - warmup, m - 1))"),
        ("min(p - rank - 1, m)", "m"),
    ],
    "act": [
        ("run.late[i, chunk] = []", "pass"),
        ("run_deferred(run.late.pop((i, chunk)))", "run.late.pop((i, chunk)) and None"),
        ("run.late.pop((i, chunk))", "run.late[i, chunk]"),
        ("return run.backward(", "run.backward("),
        ("return run.forward(i, chunk, x)", "return run.forward(i, chunk, None)"),
        ("run.late.get((i, chunk))", "None"),
        ("chunk, x, run.late", "chunk, None, run.late"),
    ],
}
