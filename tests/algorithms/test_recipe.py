"""The recipe: its copies are their originals, each layer alone is its file, all run together."""

import ast
import signal

import deep_grpo
import goldilocks
import grpo
import maspo
import pytest
import stapo
from variants import justrl, recipe

from checks.files import NINE, PATHS
from checks.recipe import OFF
from tests.loop.formulas.recipe import SMALL as TEACHER
from tests.helpers import SMALL, assert_same_run, command, metrics, run_here, tensors

pytestmark = pytest.mark.slow
OWN = {"Args", "policy_loss", "main", "advantages"}
OWN |= {"tokens_left", "soft_gate", "dealt", "prepare", "counted"}


def parts(name: str) -> dict[str, str]:
    """The source of every function and class at the top of an algorithm file."""
    source = PATHS[name].read_text()
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def test_the_copies_are_their_originals():
    """Every function and class that is not its own stands in one of the nine, letter for letter."""
    originals = {source for name in NINE for source in parts(name).values()}
    copies = {part: source for part, source in parts("recipe").items() if part not in OWN}
    assert len(copies) > 15
    assert [part for part, source in copies.items() if source not in originals] == []


def flags(*layers: str) -> list[str]:
    """The command line that leaves these layers and no other."""
    words = {"clip": "--clip_high 0.2 --no_token_mean", "tokens": "--tokens none"}
    words |= {"curriculum": "--no_curriculum", "branches": "--branches 0", "lag": "--lag 0"}
    assert words.keys() == OFF.keys()
    return [word for name in words if name not in layers for word in words[name].split()]


SPURIOUS = ["--tau_p", 0.5, "--entropy_quantile", 0.95]
BRANCHES = ["--beta", 0, "--branches", 6]
# The file, its flags; the recipe's layers, its flags
ALONE = {
    "nothing": (grpo, ["--beta", 0], [], []),
    "clip": (justrl, [], ["clip"], []),
    "stapo": (stapo, SPURIOUS, ["clip", "tokens"], SPURIOUS),
    "maspo": (maspo, [], ["clip", "tokens"], ["--tokens", "maspo"]),
    "curriculum": (goldilocks, ["--beta", 0, *TEACHER[2:]], ["curriculum"], TEACHER[2:]),
    "branches": (deep_grpo, BRANCHES, ["branches"], ["--token_mean", "--branches", 6]),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_layer_is_its_file_to_the_bit(name, tmp_path, monkeypatch):
    """The same weights and moments after 4 steps of small runs. (Branches with their file's
    advantages, which have no std.)"""
    trunk, theirs, layers, ours = ALONE[name]
    if name == "branches":
        monkeypatch.setattr(recipe, "advantages", deep_grpo.advantages)
    found = []
    for main, words in ((trunk.main, theirs), (recipe.main, [*flags(*layers), *ours])):
        where = tmp_path / main.__module__
        assert run_here(main, *SMALL, "--steps", 4, *words, "--run_dir", where) == 0
        found.append(tensors(where / "checkpoints/step_000004", tmp_path / "t.pt"))
    one, other = found
    assert one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


def test_all_layers_act_together(tmp_path):
    """Each says so; teacher and pivots learn from what is sampled, the policy `lag` steps later."""
    more = [*TEACHER[2:], "--lag", 1, *SPURIOUS, "--branches", 3]
    assert run_here(recipe.main, *SMALL, *more, "--steps", 6, "--run_dir", tmp_path / "run") == 0
    lines = metrics(tmp_path / "run")[1:]
    for name in ("chosen_over_mean", "branches_used", "lr_damping", "silenced"):
        assert any(line.get(name) for line in lines), name
    assert [line["step"] for line in lines if "loss" in line] == [2, 3, 4, 5, 6]
    assert all("teacher_mean" in line and "failed" in line for line in lines)


def test_two_ranks_resume_to_the_bit(tmp_path):
    """All layers, killed at step 5 with batches in flight."""
    words = [*SMALL, *TEACHER, "--shard_ranks", 2, "--steps", 6]
    assert command("recipe", *words, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    where = ["--run_dir", tmp_path / "parts"]
    assert -signal.SIGKILL in command("recipe", *words, *where, at=("log", 5), ranks=2).codes
    assert command("recipe", *words, *where, "--resume", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)


@pytest.mark.parametrize("words", ["--async", "--branches 1", "--lag 4", "--teacher_batch 30"])
def test_layers_that_cannot_work_are_refused_in_a_line(words, tmp_path, capsys):
    given = [*SMALL, *TEACHER, "--steps", 4, *words.split(), "--run_dir", tmp_path / "run"]
    assert run_here(recipe.main, *given) == 2
    said = capsys.readouterr().err
    assert words.split()[0] in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
