"""What may go wrong in the functions of lessons.sp."""

MUTANTS = {
    "all_gather": [
        ("collectives.reduce_scatter(g, comm, dim, sizes)",
         "collectives.split(g, dim, sizes)[comm.rank]"),
    ],
    "reduce_scatter": [
        ("collectives.all_gather(g, ", "collectives.all_gather(2 * g, "),
    ],
    "all_gather_linear": [
        ("rows.T @ x_full", "2 * rows.T @ x_full"),
    ],
}
