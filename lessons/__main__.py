"""python -m lessons: the lessons in reading order, each with its question."""
from lessons.script import ORDER, existing
from minidist import BadInput, flags
from minidist.ranks import launch

__all__ = ["ORDER", "existing"]


def main():
    parser = flags.Parser(prog="python -m lessons", description=__doc__,
                          epilog="example: python -m lessons --html pages")
    parser.add_argument("--html", metavar="DIR", help="run all and write the course as pages")
    parser.add_argument("--lessons", nargs="+", metavar="NAME", help="with --html: only these")
    options = parser.parse_args()
    if options.html:
        from lessons import pages                    # which imports every lesson
        return pages.build(options.html, options.lessons)
    if options.lessons:
        raise BadInput("--lessons goes with --html DIR; a lesson is run by its own name: "
                       f"python -m lessons.{options.lessons[0]}")
    print("Lessons, in reading order:\n")
    for name, _, question in existing():
        print(f"  {name:12} {question}")
    print("\nRun one:  mpirun -n 4 python -m lessons.ring      or: python -m lessons.ring -n 4"
          "\nPages:    python -m lessons --html DIR"
          "\nFlags:    --predict --break --stub --hint --mine --json --out --no-figure; see --help")


if __name__ == "__main__":
    launch.run(main)
