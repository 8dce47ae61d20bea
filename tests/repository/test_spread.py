"""tools/spread.py: a change of the trunk is placed where it is sure, else it is printed."""

import pytest
from tools.spread import spread

BASE = ["a = 1", "b = 2", "c = 3", "d = 4", "e = 5"]
REPLACED = ["a = 1", "b = 9", *BASE[2:]]
INSERTED = [*BASE[:2], "n = 7", *BASE[2:]]


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (REPLACED, [*BASE, "x = 0"], [*REPLACED, "x = 0"]),
        (["a = 1", *BASE[2:]], ["x = 0", *BASE], ["x = 0", "a = 1", *BASE[2:]]),  # removed
        (INSERTED, ["x = 0", *BASE], ["x = 0", *INSERTED]),
        (["a = 1  # <own>", *BASE[1:]], [*BASE, "x = 0"], [*BASE, "x = 0"]),  # the trunk's own
    ],
)
def test_a_change_is_placed_where_its_lines_are(theirs, ours, expected):
    result = spread(BASE, theirs, ours)
    assert result.lines == expected and not result.left
    again = spread(BASE, theirs, result.lines)
    assert again.lines == expected and not again.placed and not again.left


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (REPLACED, ["a = 1", "b = 8", *BASE[2:]]),  # the line is this file's own
        (REPLACED, ["a = 1", *BASE[2:]]),  # the line is gone
        (INSERTED, [*BASE[:2], "x = 0", *BASE[2:]]),  # before or behind x?
    ],
)
def test_what_would_be_a_guess_is_left_and_printed(theirs, ours):
    result = spread(BASE, theirs, ours)
    assert result.lines == ours and len(result.left) == 1 and "after: " in result.left[0]
