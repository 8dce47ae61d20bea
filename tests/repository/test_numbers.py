"""Pages that quote another page quote its numbers: each stands there, too."""

import re

import pytest

from tests.helpers import ROOT

NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d+(?:\.\d+)?(?![\w.]*\d)")
LINK = re.compile(r"\]\(([^)#]+)")
QUOTING = ("docs/claims.md", "labs/course-answers.md")


def quotations() -> list[tuple[str, str]]:
    """(page, last cell of a table's row, with a link to another page)."""
    found = []
    for page in QUOTING:
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            cell = re.split(r"(?<!\\)\|", line)[-2] if line.startswith("|") else ""
            if LINK.search(cell):
                found.append((page, cell))
    return found


def numbers_in(text: str) -> set[str]:
    """The numbers of a text, without those in code and in addresses; 1,000 is 1000."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\d{4}\.\d{5}", " ", text)
    return set(NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text)))


def is_rounded_from(number: str, others: set[str]) -> bool:
    """Whether another number, at this one's digits, is this number."""
    digits = len(number.partition(".")[2])
    return any(f"{float(other):.{digits}f}" == number for other in others)


@pytest.mark.parametrize("page, cell", quotations())
def test_each_number_stands_on_a_linked_page(page, cell):
    there = set()
    for path in LINK.findall(cell):
        linked = (ROOT / page).parent / path
        if linked.suffix in (".md", ".py"):  # not an address
            text = linked.read_text(encoding="utf-8")
            there |= numbers_in(text) | numbers_in(text.replace("`", " "))
    missing = [number for number in numbers_in(cell) if not is_rounded_from(number, there)]
    assert not missing
