"""tools/spread.py: placed where it is sure, printed where it is not; the history of grpo.py
replayed."""

import difflib
import subprocess

import pytest
from tools.spread import body, spread

from tests.helpers import ROOT

BASE = ["a = 1", "b = 2", "c = 3", "d = 4", "e = 5"]


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (
            ["a = 1", "b = 9", *BASE[2:]],
            [*BASE, "f = 6"],
            ["a = 1", "b = 9", *BASE[2:], "f = 6"],
        ),  # replaced
        (["a = 1", *BASE[2:]], ["x = 0", *BASE], ["x = 0", "a = 1", *BASE[2:]]),  # removed
        (
            [*BASE[:2], "n = 7", *BASE[2:]],
            [*BASE[:3], "x = 0", *BASE[3:]],
            None,
        ),  # inserted between b and c
        ([*BASE, "n = 7"], ["x = 0", *BASE], ["x = 0", *BASE, "n = 7"]),  # at the end
        (["n = 7", *BASE], [*BASE, "x = 0"], ["n = 7", *BASE, "x = 0"]),  # at the top
        (
            ["a = 1  # <own>", *BASE[1:]],
            [*BASE, "x = 0"],
            [*BASE, "x = 0"],
        ),  # a mark of the trunk's own
    ],
)
def test_a_change_is_placed_where_its_lines_are(theirs, ours, expected):
    result = spread(BASE, theirs, ours)
    expected = expected or [*BASE[:2], "n = 7", "c = 3", "x = 0", *BASE[3:]]
    assert result.lines == expected and not result.left


def test_what_was_carried_before_is_not_carried_again():
    theirs = ["a = 1", "b = 9", "n = 7", "c = 3", "e = 5"]
    once = spread(BASE, theirs, ["x = 0", *BASE])
    again = spread(BASE, theirs, once.lines)
    assert once.lines == again.lines == ["x = 0", *theirs]
    assert once.placed == 2
    assert not again.placed
    assert not again.left


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            ["a = 1", "b = 9", *BASE[2:]],
            ["a = 1", "b = 8", *BASE[2:]],
        ),  # the line is this file's own
        (["a = 1", "b = 9", *BASE[2:]], ["a = 1", *BASE[2:]]),  # the line is gone
        ([*BASE[:2], "n = 7", *BASE[2:]], [*BASE[:2], "x = 0", *BASE[2:]]),  # before or behind x?
        (
            [*BASE[:1], "n = 7", "m = 8", *BASE[3:]],
            ["a = 1", "b = 2", "x = 0", *BASE[2:]],
        ),  # x stands in its midst
        ([*BASE[:2], "n = 7  # <own>", *BASE[2:]], BASE),  # what the trunk alone does
    ],
)
def test_what_would_be_a_guess_is_left_and_printed(theirs, ours):
    result = spread(BASE, theirs, ours)
    assert result.lines == ours and len(result.left) == 1 and "after: " in result.left[0]


def test_history_replayed():
    """Every change of grpo.py before width and marks were changed in all files at once, carried
    into the others as they were then: of the lines that the authors changed there by hand three
    quarters would have come by themselves, and no file would have been left further from what they
    wrote."""
    files = "gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h", "8d6dddb", "--", "grpo.py"],
        cwd=ROOT,
        capture_output=True,
    )
    commits = log.stdout.decode().split()
    if len(commits) < 10:
        pytest.skip("the history is not here")
    names = [f"{c}{p}:{name}.py" for c in commits for p in ("^", "") for name in ("grpo", *files)]
    asked = subprocess.run(
        ["git", "cat-file", "--batch"],
        cwd=ROOT,
        input="\n".join(names).encode(),
        capture_output=True,
    )
    text, rest = {}, asked.stdout
    for name in names:
        head, _, rest = rest.partition(b"\n")
        if not head.endswith(b"missing"):
            size = int(head.split()[-1])
            text[name], rest = rest[:size].decode(), rest[size + 1 :]

    def distance(one: list[str], other: list[str]) -> int:
        return sum(
            line[:1] in "+-" and line[:3] not in ("---", "+++")
            for line in difflib.unified_diff(one, other, n=0)
        )

    by_hand, still = 0, 0
    for commit, name in ((c, f) for c in commits for f in files):
        wanted = [f"{one}:{file}.py" for file in ("grpo", name) for one in (f"{commit}^", commit)]
        if all(one in text for one in wanted):
            base, theirs, ours, real = (body(text[one])[1] for one in wanted)
            before, after = distance(ours, real), distance(spread(base, theirs, ours).lines, real)
            assert after <= before, (commit, name)
            by_hand, still = by_hand + before, still + after
    assert by_hand > 1000 and still < by_hand / 4
