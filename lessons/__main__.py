"""python -m lessons: the lessons in reading order, each with its question."""
import ast
from importlib.util import find_spec
from pathlib import Path

from lessons.script import split_header

# From what one step needs, over the walls it meets, to the techniques, then their combination.
ORDER = ("walls step memory collectives ring mesh dp zero recompute offload precision compress tp "
         "sp flash cp ulysses pp schedules moe ep checkpoint plan rates").split()


def existing():
    """The lessons that exist, in reading order.  -> [(name, title, question)]"""
    for name in ORDER:
        spec = find_spec(f"lessons.{name}")
        if spec:
            doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text()))
            yield (name, *split_header(doc)[:2])


def main():
    print("Lessons, in reading order:\n")
    for name, _, question in existing():
        print(f"  {name:12} {question}")
    print("\nRun one:  mpirun -n 4 python -m lessons.ring      or: python -m lessons.ring -n 4"
          "\nFlags:    --predict --break --stub --mine --json --out --no-figure; see --help")


if __name__ == "__main__":
    main()
