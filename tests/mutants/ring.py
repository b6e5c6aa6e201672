"""What may go wrong in the functions of lessons.ring."""

MUTANTS = {
    "reduce_scatter": [
        ("comm.rank - step - 1", "comm.rank - step"),
    ],
    "all_gather": [
        ("range(comm.size - 1)", "range(comm.size - 2)"),
    ],
    "all_reduce": [
        ("all_gather(pieces, comm)", "pass"),
    ],
}
