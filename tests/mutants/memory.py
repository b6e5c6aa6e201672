"""What may go wrong in the functions of lessons.memory."""

MUTANTS = {
    "held": [
        ("p.data.nbytes for", "p.data.size for"),
    ],
}
