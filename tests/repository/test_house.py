"""The house rules: budgets, who imports whom, and the marks that show where a file leaves
grpo.py."""

import ast
import difflib
import re
from dataclasses import fields
from typing import get_type_hints

import pytest
from common.plumbing.flags import Flags, Rule
from checks.files import ALGORITHMS, NINE, PATHS, trunk_of
from tools.marks import changes, code_lines

from tests.helpers import ROOT, module_of

COMMON = sorted((ROOT / "common").rglob("*.py"))
LOSS_ONLY = ["gspo", "sapo", "maspo", "gmpo", "pmd"]
# Code lines, changed code lines against the trunk. stapo also finds its quantile over ranks
# and writes down what it silenced; the last three change more than the loss, each by one object.
USUAL = (178, 34)
BUDGET = {
    "minirl": (190, 46),
    "stapo": (215, 67),
    "vcpo": (262, 141),
    "deep_grpo": (286, 133),
    "goldilocks": (290, 136),
    "blockwise": (212, 66),  # where a response is cut, and two advantages
    "lp_reg": (232, 46),  # a column, a quantile over ranks, a term
    "entropy20": (229, 88),  # two rules by covariance; what stapo has and it has not
    "dapo": (224, 75),  # rounds of sampling, and two more parts of the recipe
    "dppo": (210, 46),  # two flags more: prime-rl's mask and square
    "paced": (306, 46),  # without its trunk's KL term
    "laconic": (198, 40),  # a price, and where it is paid
    "jet": (230, 40),  # an object beside minirl's replay
    "baselines": (198, 42),  # six baselines
    "opd": (190, 49),  # a teacher, and what is known of it
    "icepop": (225, 50),  # a family of corrections
    "ppo": (270, 136),  # what GRPO removed: a second model, GAE, its loss
    "recipe": (613, 356),  # the objects of six files, letter for letter
}
NAMES = "|".join(ALGORITHMS)


def budget(algorithm: str) -> tuple[int, int]:
    """A variant is a small departure: its trunk's code lines and a few more."""
    trunk = trunk_of(PATHS[algorithm])
    if algorithm in BUDGET or algorithm in NINE:
        return BUDGET.get(algorithm, USUAL)
    code, _ = budget(trunk.stem)
    return code + 20, 40


def test_common_knows_no_algorithm():
    """`common` imports no algorithm file and branches on no algorithm's name."""
    for path in COMMON:
        code = "\n".join(line for _, line in code_lines(path.read_text()))
        assert not re.search(rf"""\b(import|from) ({NAMES})\b|["']({NAMES})["']""", code), path


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_file_is_one_readable_page(algorithm):
    """Code lines and nesting within the budget."""
    source = PATHS[algorithm].read_text()
    assert len(code_lines(source)) <= budget(algorithm)[0]
    functions = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
    assert deepest(next(n for n in functions if n.name == "main")) <= 4


def deepest(node: ast.AST, depth: int = 0) -> int:
    """How many compound statements stand inside each other below `node`."""
    nested = (ast.For, ast.While, ast.If, ast.With, ast.Try)
    return max(
        (deepest(child, depth + isinstance(child, nested)) for child in ast.iter_child_nodes(node)),
        default=depth,
    )


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "grpo"])
def test_differences_lie_inside_the_marks(algorithm):
    """The diff against its trunk shows the algorithm and nothing else."""
    loose, changed = changes(PATHS[algorithm], trunk_of(PATHS[algorithm]))
    assert not loose, "\n".join(loose)
    assert 0 < changed <= budget(algorithm)[1]


@pytest.mark.parametrize("algorithm", LOSS_ONLY)
def test_a_loss_only_file_has_no_line_of_its_own_in_main(algorithm):
    """What such a file changes is its flags, advantages and loss: its `main` is the trunk's."""
    path = PATHS[algorithm]
    ours, theirs = (p.read_text().partition("\ndef main(")[2] for p in (path, trunk_of(path)))
    assert ours and ours == theirs


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_headers_are_in_step(algorithm):
    """Two files side by side: paper, objective and gradient weight at the same line numbers."""
    lines = PATHS[algorithm].read_text().splitlines()
    assert re.search(r", arXiv \d{4}\.\d{5}\.$", lines[3]) and lines[5].startswith("Objective, ")
    assert lines[12].startswith("Gradient weight on ∇ log π_θ(y_t), ")
    formulas = lines[7], lines[14]
    assert all(line.startswith("    ") for line in formulas)
    assert not any(lines[n] for n in (1, 4, 6, 11, 13, 16)) and lines[17]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_file_declares_the_flags_that_it_reads(algorithm):
    """What only `common` reads stands in common/plumbing/flags.py, or has another default here."""
    source = PATHS[algorithm].read_text()
    own = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "Args")
    names = [field.target.id for field in own.body if isinstance(field, ast.AnnAssign)]
    shared = {field.name for field in fields(Flags)}
    assert not [n for n in names if n not in shared and not re.search(rf"args\.{n}\b", source)]
    assert not [n for n in names if n in shared and f'"{n}"' in source]
    common = "".join(path.read_text() for path in COMMON if path.stem != "flags")
    assert not [n for n in shared if not re.search(rf'args\.{n}\b|\ba\.{n}\b|"{n}"', common)]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "grpo"])
def test_the_raw_diff_shows_no_line_twice(algorithm):
    """Lines whose code is the same carry the same comment too, so that plain `diff` stays as short
    as the marks."""
    path = PATHS[algorithm]
    ours, theirs = (p.read_text().splitlines() for p in (path, trunk_of(path)))
    shown = [
        line
        for line in difflib.unified_diff(theirs, ours, n=0, lineterm="")
        if line[:3] not in ("---", "+++")
    ]
    gone, new = ({line[1:].split("  #")[0] for line in shown if line[0] == sign} for sign in "-+")
    assert not {line for line in gone & new if line.strip() and not line.lstrip().startswith("#")}


def test_the_marks_test_can_fail(tmp_path):
    """An unmarked change is found, a marked one and a changed comment are not."""
    trunk, other = tmp_path / "grpo.py", tmp_path / "other.py"
    trunk.write_text("a = 1\nb = 2  # <own>\nc = 3\n")
    other.write_text("a = 1  # a comment\nc = 3\nd = 4  # <own>\n")
    assert changes(other, trunk) == ([], 2)
    other.write_text("a = 1\nc = 4\n")
    assert changes(other, trunk)[0] == ["other.py:2: c = 4"]
    trunk.write_text("a = 1\nb = 2\nc = 3\n")
    other.write_text("a = 1\nc = 3\n")
    assert changes(other, trunk)[0] == ["grpo.py:2: b = 2"]


def test_every_flag_is_documented():
    """Each field of Args has a line under it: tyro shows it in --help."""
    for algorithm in ALGORITHMS:
        tree = ast.parse(PATHS[algorithm].read_text())
        fields = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body
        for field, doc in zip(fields[::2], fields[1::2]):
            assert isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr), ast.unparse(
                field
            )


def test_every_number_declares_its_kind():
    """A flag that is a number has a rule, so that no file is left without checks of its own
    flags."""
    for algorithm in ALGORITHMS:
        for name, kind in get_type_hints(module_of(algorithm).Args, include_extras=True).items():
            rules = [
                extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, Rule)
            ]
            assert rules or getattr(kind, "__origin__", kind) not in (int, float), (algorithm, name)
