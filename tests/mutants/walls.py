"""What may go wrong in the functions of lessons.walls."""

MUTANTS = {
    "linear_work": [
        ("+ N * F, w", ", w"),
    ],
    "attention_work": [
        ("w * 4 *", "w * 3 *"),
    ],
    "at_least": [
        ("max(", "min("),
    ],
}
