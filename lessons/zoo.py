"""The bug zoo: every planted bug of every lesson, by symptom, with the report that it comes from.

    python -m lessons.zoo                               the list; --lesson tp, --symptom hang
    python -m lessons.zoo --mystery 7 -n 2              a training with one of them in it: find it
    python -m lessons.zoo --mystery 7 -n 2 --verify     ... with the tools of minidist.train
    python -m lessons.zoo --mystery 7 --hint 1          what to look at; 2 and 3 say more
    python -m lessons.zoo --mystery 7 --answer

What a bug is stands in its lesson. What notices it was recorded when it was tried: lessons.caught,
which `python -m lessons.zoo --rerun` writes anew, and a test compares.
"""
import importlib
import inspect
import io
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from lessons import caught, kit, script, substitute
from lessons.reports import REPORTS
from minidist import BadInput, flags, train
from minidist.ranks import environment, launch
from minidist.ranks.comm import solo

SYMPTOMS = {"later": "trains on: right for some updates, then another training",
            "at once": "trains on: another training from the first update",
            "bill": "the same numbers, another bill: bytes, messages, memory or FLOPs",
            "corner": "right where training goes, wrong in a corner of the function",
            "values": "some values are wrong",
            "stops": "stops with an exception",
            "hang": "hangs: each rank waits for another",
            "large": "hangs for large messages only: small ones are buffered"}
LESSON = ("--preset lesson --batch 8 --steps 6 --optimizer sgd --no-figure --sample 0 --seed "
          "1").split()


@dataclass(frozen=True)
class Bug:
    """One planted bug, and what is known of it."""
    lesson: str
    title: str
    plant: object               # the function that takes the place of plant.replaces
    what: str
    why: str

    @property
    def name(self):
        return f"{self.lesson}.{self.title}"

    @property
    def symptom(self):
        return caught.CAUGHT[self.name][0]

    @property
    def check(self):
        return caught.CAUGHT[self.name][1]

    @property
    def training(self):
        """Flags of a training that it spoils, or ''."""
        return caught.TRAININGS.get(self.name, "")

    @property
    def report(self):
        return REPORTS.get(self.name, "")


def bugs():
    """All of them, in reading order.  -> [Bug]"""
    found = []
    for name in script.names():
        for plant in read(name).breaks:
            what, _, why = inspect.getdoc(plant).partition("\n\n")
            found.append(Bug(name, plant.title, plant, what, why))
    return found


def read(name):
    return script.read(importlib.import_module(f"lessons.{name}").SCREENS)


# ---- the list

def listed(some):
    """Write bugs under their symptoms.  -> lines"""
    lines = []
    for symptom, text in SYMPTOMS.items():
        mine = [bug for bug in some if bug.symptom == symptom]
        lines += ["", f"{text} ({symptom}, {len(mine)})"] * bool(mine)
        for bug in mine:
            lines += textwrap.wrap(f"{bug.name}: {bug.what}", 96, initial_indent="  ",
                                   subsequent_indent="      ")
            lines.append(f"      caught by: {bug.check}"
                         + (f"   seen in: {bug.report}" if bug.report else ""))
    seen = sum(bool(bug.report) for bug in some)
    return [f"{len(some)} planted bugs, {seen} of them from public reports; see one:",
            "python -m lessons.LESSON --break NAME", *lines]


def classify(by, large=False):
    """Name the symptom, and what noticed it.  by: what a proof said was wrong, first things first

    large: it shows only where sends wait for their receivers."""
    names = [line.partition(": ")[0].strip() for line in by]
    verdicts = [line for line in by if ": DIVERGED at step " in line]
    steps = [line.partition("DIVERGED at step ")[2].partition(":")[0] for line in verdicts]
    counts = [": predicted " in line for line in by]
    if by[0].startswith("deadlock"):
        return ("large" if large else "hang"), "who waits for whom"
    if large:
        return "large", "an exception"
    if names[0].endswith(("Error", "Interrupt", "Exit", "BadInput")):
        return "stops", names[0]
    if verdicts:
        return ("at once" if "0" in steps else "later"), names[by.index(verdicts[0])]
    if all(counts):
        return "bill", names[0]
    if all(name.endswith("asked alone") for name in names):
        return "corner", names[0]
    return "values", names[counts.index(False)]


