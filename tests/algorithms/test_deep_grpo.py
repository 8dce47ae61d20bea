"""DEEP-GRPO in a run: its branches, what gets a gradient, ranks that fail nowhere."""

import math
import os

import deep_grpo
import pytest
import torch
from common.batch import Rollout
from common.logprobs import Policy, response_logprobs
from common.plumbing.model import load_model
from common.rollout import HFEngine

from checks import loss_of
from tests.driver import drive
from tests.helpers import SMALL, forked, metrics, run_here
from tests.algorithms.stored import PROMPTS, gradients, stored_rollout

pytestmark = pytest.mark.runs


def test_the_prefix_gets_no_gradient(world):
    """At the hidden states that predict prefix tokens the loss has gradient exactly 0; at the
    suffix's it has some."""
    lm, tokenizer = load_model("tiny")
    prompt, prefix = tokenizer("7*8-9+6=")["input_ids"], tokenizer("7*8=56;")["input_ids"]
    rollout = HFEngine(lm, world, 0, "float32", 64).generate([prompt], 4, 64, 1.0, [prefix])
    policy, seen = Policy(lm), []
    lm.base_model.register_forward_hook(
        lambda module, inputs, output: seen.append(output.last_hidden_state)
    )
    logp, entropy = response_logprobs(policy, rollout, 1.0)
    seen[0].retain_grad()
    rollout.advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    columns = {name: getattr(rollout, name) for name in ("rollout_logp", "advantages", "mask")}
    columns |= {"logp": logp, "entropy": entropy, "old_logp": rollout.rollout_logp}
    columns |= {"ref_logp": logp.detach() - 0.1, "branch": torch.tensor([0.0, 1, 1, 1])}
    loss_of(deep_grpo, deep_grpo.Args(beta=0.1), **columns)[0].backward()
    start = len(prompt) + len(prefix)
    assert rollout.prompt_len.tolist() == [start] * 4
    assert rollout.prefix_len.tolist() == [len(prefix)] * 4
    assert (seen[0].grad[:, : start - 1] == 0).all()
    for row, length in enumerate(rollout.mask.sum(1).int().tolist()):
        assert (seen[0].grad[row, start - 1 : start - 1 + length].norm(dim=1) > 0).all()
        assert (seen[0].grad[row, start - 1 + length :] == 0).all()


def test_branches_of_a_run(tmp_path, monkeypatch):
    """Groups of K siblings from failed parents, all with a prefix of the parent's, centred among
    themselves."""
    joined, G, K = [], 4, 6
    join = Rollout.join

    def spy(main: Rollout, grown: Rollout) -> Rollout:
        joined.append((main, grown))
        return join(main, grown)

    monkeypatch.setattr(Rollout, "join", spy)
    monkeypatch.setattr(deep_grpo, "fit_success", lambda feedback: (0.0, math.inf))
    flags = [*SMALL, "--steps", 3, "--branches", K, "--run_dir", tmp_path / "run"]
    assert run_here(deep_grpo.main, *flags) == 0
    semicolon, prefixed = load_model("tiny")[1](";")["input_ids"][0], 0
    for main, grown in joined:
        assert len(grown) % K == 0 and len(grown) > 0
        responses, siblings = main.response_ids(), grown.response_ids()
        for first in range(0, len(grown), K):
            rows, parent = slice(first, first + K), int(grown.origin[first])
            assert (grown.origin[rows] == parent).all() and abs(grown.advantages[rows].sum()) < 1e-5
            group = main.advantages[parent // G * G : parent // G * G + G]
            assert main.advantages[parent] == group.min()  # a failed one
            kept = int(grown.prefix_len[first])
            assert all(sibling[:kept] == responses[parent][:kept] for sibling in siblings[rows])
            assert kept == 0 or responses[parent][kept - 1] == semicolon
            assert kept < len(responses[parent]) and len({tuple(s) for s in siblings[rows]}) > 1
            prefixed += kept > 0
    assert prefixed
    assert all(line["extra_tokens"] > 0 for line in metrics(tmp_path / "run")[1:])
    state = torch.load(tmp_path / "run/checkpoints/step_000003/rank0.pt")["state"]
    pivots = state["feedback"]
    assert len(pivots) == sum(round(line["failed"] * 16) for line in metrics(tmp_path / "run")[1:])
    assert all(0 < depth < 1 and success in (0.0, 1.0) for depth, success in pivots)


def test_without_weight_branches_change_nothing(world, tmp_path, monkeypatch):
    """λ = 0 and β = 0: the gradient is that of a run which discards its branches, and that of λ = 1
    is another."""
    rollout, flags = stored_rollout(world), {"beta": 0.0, "branch_weight": 0.0}
    weightless = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, "deep_grpo", **flags)
    discarded = gradients(
        rollout, PROMPTS, world, tmp_path, monkeypatch, "deep_grpo", beta=0.0, min_branches=10**6
    )
    both = gradients(rollout, PROMPTS, world, tmp_path, monkeypatch, "deep_grpo", beta=0.0)
    assert ((weightless - discarded).norm(dim=1) < 2e-6 * discarded.norm(dim=1)).all()
    assert ((both - discarded).norm(dim=1) > 0.1 * discarded.norm(dim=1)).all()


