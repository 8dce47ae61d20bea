"""Every program that a page names starts, with its smallest input, and comes to its end."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, forked
from tests.labs.test_labs import RUNS, TOYS

# With the smallest input, for a copy of the repository that has finished runs
COMMANDS = """
labs.answers
labs.blank grpo
labs.grade grpo.py
labs.notebook
tools.bench tiny --side profile --size 4 2 8
tools.compare runs/a runs/b
tools.curves runs/a
tools.evaluate runs/a --eval_problems 4 --eval_samples 1
tools.make_tiny tiny-30k tiny-new --steps 1
tools.marks
tools.memory grpo
tools.page runs/a
tools.results runs/a
tools.spread --dry
tools.staleness 3e-4 0 1 none --updates 2
tools.walk
tools.weights
""".split("\n")[1:-1]
# Half a minute each, of starting processes. (The other half of bench needs TRL, from the network.)
LONG = ["tools.bench tiny --profile --size 4 2 8", "tools.overhead 4 grpo"]
# What another test brings to its end
ELSEWHERE = dict.fromkeys(TOYS, "test_labs: test_a_quick_toy_goes_the_way_of_its_page")
ELSEWHERE |= dict.fromkeys(RUNS, "test_labs: test_a_lab_of_runs_tells_and_draws")
ELSEWHERE = {f"labs.{name}": test for name, test in ELSEWHERE.items()} | {
    "labs.bug": "test_labs_course: test_every_cell_works_in_its_order",
    "labs.race": "test_race: test_a_race_ends_with_a_place",
    "tools.reader": "test_reader: page",
    "tools.rooms": "test_rooms: test_rooms_stay_small",
}
NOT_HERE = {
    "tools.make_smollm2": "a model from the network",
    "tools.gym": "no program: a task file",
    "tools.look": "no program: shared by two pages",
}


def named() -> set[str]:
    """What the pages tell the reader to run, and what docs/common.md lists."""
    pages = [
        *ROOT.glob("README*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "labs").glob("*.md"),
    ]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    found = {f"{folder}.{name}" for folder, name in re.findall(r"-m (tools|labs)\.(\w+)", text)}
    found |= {f"{folder}.{name}" for folder, name in re.findall(r"python (tools|labs)/(\w+)", text)}
    listed = (ROOT / "docs/common.md").read_text("utf-8").split("| tool |")[1].split("\n\n")[0]
    for row in listed.splitlines()[2:]:
        found |= {f"tools.{name}" for name in re.findall(r"`(\w+)", row.split("|")[1])}
    return found - {"tools.NAME", "labs.NAME"}


def test_the_table_has_every_program():
    known = {command.split()[0] for command in COMMANDS + LONG}
    assert named() == known | ELSEWHERE.keys() | NOT_HERE.keys()
    for where in set(ELSEWHERE.values()):
        file, test = where.split(": ")
        assert f"def {test}" in (ROOT / f"tests/{file}.py").read_text("utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory, finished) -> Path:
    """The repository as a program may change it, with two finished runs."""
    folder = tmp_path_factory.mktemp("programs") / "repository"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "mine", "venv")
    shutil.copytree(ROOT, folder, ignore=left_out)
    (folder / ".git").symlink_to(ROOT / ".git")  # read by tools.spread
    for name in ("a", "b"):
        shutil.copytree(finished, folder / "runs" / name)
    return folder


def start(folder: Path, words: list[str]) -> None:
    """`python -m WORDS` in a folder, in a process that has loaded torch but none of our
    modules."""
    ours = {path.stem for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


BY_TIME = [*COMMANDS, *(pytest.param(command, marks=pytest.mark.variants) for command in LONG)]


@pytest.mark.parametrize("command", BY_TIME)
def test_a_program_comes_to_its_end(command, copy):
    ended = forked(start, copy, command.split())
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    if command == "labs.answers":  # it follows from the tables that are there
        key = "labs/answers.md"
        assert (copy / key).read_text("utf-8") == (ROOT / key).read_text("utf-8")
