"""What may go wrong in the functions of lessons.mesh."""

PLACE = "map(int, np.unravel_index(rank, tuple(sizes.values())))"

MUTANTS = {
    "coordinates": [
        ("tuple(sizes.values())", "tuple(sizes.values()), order='F'"),
        (PLACE, "np.unravel_index(rank, tuple(sizes.values()))[::-1]"),
        (PLACE, "(rank % n for n in sizes.values())"),                # no axis divides first
        (PLACE, "np.unravel_index(rank, (2,) * len(sizes))"),         # every size 2
        (PLACE, "(rank // n for n in sizes.values())"),
        ("zip(sizes, ", "zip(sorted(sizes), "),
        ("zip(sizes, ", "zip(reversed(sizes), "),
        (PLACE, "(c + 1 for c in np.unravel_index(rank, tuple(sizes.values())))"),
        ("return dict(zip(", "return tuple(zip("),
        (PLACE, "map(float, np.unravel_index(rank, tuple(sizes.values())))[1:]"),
    ],
    "groups": [
        ("outside + inside", "inside + outside"),
        (".reshape(*sizes.values())", ".reshape(*sizes.values(), order='F')"),
        ("reshape(*sizes.values())", "reshape(*[2] * len(sizes))"),
        ("if axis in axes]", "if axis in axes[:1]]"),                 # only the first axis
        ("if axis in axes]", "if axis == max(axes)]"),
        ("for axis in axes)", "for axis in axes[:1])"),
        ("reshape(-1, width)", "reshape(width, -1)"),
        ("outside + inside", "outside + inside[::-1]"),               # against coordinate order
        ("outside + inside", "outside[::-1] + inside"),
        (".tolist()", ".tolist()[:1]"),
        ("[i for i, axis in enumerate(sizes) if axis in axes]",
         "[list(sizes).index(axis) for axis in axes]"),               # in the order asked for
        (".tolist()", ".tolist()[::-1]"),
    ],
}
RIGHT = {
    "coordinates": [(PLACE, "np.unravel_index(rank, tuple(sizes.values()))")],
    "groups": [("outside + inside", "tuple(outside) + tuple(inside)")],
}
