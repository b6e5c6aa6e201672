"""Commands' flags: one sentence for a mistake."""
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
