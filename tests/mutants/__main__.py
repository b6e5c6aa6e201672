"""Show how many mutants the lessons' proofs catch, and that they pass other right solutions.

See the package's docstring."""
import sys
import time
import warnings

from lessons import tables
from tests import mutants


def main(names):
    """Print a row per lesson, or per mutant of one lesson; status 1 if one was not caught,
    or a right solution was."""
    rows, missed, refused = [], [], []
    for name in names or mutants.lessons():
        start, found = time.perf_counter(), {}
        for mutant in mutants.table(name):
            found[mutant] = mutants.caught(name, mutant)
            if names:
                show(mutant, found[mutant])
        missed += [(name, *mutant) for mutant, why in found.items() if not why]
        refused += [(name, why) for row in mutants.right(name)
                    if (why := mutants.caught(name, *row))]
        good = sum(map(bool, found.values()))
        rows.append([name, len({mutant[0] for mutant in found}), len(found), good,
                     f"{good / len(found):.0%}", f"{time.perf_counter() - start:.1f} s"])
    rows.append(["all", *(sum(row[i] for row in rows) for i in (1, 2, 3)), "", ""])
    print(*tables.table(["lesson", "functions", "mutants", "caught", "", ""], rows), sep="\n")
    for name, function, old, new in missed:
        print(f"NOT CAUGHT  {name}.{function}: {old!r} -> {new!r}")
    for name, why in refused:
        print(f"RIGHT, BUT NOT PASSED  {name}: {why}")
    return 1 if missed or refused else 0


def show(mutant, why):
    function, old, new = (" ".join(text.split()) for text in mutant)
    print(f"{function}: {old}  ->  {new}\n    {why.splitlines()[0] if why else 'NOT CAUGHT'}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