def rerun(path):
    """Try every bug again, on 3 thread ranks or one, and write down what noticed it."""
    found, trainings = {}, {}
    for bug in bugs():
        lesson = script_of(bug)
        ranks = 1 if lesson.script.alone else 3
        with substitute.patched((*bug.plant.replaces, bug.plant)):
            outcome = substitute.trial(lesson, ranks, sync=bug.plant.sync)
        found[bug.name] = classify(outcome.failed, bug.plant.sync)
        trainings[bug.name] = spoiled(bug)
        print(f"{bug.name:32} {found[bug.name][0]:8} {found[bug.name][1]:40} "
              f"{trainings[bug.name]}", flush=True)
    rows = [f'    "{name}": ("{symptom}", "{check}"),\n'
            for name, (symptom, check) in found.items()]
    more = [f'    "{name}": "{value}",\n' for name, value in trainings.items() if value]
    text = (f'"""{caught.__doc__}"""\nCAUGHT = {{\n{"".join(rows)}}}\n\n'
            f'TRAININGS = {{\n{"".join(more)}}}\n')
    Path(path).write_text(text, encoding="utf-8")
    return 0


# Trainings in which the bugs of a lesson may show.
SPOILED = {"dp": ["-n 2 --dp 2"], "mesh": ["-n 2 --dp 2", "-n 4 --dp 2 --tp 2"],
           "step": ["-n 1 --grad-accum 2"],
           "ring": ["-n 2 --dp 2"], "collectives": ["-n 3 --dp 3"],
           "zero": ["-n 2 --dp 2 --zero 1", "-n 2 --dp 2 --zero 2 --grad-accum 2",
                    "-n 2 --dp 2 --zero 3", "-n 2 --dp 2 --zero 1 --optimizer adamw"],
           "recompute": ["-n 2 --tp 2 --recompute blocks --dropout 0.2"],
           "offload": ["-n 2 --dp 2 --offload . --optimizer adamw",
                       "-n 2 --dp 2 --zero 3 --offload . --optimizer adamw"],
           "tp": ["-n 2 --tp 2"], "sp": ["-n 2 --tp 2 --sp"],
           "flash": ["-n 1 --attention tiled"],
           "cp": ["-n 2 --cp 2", "-n 2 --cp 2 --cp-method ring"],
           "ulysses": ["-n 2 --cp 2 --cp-method ulysses"],
           "pp": ["-n 2 --pp 2", "-n 2 --pp 2 --schedule zb-h1"],
           "schedules": ["-n 2 --pp 2 --schedule interleaved", "-n 2 --pp 2 --schedule zb-h1"],
           "moe": ["-n 1 --experts 4", "-n 1 --experts 4 --capacity 1 --balance none"],
           "ep": ["-n 2 --dp 2 --ep 2 --experts 4"]}
PLANT = """import sys
from lessons import substitute, zoo
from minidist import train
from minidist.ranks import launch
bug, = [bug for bug in zoo.bugs() if bug.name == sys.argv[1]]
sys.argv[1:] = [*zoo.LESSON, *sys.argv[2:]]
def run():
    with substitute.patched((*bug.plant.replaces, bug.plant)):
        return train.main()
launch.run(run)"""


def spoiled(bug):
    """Find the first training that --verify says is another one, or that does not end well."""
    for training in SPOILED.get(bug.lesson, ()):
        _, ranks, words = training.split(" ", 2)
        argv = [sys.executable, "-c", PLANT, bug.name, *words.split(), "--verify"]
        done = subprocess.run(argv if ranks == "1" else launch.command(int(ranks), argv),
                              capture_output=True, text=True)
        if done.returncode:
            return training
    return ""


