"""What may go wrong in the functions of lessons.collectives."""

MUTANTS = {
    "broadcast": [
        ("place + bit < comm.size", "place + 2 * bit < comm.size"),
    ],
    "reduce": [
        ("op(x, ", "op(incoming, "),
    ],
    "pairwise": [
        ("received[comm.rank][...] = pieces[comm.rank]", "pass"),
    ],
}
