"""What may go wrong in the functions of lessons.dp."""

MUTANTS = {
    "share_rows": [
        ("[comm.rank]", "[0]"),
    ],
    "start_equal": [
        ("broadcast(p.data, alike_in(comm, p))", "p.data"),
    ],
    "assign": [
        ("total >= limits", "total > limits"),
    ],
    "finalize": [
        ("p.grad /= count", "p.grad /= 2 * count"),
    ],
}
