"""python -m lessons: the lessons in reading order, each with its question."""
from lessons.script import ORDER, existing
from minidist import flags
from minidist.ranks import launch

__all__ = ["ORDER", "existing"]


def main():
    flags.Parser(prog="python -m lessons", description=__doc__).parse_args()
    print("Lessons, in reading order:\n")
    for name, _, question in existing():
        print(f"  {name:12} {question}")
    print("\nRun one:  mpirun -n 4 python -m lessons.ring      or: python -m lessons.ring -n 4"
          "\nFlags:    --predict --break --stub --hint --mine --json --out --no-figure; see --help")


if __name__ == "__main__":
    launch.run(main)
