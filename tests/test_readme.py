"""The README against reality: what it shows is what runs."""
import re

import pytest

from tests import readme, test_house


@pytest.mark.parametrize("command, cut, text", readme.blocks(), ids=lambda value: value[:40])
def test_output_is_what_the_command_prints(command, cut, text, tmp_path):
    printed = readme.excerpt(readme.run(command, out=tmp_path), cut)
    assert readme.masked(printed) == readme.masked(text), \
        "the README shows other output: python -m tests.readme rewrites it"


def test_no_module_is_longer_than_the_readme_says():
    said = int(re.search(r"No\s+module is longer\s+than (\d+) lines", readme.README.read_text())[1])
    assert said == test_house.LINES


def test_first_command_is_the_one_whose_output_is_shown():
    install, job = first(0).rsplit(" && ", 1)
    assert install == 'python3 -m venv .venv && .venv/bin/pip install -q ".[mpich]"'
    assert job.replace(".venv/bin/", "") == readme.blocks()[0][0]


def test_second_command_runs_these_tests():
    install, job = first(1).rsplit(" && ", 1)
    assert install == 'python3 -m venv .venv && .venv/bin/pip install -q ".[mpich,test]"'
    assert job == ".venv/bin/python -m pytest -n 2 --dist worksteal"


def first(i):
    return readme.commands()[i]


def test_the_table_of_variables_is_the_code():
    """What the library and the suite read or set, by its name in quotes, and nothing else."""
    files = [*readme.ROOT.glob("minidist/**/*.py"), *readme.ROOT.glob("lessons/*.py"),
             readme.ROOT / "tests/unwritten.py"]
    in_code = {v for f in files for v in re.findall(r'"(MINIDIST_\w+)"', f.read_text())}
    rows = [line for line in readme.README.read_text().splitlines() if line.startswith("| `MINI")]
    assert in_code == {v for row in rows for v in re.findall(r"MINIDIST_\w+", row)}


def test_the_program_is_ten_lines_and_shows_one_loss():
    program = readme.PYTHON.search(readme.README.read_text())[1]
    body = [line for line in program.splitlines() if line.startswith("    ")]
    shown = next(text for command, _, text in readme.blocks() if command == "the Python above")
    losses = re.findall(r"loss (\S+),", shown)
    assert len(body) <= 10 and len(losses) == 3 and len(set(losses)) == 1


def test_links_lead_somewhere():
    paths = re.findall(r"\]\((?!http)([^)#]+)\)", readme.README.read_text())
    assert paths and not [p for p in paths if not (readme.ROOT / p).exists()]


def test_every_lesson_is_named_and_exists():
    named = set(re.findall(r"`lessons\.(\w+)`", readme.README.read_text()))
    from lessons.__main__ import existing
    assert named == {name for name, *_ in existing()}


@pytest.mark.parametrize("command", [c for c in readme.commands() if "pip install" not in c])
def test_other_commands_are_understood(command):
    """Each with --help in place of its work: the module and the program exist."""
    words = command.split("#")[0].split()
    module = words[words.index("-m") + 1] if "-m" in words else None
    assert module, f"{command}: not a module to run"
    if module not in ("lessons", "pytest"):
        sub = [w for w in words[words.index("-m") + 2:][:1] if not w.startswith("-")]
        assert "usage" in readme.run(" ".join(["python", "-m", module, *sub, "--help"])).lower()


@pytest.mark.parametrize("text, same", [
    ("step 20 loss 3.5  812 tokens/s  0:29 left", "step 20 loss 3.5 9,100 tokens/s  1:02 left"),
    ("relative difference 1.4e-12 (bound 1e-11)", "relative difference 3.0e-13 (bound 1e-11)"),
    ("  7.1 s, 4 ranks", "  12.9 s, 4 ranks")])
def test_mask_hides_speed_and_rounding(text, same):
    assert readme.masked(text) == readme.masked(same)


@pytest.mark.parametrize("text, other", [
    ("loss 3.500", "loss 3.501"), ("EQUIVALENT", "DIVERGED"), ("4 ranks", "2 ranks"),
    ("147456 bytes", "147457 bytes"), ("(bound 1e-11)", "(bound 1e-09)")])
def test_mask_hides_nothing_else(text, other):
    assert readme.masked(text) != readme.masked(other)
