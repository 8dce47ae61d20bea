"""Numbers on pages are numbers of stored results. A page that quotes another has its numbers from
the page that its cell links; a lab's page has them from its table.json."""

import importlib
import json
import re

import pytest

from tests.helpers import ROOT

QUOTING = ("docs/claims.md", "labs/course-answers.md")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
NUMBER = r"-?\d+(?:\.\d+)?(?:e-\d+)?"
# `3 of 5`, `0.42 (0.30–0.48)`, `0.42` and `-0.42`, but not the 2 of SmolLM2
FIGURE = re.compile(
    rf"(?<![\w.-])(?:\d+ of \d+|{NUMBER} \({NUMBER}–{NUMBER}\)|{NUMBER})(?![\w-]|\.\d)"
)
LABS = {path.parent.name: path for path in sorted(ROOT.glob("labs/*/table.json"))}
LABS.pop("race")  # its page is docs/stability.md


def plain(text: str) -> str:
    """Return the text on one line, with 1,000 as 1000 and +0.1 as 0.1, without marks of code and
    numbers of papers."""
    text = re.sub(r"(?<=\d),(?=\d{3})|[`+]", "", " ".join(text.split()))
    return re.sub(r"\d{4}\.\d{5}", "", text)


def figures(text: str) -> set[str]:
    """Return the text's numbers, and medians also without their range, but no end of a range."""
    numbers = set(FIGURE.findall(plain(text)))
    return numbers | {figure.partition(" (")[0] for figure in numbers}


def cells(line: str) -> list[str]:
    """Return the cells of a table's row."""
    return re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else []


def lines(page: str) -> list[str]:
    return (ROOT / page).read_text(encoding="utf-8").splitlines()


def quotations() -> list[tuple[str, str]]:
    """Return (page, last cell) of each row whose last cell links another page."""
    rows = [(page, cells(line)) for page in QUOTING for line in lines(page)]
    return [(page, row[-1]) for page, row in rows if row and LINK.search(row[-1])]


@pytest.mark.parametrize("page, cell", quotations())
def test_a_quoted_number_stands_on_a_linked_page(page, cell):
    paths = [(ROOT / page).parent / link for link in LINK.findall(cell)]
    pages = [path.read_text("utf-8") for path in paths if path.is_file()]
    quoted = figures(LINK.sub("]", re.sub("`[^`]*`", "", cell)))
    missing = quoted - set().union(*map(figures, pages))
    assert not missing


@pytest.mark.parametrize("name", LABS)
def test_a_page_shows_the_stored_results(name):
    """Each number of its tables, between what comes out and the predictions, is one that the lab
    prints from its stored results."""
    results = json.loads(LABS[name].read_text("utf-8"))["results"]
    printed = importlib.import_module(f"labs.{name}.__main__").rows(results)
    there = figures(" | ".join(cell for row in printed for cell in row))
    page = "\n".join(lines(f"labs/{name}/README.md"))
    shown = page.partition("## What comes out")[2].partition("## Predictions")[0]
    for table in re.findall(r"\|---.*\n((?:\|.*\n)+)", shown):  # without its head
        for row in map(cells, table.splitlines()):
            missing = figures(" | ".join(row[1:])) - there
            assert not missing, row[0]
