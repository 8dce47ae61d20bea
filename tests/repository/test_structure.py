"""The structure of the repository: who imports whom, how far the nine may differ from grpo.py, and
that every number among the flags has a rule."""

import ast
import re
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_type_hints

import pytest
from checks import module_from
from checks.files import ALGORITHMS, NINE, PATHS, base_of
from common.cli import Rule
from common.records.resume import FREE_ON_RESUME
from grpo import Args
from tools.compare import FREE
from tools.maintain.marks import changes, code_lines

from tests.helpers import ROOT, module_of

COMMON = sorted((ROOT / "common").rglob("*.py"))
OURS = {"common", "checks", "tools", "labs", "tests", "variants", *ALGORITHMS}
# Of the nine: code lines, and changed code lines against grpo.py. stapo also finds its quantile
# over ranks; vcpo, deep_grpo and goldilocks change more than the loss, each by one object. Five of
# the lines that a file without a KL term changes are those of the reference model.
USUAL = (152, 52)
BUDGET = {
    "minirl": (155, 64),  # the routing's record and replay
    "vcpo": (180, 100),
    "deep_grpo": (236, 110),
    "goldilocks": (238, 110),
}


# Imports


def imported(path: Path) -> set[str]:
    """Return every module that a file names in an import, at any depth: `common.batch`, `torch`."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                assert path.parent.name == "checks", f"{path}: a relative import hides its module"
            modules.add("checks" if node.level else node.module)
            if node.module == "common":  # `from common import batch` names a module
                modules.update(f"common.{alias.name}" for alias in node.names)
    return modules


def ours(path: Path) -> set[str]:
    """Return the top-level names of this repository that a file imports."""
    return {name.partition(".")[0] for name in imported(path)} & OURS


def test_who_imports_whom():
    for name, path in PATHS.items():
        if name not in NINE:  # what a variant does not change it has from its base file
            assert ours(path) <= {"common", "variants", *NINE}
        else:
            assert ours(path) == {"common"}, path
    for path in COMMON:
        assert ours(path) <= {"common"}, path
    for path in (ROOT / "checks").glob("*.py"):
        assert ours(path) <= {"common", "checks", "variants", *ALGORITHMS}, path
    for path in (ROOT / "tools").rglob("*.py"):
        assert not ours(path) & {"tests", "labs"}, path
    for path in (ROOT / "labs").rglob("*.py"):
        assert "tests" not in ours(path), path


def test_common_is_imported_before_torch():
    """OpenMP reads its settings when torch loads (common/__init__.py)."""
    for path in PATHS.values():
        source = path.read_text("utf-8")
        of_torch = re.search(r"\n(from|import) torch\b", source)
        assert source.index("\nfrom common.") < of_torch.start(), path


def test_common_has_no_circle():
    """Neither among its modules nor among its rooms: a folder is one room."""
    rooms, modules = {}, {}
    for path in COMMON:
        inside = path.relative_to(ROOT).with_suffix("").parts  # common, scale, head
        if path.stem != "__init__":
            modules[".".join(inside)] = path
            rooms[".".join(inside)] = ".".join(inside[:2])
    asks = {name: imported(path) & modules.keys() for name, path in modules.items()}
    TopologicalSorter(asks).prepare()  # raises CycleError, which names the circle
    between = {room: set() for room in rooms.values()}
    for name, others in asks.items():
        between[rooms[name]] |= {rooms[other] for other in others} - {rooms[name]}
    TopologicalSorter(between).prepare()


def test_the_folders_of_common():
    """`tasks/` imports only `cli` and `tiny/`. Of the flat modules only `run` imports
    `records/`."""
    for path in COMMON:
        of_common = {name for name in imported(path) if name.startswith("common.")}
        if path.parent.name == "tasks":
            outside = {name for name in of_common if not name.startswith("common.tasks.")}
            assert outside <= {"common.cli", "common.tiny"}, path
        elif path.parent.name != "records" and path.name != "run.py":
            assert not any(name.startswith("common.records.") for name in of_common), path


def test_common_knows_no_algorithm():
    names = "|".join(name for name in ALGORITHMS if name != "tool")  # also a role in chats
    for path in COMMON:
        code = "\n".join(line for _, line in code_lines(path.read_text("utf-8")))
        assert not re.search(rf"""["']({names})["']""", code), path


def test_text_files_are_utf8_in_every_locale():
    """Every reading or writing of text names its encoding."""
    needs = {"read_text": 1, "write_text": 2, "open": 2}  # arguments, with the encoding
    for path in [*COMMON, *(ROOT / "tools").rglob("*.py"), *PATHS.values()]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                count = len(node.args) + len(node.keywords)
                assert count >= needs.get(node.func.attr, 0), f"{path}:{node.lineno}"


# Differences


@pytest.mark.parametrize("algorithm", NINE)
def test_differences_lie_inside_the_marks(algorithm):
    """The diff against grpo.py shows the algorithm and nothing else, within a budget."""
    path, (most, most_changed) = PATHS[algorithm], BUDGET.get(algorithm, USUAL)
    loose, changed = changes(path, base_of(path) or path)
    assert not loose, "\n".join(loose)
    assert len(code_lines(path.read_text())) <= most and changed <= most_changed


def test_lists_of_flags_name_flags():
    """A dead name would silently allow, or compare, what it no longer means."""
    known = {field.name for field in fields(Args)} | {"id", "history", "acted", "ranks"}
    assert FREE <= known and FREE_ON_RESUME <= known


def test_variants_have_the_flags_of_the_loop():
    """They have the rules, defaults and words of grpo.py."""
    own = re.search(r"class Args\(Flags\):\n(.*?)    clip_low", PATHS["grpo"].read_text(), re.S)[1]
    assert own in (ROOT / "variants/__init__.py").read_text()


def test_a_variant_that_lost_its_loss_does_not_load():
    """It does not get its base file's."""
    source = PATHS["justrl"].read_text("utf-8").replace("def policy_loss(", "def another(")
    with pytest.raises(NameError, match="policy_loss"):
        module_from(source, module_of("justrl"))


def test_an_unmarked_difference_is_found(tmp_path):
    base, other = tmp_path / "grpo.py", tmp_path / "other.py"
    base.write_text("a = 1\nb = 2\nc = 3\n")
    other.write_text("a = 1  # a comment\nc = 3\nd = 4  # <own>\n")
    assert changes(other, base) == ([], 2)
    other.write_text("a = 1\nc = 4\n")
    assert changes(other, base)[0] == ["other.py:2: c = 4"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_number_has_a_rule(algorithm):
    for name, kind in get_type_hints(module_of(algorithm).Args, include_extras=True).items():
        rules = [extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, Rule)]
        assert rules or getattr(kind, "__origin__", kind) not in (int, float), name
