"""What may go wrong in the functions of lessons.mesh."""

MUTANTS = {
    "coordinates": [
        ("tuple(sizes.values())", "tuple(sizes.values()), order='F'"),
    ],
    "groups": [
        ("outside + inside", "inside + outside"),
    ],
}
RIGHT = {
    "coordinates": [
        ("map(int, np.unravel_index(rank, tuple(sizes.values())))",
         "np.unravel_index(rank, tuple(sizes.values()))"),
    ],
}
