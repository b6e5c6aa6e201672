"""Commands' flags and files: one sentence for a mistake, whole files or none."""
import pytest

from minidist import BadInput, flags


def parse(*argv):
    parser = flags.Parser(prog="p")
    parser.add_argument("--count", type=flags.integer(1, 9))
    parser.add_argument("--rate", type=flags.real(0))
    return parser.parse_args(argv)


def test_good_values():
    assert parse("--count", "9", "--rate", "1e-3") == parse("--rate", "0.001", "--count", "9")


@pytest.mark.parametrize("argv, words", [
    (["--count", "0"], "--count: 0 is out of range, use 1 or more"),
    (["--count", "10"], "--count: 10 is out of range, use 9 or less"),
    (["--count", "many"], "--count: invalid integer value: 'many'"),
    (["--rate", "-1"], "--rate: -1 is out of range, use 0 or more"),
    (["--rate", "nan"], "--rate: nan"), (["--rate", "inf"], "--rate: inf"),
    (["--rate"], "--rate: expected one argument"),
    (["--cou", "1"], "unrecognized arguments: --cou")])
def test_mistakes_are_one_sentence(argv, words):
    with pytest.raises(BadInput) as error:
        parse(*argv)
    assert str(error.value).startswith(words) and "\n" not in str(error.value)
    assert str(error.value).endswith("see p --help")


def test_write_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "a" / "b.txt"
    flags.writable(path)
    assert not list(tmp_path.iterdir())                    # asking leaves nothing behind
    flags.write(path, lambda file: file.write(b"one"))
    flags.write(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_changes_nothing(tmp_path):
    path = tmp_path / "b.txt"
    flags.write(path, lambda file: file.write(b"old"))

    def fill(file):
        file.write(b"half of the n")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        flags.write(path, fill)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_unwritable(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file" / "x", "/proc/self/x"):
        with pytest.raises(BadInput, match="directory|cannot write"):
            flags.writable(path)
