"""The recipe: its copies are their originals, each layer alone is its file, all run together."""

import ast
import signal
from pathlib import Path

import deep_grpo
import goldilocks
import grpo
import maspo
import pytest
import stapo
import vcpo
from variants import justrl, recipe

from checks.files import NINE, PATHS
from checks.recipe import OFF
from tests.loop.formulas.recipe import SMALL as TEACHER
from tests.helpers import SMALL, assert_same_run, command, metrics, run_here, tensors

OWN = {"Args", "policy_loss", "main", "advantages"}
OWN |= {"tokens_left", "soft_gate", "dealt", "prepare", "counted"}


def parts(name: str) -> dict[str, str]:
    """The source of every function and class at the top of an algorithm file."""
    source = PATHS[name].read_text()
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def test_the_copies_are_their_originals():
    """Every function and class that is not its own stands in one of the nine, letter for letter;
    MASPO's gate line by line in its loss."""
    ours, originals = parts("recipe"), {}
    for name in NINE:
        for part, source in parts(name).items():
            originals.setdefault(part, set()).add(source)
    assert OWN <= ours.keys() and len(ours) > 25
    for part in ours.keys() - OWN:
        assert ours[part] in originals[part], part
    gate = [line for line in ours["soft_gate"].splitlines()[2:-1] if line.strip()]
    assert len(gate) == 8 and all(
        line in parts("maspo")["policy_loss"].splitlines() for line in gate
    )


def flags(*layers: str) -> list[str]:
    """The command line that leaves these layers and no other."""
    words = {"clip": "--clip_high 0.2 --no_token_mean", "tokens": "--tokens none"}
    words |= {"curriculum": "--no_curriculum", "branches": "--branches 0", "lag": "--lag 0"}
    assert words.keys() == OFF.keys()
    return [word for name in words if name not in layers for word in words[name].split()]


SPURIOUS = ["--tau_p", 0.5, "--entropy_quantile", 0.95]
ALONE = {
    "nothing": (grpo, ["--beta", 0], []),
    "clip": (justrl, [], ["clip"]),
    "stapo": (stapo, SPURIOUS, ["clip", "tokens"]),
    "maspo": (maspo, [], ["clip", "tokens"]),
    "curriculum": (goldilocks, ["--beta", 0, *TEACHER[2:]], ["curriculum"]),
    "branches": (deep_grpo, ["--beta", 0, "--branches", 6], ["branches"]),
}
ASKED = {"stapo": [*SPURIOUS], "maspo": ["--tokens", "maspo"]}
ASKED |= {"curriculum": TEACHER[2:], "branches": ["--token_mean", "--branches", 6]}


@pytest.mark.runs
@pytest.mark.parametrize("name", ALONE)
def test_one_layer_is_its_file_to_the_bit(name, tmp_path, monkeypatch):
    """The same samples, weights and moments after 4 steps of small runs, and the same metrics but
    for the loss's last digits. (Branches with their file's advantages, which have no std.)"""
    trunk, theirs, layers = ALONE[name]
    if name == "branches":
        monkeypatch.setattr(recipe, "advantages", deep_grpo.advantages)
    ours = [*flags(*layers), *ASKED.get(name, [])]
    for main, words in ((trunk.main, theirs), (recipe.main, ours)):
        where = tmp_path / main.__module__.rpartition(".")[2]
        assert run_here(main, *SMALL, "--steps", 4, *words, "--run_dir", where) == 0
    one, other = tmp_path / trunk.__name__.rpartition(".")[2], tmp_path / "recipe"
    a, b = (tensors(f / "checkpoints/step_000004", tmp_path / "t.pt") for f in (one, other))
    assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)
    shared = 0
    for line, mine in zip(metrics(one), metrics(other), strict=True):
        names = (line.keys() & mine.keys()) - {"loss"}
        assert {name: line[name] for name in names} == {name: mine[name] for name in names}
        losses = line.get("loss", 0.0), mine.get("loss", 0.0)
        assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
        shared = len(names)
    assert shared > 20 and mine["layers_acted"] <= len(layers) + 1
    if name in ("stapo", "maspo", "curriculum", "branches"):
        acts = {"stapo": "silenced", "maspo": "gate_closed", "branches": "branches_used"}
        acts = acts.get(name, "chosen_over_mean")
        assert any(line.get(acts) for line in metrics(other))


