"""The rooms of `common`: how much there is to read, and who imports whom."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from checks.files import ROOT, algorithms
from tools.rooms import COMMON, executed

# Code lines that a default laptop run executes, all, and of the largest room. What no laptop run
# executes is for vLLM, other people's sets, models and rewards, experts, gradient norms, resuming.
EXECUTED, ALL, ROOM = 1370, 2410, 226
OURS = {"common", "tools", "labs", "tests", "variants", *(path.stem for path in algorithms())}
GROUND = ("distributed", "batch", "plumbing.routing")  # rooms that stand on no other


def imported(source: str) -> set[str]:
    """Every module that a file names in an import, wherever it stands: `common.batch`, `torch`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import hides whom it asks"
            # `from common import batch` names a module, `from common.batch import Rollout` none.
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} | (deeper if node.module == "common" else set())
    return found


def of_ours(path: Path) -> set[str]:
    """The top-level names of this repository that a file imports."""
    return {name.partition(".")[0] for name in imported(path.read_text())} & OURS


def test_rooms_stay_small():
    """A default run is really made; what vLLM needs is not even loaded by it."""
    words = [sys.executable, "-m", "tools.rooms"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = {
        words[3]: (int(words[0]), int(words[2]))
        for words in map(str.split, run.stdout.splitlines())
    }
    total = rows.pop("total")
    assert total[0] <= EXECUTED and total[1] <= ALL, run.stdout
    assert max(every for _, every in rows.values()) <= ROOM, run.stdout
    assert rows["plumbing/vllm.py"][0] == 0 < rows["logprobs.py"][0] < rows["logprobs.py"][1]


def test_algorithm_files_import_common_alone():
    for path in algorithms():
        assert of_ours(path) == {"common"}, path


def test_common_stands_on_nothing_above_it():
    for path in COMMON.rglob("*.py"):
        assert of_ours(path) <= {"common"}, path


def test_tools_do_not_need_tests():
    """Nor labs: who downloads the repository for its tools may delete both. (The reader shows the
    checks where they are, and does without: test_reader.py.)"""
    for path in (ROOT / "tools").glob("*.py"):
        assert not of_ours(path) & {"tests", "labs"} or path.stem == "reader", path


def test_rooms_make_no_circle():
    paths = {path for path in COMMON.rglob("*.py") if path.stem != "__init__"}
    rooms = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    asks = {room: imported(path.read_text()) & rooms.keys() for room, path in rooms.items()}
    TopologicalSorter(asks).prepare()  # raises CycleError, which names the circle
    assert not any(asks[f"common.{room}"] for room in GROUND), asks


def test_lines_are_counted_by_statements():
    """A call over three lines is three, a branch not taken none, an `else:` goes with its body."""
    source = (
        "a = f(\\n    1\\n)\\nif a:\\n    b = 1\\nelse:\\n    b = 2\\ndef g():\\n    return 1\\n"
    )
    lines = source.replace("\\n", "\n")
    assert executed(lines, {1, 4, 7, 8}) == 3 + 1 + 2
    assert executed(lines, {1, 4, 5, 8, 9}) == 3 + 2 + 2