def test_no_failures_no_branches(tmp_path, monkeypatch, capsys):
    """A judge that passes everything: no branch is sampled, nothing breaks, and the run says that
    it did nothing."""
    load_task = deep_grpo.load_task

    def lenient(*arguments: object) -> object:
        task = load_task(*arguments)
        task.judge = lambda completions, answers: [1.0] * len(answers)
        return task

    monkeypatch.setattr(deep_grpo, "load_task", lenient)
    assert run_here(deep_grpo.main, *SMALL, "--steps", 2, "--run_dir", tmp_path / "run") == 0
    assert "branches_used was 0 at every step" in capsys.readouterr().out
    line = metrics(tmp_path / "run")[-1]
    assert line["failed"] == line["branches_used"] == line["extra_tokens"] == 0
    assert "branch_reward" not in line


def test_too_few_branches_are_discarded(tmp_path):
    flags = [*SMALL, "--steps", 2, "--min_branches", 10_000, "--run_dir", tmp_path / "run"]
    assert run_here(deep_grpo.main, *flags) == 0
    assert all(
        line["branches_used"] == 0 and line["extra_tokens"] > 0
        for line in metrics(tmp_path / "run")[1:]
    )


def second_rank_succeeds(*flags: object) -> None:
    """A run whose judge passes everything on the second rank."""
    load = deep_grpo.load_task

    def lenient(*arguments: object) -> object:
        task = load(*arguments)
        if os.environ["RANK"] == "1":
            task.judge = lambda completions, answers: [1.0] * len(answers)
        return task

    deep_grpo.load_task = lenient
    drive("deep_grpo", flags)


def test_a_rank_without_failures_waits_for_the_other(tmp_path):
    """Two gloo ranks, of which the second fails nowhere: collectives still match, the fit is the
    same on both."""
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run"]
    run = forked(second_rank_succeeds, *flags, ranks=2)
    assert run.returncode == 0, run.stderr[-3000:]
    states = [
        torch.load(tmp_path / f"run/checkpoints/step_000002/rank{r}.pt")["state"] for r in (0, 1)
    ]
    assert states[0]["feedback"] == states[1]["feedback"] and len(states[0]["feedback"]) > 0


def test_a_mixture_of_experts_branches_too(tmp_path):
    """The experts' column of main rows and branches is joined, though it has two more
    dimensions."""
    flags = [*SMALL, "--steps", 1, "--model", "tiny-moe", "--run_dir", tmp_path / "run"]
    assert run_here(deep_grpo.main, *flags) == 0
    assert metrics(tmp_path / "run")[-1]["branches_used"] > 0


def test_restarts_are_counted_apart(tmp_path, monkeypatch):
    """Of all pivots those at the bare prompt; the four quarters hold each of the others once; both
    kinds' successes."""
    choose, drawn = deep_grpo.choose_pivot, []

    def spy(*arguments: object) -> tuple[int, float]:
        drawn.append(choose(*arguments))
        return drawn[-1]

    monkeypatch.setattr(deep_grpo, "choose_pivot", spy)
    flags = [*SMALL, "--steps", 2, "--prompts_per_step", 32, "--run_dir", tmp_path / "run"]
    assert run_here(deep_grpo.main, *flags) == 0
    lines = metrics(tmp_path / "run")[1:]
    saved = 0.0
    quarters = [f"pivots_quarter_{i}" for i in (1, 2, 3, 4)]
    counts = [round(line["failed"] * 128) for line in lines]
    for line, pivots in zip(lines, (drawn[: counts[0]], drawn[counts[0] :])):
        depths = [depth for kept, depth in pivots if kept]
        assert 0 < len(depths) < len(pivots)
        roots = len(pivots) - len(depths)
        assert abs(line["pivots_root"] - roots / len(pivots)) < 1e-9
        expected = [sum(i < 4 * depth <= i + 1 for depth in depths) / len(depths) for i in range(4)]
        assert all(abs(line[name] - share) < 1e-9 for name, share in zip(quarters, expected))
        saved += line["pivots_saved"] * len(depths) + line["pivots_saved_root"] * roots
        assert all(
            0 <= line[f"branch_reward{where}"] <= line[f"pivots_saved{where}"]
            for where in ("", "_root")
        )
    feedback = torch.load(tmp_path / "run/checkpoints/step_000002/rank0.pt")["state"]["feedback"]
    assert len(feedback) == len(drawn)
    assert abs(saved - sum(success for _, success in feedback)) < 1e-6