@pytest.mark.runs
def test_stale_batches_alone_are_vcpo(tmp_path, monkeypatch):
    """With one step per batch and vcpo.py's std: the same gradients but for their rounding, the
    same ages, weights, baseline, ESS and step length."""
    monkeypatch.setattr(recipe, "advantages", vcpo.advantages)
    words = [*SMALL, "--minibatches", 1, "--steps", 6, "--warmup", 2, "--lag", 2]
    for main, more in ((vcpo.main, []), (recipe.main, flags("lag"))):
        assert run_here(main, *words, *more, "--run_dir", tmp_path / main.__module__) == 0
    names = "lag grad_norm ess_ratio lr_scale lr weight weight_max baseline_shift reward"
    lines = zip(metrics(tmp_path / "vcpo")[3:], metrics(tmp_path / "variants.recipe")[3:])
    for theirs, ours in lines:
        found, expected = ([line[name] for name in names.split()] for line in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert ours["lag"] == 2 and ours["ess_ratio"] < 1 and ours["baseline_shift"] > 0


@pytest.mark.runs
@pytest.mark.parametrize("words", ["--branches 3 --lag 2", "--tokens maspo --no_token_mean"])
def test_all_layers_act_together(words, tmp_path):
    """Each says so; teacher and pivots learn from what is sampled, the policy `lag` steps later."""
    more = [*TEACHER[2:], "--lag", 1, "--tau_p", 0.5, "--entropy_quantile", 0.95, *words.split()]
    assert run_here(recipe.main, *SMALL, *more, "--steps", 7, "--run_dir", tmp_path / "run") == 0
    lines = metrics(tmp_path / "run")[1:]
    gate = "gate_closed" if "maspo" in words else "silenced"
    for name in ("chosen_over_mean", "branches_used", "lr_damping", gate):
        assert any(line.get(name) for line in lines), name
    filling = 2 if "--lag 2" in words else 1
    assert [line["step"] for line in lines if "loss" in line] == list(range(1 + filling, 8))
    assert all("teacher_mean" in line and "failed" in line for line in lines)
    assert max(line["layers_acted"] for line in lines) >= 4


@pytest.mark.runs
@pytest.mark.parametrize("task", ["arithmetic:steps", "arithmetic:noisy"])
def test_part_marks_and_wrong_verdicts(task, tmp_path):
    """Rewards between 0 and 1 leave pivots with fewer than K telling branches."""
    words = [*SMALL, *TEACHER, "--steps", 3, "--task", task, "--run_dir", tmp_path / "run"]
    assert run_here(recipe.main, *words) == 0


@pytest.mark.runs
def test_a_mixture_of_experts(tmp_path, capsys):
    """All layers but b: its gradient norms cannot be measured, and it says what to do."""
    words = [*SMALL, *TEACHER, "--steps", 3, "--model", "tiny-moe", "--run_dir", tmp_path / "run"]
    assert run_here(recipe.main, *words) == 2
    assert "no gradient norms, use --no_optimal_baseline" in capsys.readouterr().err
    assert run_here(recipe.main, *words, "--no_optimal_baseline") == 0


@pytest.mark.variants
@pytest.mark.runs
@pytest.mark.parametrize("words", [TEACHER, "--no_curriculum --async --lag 2".split()])
def test_two_ranks_resume_to_the_bit(words, tmp_path):
    """All layers (or sampling beside the update), killed at step 5 with batches in flight."""
    words = [*SMALL, *words, "--shard_ranks", 2, "--steps", 6]
    assert command("recipe", *words, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    where = ["--run_dir", tmp_path / "parts"]
    assert -signal.SIGKILL in command("recipe", *words, *where, at=("log", 5), ranks=2).codes
    assert command("recipe", *words, *where, "--resume", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6, tmp_path)


REFUSED = {
    "--async": "--async: only with --no_curriculum",
    "--async --no_curriculum --lag 0": "--lag 0: must be 1 or more",
    "--branches 1": "--branches 1: must be 0, or 2 or more",
    "--lag 4": "--lag 4: must be 0 or more, and below --steps 4",
    "--boundary @": "--boundary '@': no token ends in it",
    "--teacher_batch 30": "at most --window 20",
}


@pytest.mark.parametrize("words", REFUSED)
def test_layers_that_cannot_work_are_refused_in_a_line(words, tmp_path, capsys):
    given = [*SMALL, *TEACHER, "--steps", 4, *words.split(), "--run_dir", tmp_path / "run"]
    assert run_here(recipe.main, *given) == 2
    said = capsys.readouterr().err
    assert REFUSED[words] in said and said.count("\n") == 1
    assert not Path(tmp_path / "run").exists()
