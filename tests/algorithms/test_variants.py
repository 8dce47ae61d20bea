"""What some variants do in a run, beside what checks and the loop's oracle hold of them."""

import ast
import signal

import pytest
from variants import ppo

from checks.files import NINE, PATHS
from tests.helpers import SMALL, assert_same_run, command, metrics, run_here

RECIPES_OWN = {"Args", "policy_loss", "main", "advantages"}
RECIPES_OWN |= {"tokens_left", "soft_gate", "dealt", "prepare", "counted"}


def parts(name: str) -> dict[str, str]:
    """The source of every function and class at the top of an algorithm file."""
    source = PATHS[name].read_text()
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def test_the_recipes_copies_are_their_originals():
    """Every function and class that is not its own stands in one of the nine, letter for letter."""
    originals = {source for name in NINE for source in parts(name).values()}
    copies = {part: source for part, source in parts("recipe").items() if part not in RECIPES_OWN}
    assert len(copies) > 15
    assert [part for part, source in copies.items() if source not in originals] == []


@pytest.mark.slow
def test_ppo_takes_groups_of_one(tmp_path):
    """What the others refuse; the critic compares."""
    flags = [*SMALL, "--group_size", 1, "--steps", 2, "--critic_warmup", 1]
    assert run_here(ppo.main, *flags, "--run_dir", tmp_path / "run") == 0
    first, second = metrics(tmp_path / "run")[1:]
    assert first["lr"] == 0 < second["lr"] and first["critic_norm"] > 0
    assert "grad_norm" not in first and second["grad_norm"] > 0


@pytest.mark.slow
def test_jet_on_two_ranks_that_share_a_model(tmp_path):
    """Each rounds its own rows: KL(μ ‖ π_old) stays float32's rounding, and a killed run goes on to
    the bit."""
    flags = [*SMALL, "--shard_ranks", 2, "--steps", 4]
    assert command("jet", *flags, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    assert all(line["sampler_kl"] < 1e-11 for line in metrics(tmp_path / "whole")[1:])
    where = ["--run_dir", tmp_path / "parts"]
    killed = command("jet", *flags, *where, at=(signal.SIGKILL, 3), ranks=2)
    assert -signal.SIGKILL in killed.codes
    assert command("jet", *flags, *where, "--resume", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 4, tmp_path)
