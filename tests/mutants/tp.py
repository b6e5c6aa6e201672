"""What may go wrong in the functions of lessons.tp."""

MUTANTS = {
    "copy_to": [
        ("collectives.all_reduce(g, comm)", "g"),
    ],
    "reduce_from": [
        ("lambda g: (g,)", "lambda g: (collectives.all_reduce(g, comm),)"),
    ],
    "vocab_parallel_cross_entropy": [
        ("mine[here]] -= 1", "mine[here]] -= 2"),
    ],
}