def script_of(bug):
    plan = read(bug.lesson)
    return kit.Lesson(solo(), plan, script.parse(plan, ["--no-figure"]), io.StringIO())


# ---- the mystery

def pool():
    """The bugs that spoil a training."""
    return [bug for bug in bugs() if bug.training]


def planted(seed):
    """Choose one.  The same seed plants the same bug."""
    some = pool()
    return some[seed * 7919 % len(some)]


STORY = """
A training on {ranks} ranks, {flags}. One function of minidist is not what it was.
Find out which. Nothing else is known; the loss below may look well.

    the same beside one process     python -m lessons.zoo --mystery {seed} -n {ranks} --verify
    what every rank sent, and when  ... --trace trace.json          what it is made of  ... --audit
    what must hold, lesson by lesson                    python -m lessons.LESSON --prove
    hints                           python -m lessons.zoo --mystery {seed} --hint 1   (2, 3)
    the answer                      python -m lessons.zoo --mystery {seed} --answer
"""


def hint(bug, number):
    """Say a little, more, or nearly all."""
    owner, name = bug.plant.replaces
    module = inspect.getmodule(owner) if isinstance(owner, type) else owner
    return [f"It is about what `python -m lessons.{bug.lesson}` teaches.",
            f"Of that lesson's proof, this notices it: {bug.check}. "
            f"Its kind: {SYMPTOMS[bug.symptom]}.",
            f"Read {name} in {module.__name__.replace('.', '/')}.py; the source there is right. "
            "What would you forget?"][number - 1]


def answer(bug):
    seen = f" It was seen in {bug.report}." if bug.report else ""
    return (f"{bug.name}. {bug.what}\n\n{bug.why}\n{seen}\n"
            f"See it: python -m lessons.{bug.lesson} --break {bug.title}")


def mystery(options, more):
    """Train with a bug in place, as `minidist.train` would; or say something about it."""
    bug = planted(options.mystery)
    if options.hint or options.answer:
        print(answer(bug) if options.answer else hint(bug, options.hint))
        return 0
    *ranks, words = bug.training.split(" ", 2)
    if (environment.size() or 1) != int(ranks[1]):
        raise BadInput(f"this mystery trains on {ranks[1]} ranks; add -n {ranks[1]}")
    if environment.rank() == 0:
        print(STORY.format(ranks=ranks[1], flags=words or "plain", seed=options.mystery),
              flush=True)
    sys.argv = ["python -m lessons.zoo", *LESSON, *words.split(), *more]
    with substitute.patched((*bug.plant.replaces, bug.plant)):
        return train.main()


def parser():
    p = flags.Parser(prog="python -m lessons.zoo", description=__doc__.splitlines()[0],
                     epilog="example: python -m lessons.zoo --mystery 7 -n 2 --verify")
    p.add_argument("--lesson", metavar="NAME", choices=script.names(), help="only of this lesson")
    p.add_argument("--symptom", choices=SYMPTOMS, help="only with this one")
    p.add_argument("--mystery", type=flags.integer(0), nargs="?", const=0, metavar="SEED",
                   help="train with one of them in place; further flags are those of training")
    p.add_argument("--hint", type=flags.integer(1, 3), metavar="N", help="1, 2 or 3")
    p.add_argument("--answer", action="store_true", help="which it was")
    p.add_argument("--rerun", action="store_true", help="try all again, write lessons/caught.py")
    return p


def main():
    if "--mystery" in sys.argv:
        return mystery(*parser().parse_known_args())
    options = parser().parse_args()
    if (environment.size() or 1) > 1:
        raise BadInput("one process lists the bugs: leave out -n and mpirun, or use --mystery")
    if options.hint or options.answer:
        raise BadInput("--hint and --answer are about a mystery; add --mystery SEED")
    if options.rerun:
        return rerun(caught.__file__)
    some = [bug for bug in bugs() if options.lesson in (None, bug.lesson)
            and options.symptom in (None, bug.symptom)]
    print(*listed(some), sep="\n")
    return 0


if __name__ == "__main__":
    launch.run(main)
