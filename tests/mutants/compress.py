"""Mutants of the functions of lessons.compress."""
MUTANTS = {
    "feedback": [
        ("x = x + left", "pass"),
        ("x = x + left", "x = x - left"),
        ("x = x + left", "x = x + 0.9 * left"),
        ("x = x + left", "x += left"),
        ("left[...] = x - mine", "left[...] = x - total"),
        ("left[...] = x - mine", "left[...] = mine - x"),
        ("left[...] = x - mine", "left[...] += x - mine"),
        ("left[...] = x - mine", "left = x - mine"),
        ("left[...] = x - mine", "left[...] = x"),
        ("return total", "return mine")],
    "merged": [
        ("total[there] += mine", "total[there] = mine"),
        ("total[there] += mine", "total[np.sort(there)[::-1]] += mine"),
        ("total[there] += mine", "total[places[0]] += mine"),
        ("zip(numbers, places)", "zip(numbers[1:], places[1:])"),
        ("zip(numbers, places)", "zip(numbers[:2], places[:2])"),
        ("return total", "return total / len(numbers)"),
        ("np.zeros(n, numbers.dtype)", "np.zeros(n, np.float32)"),
        ("np.zeros(n, numbers.dtype)", "np.ones(n, numbers.dtype)")],
}
RIGHT = {
    "feedback": [("x = x + left", "x = np.add(left, x)"),
                 ("left[...] = x - mine", "np.subtract(x, mine, out=left)")],
    "merged": [("total = np.zeros(n, numbers.dtype)\n    for mine, there in zip(numbers, places):\n"
                "        total[there] += mine",
                "total = np.zeros(n, numbers.dtype)\n"
                "    np.add.at(total, places.reshape(-1), numbers.reshape(-1))"),
               ("zip(numbers, places)", "zip(list(numbers), list(places))")],
}
