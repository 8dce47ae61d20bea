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
    flags = [*SMALL, "--steps", 2, "--branches", K, "--run_dir", tmp_path / "run"]
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
    pivots = torch.load(tmp_path / "run/checkpoints/step_000002/rank0.pt")["state"]["feedback"]
    assert len(pivots) == sum(round(line["failed"] * 16) for line in metrics(tmp_path / "run")[1:])


def test_without_weight_branches_change_nothing(world, tmp_path, monkeypatch):
    """λ = 0 and β = 0: the gradient is that of a run which discards its branches, and that of λ = 1
    is another."""
    rollout, given = stored_rollout(world), (PROMPTS, world, tmp_path, monkeypatch, "deep_grpo")
    weightless = gradients(rollout, *given, beta=0.0, branch_weight=0.0)
    discarded = gradients(rollout, *given, beta=0.0, min_branches=10**6)
    both = gradients(rollout, *given, beta=0.0)
    assert ((weightless - discarded).norm(dim=1) < 2e-6 * discarded.norm(dim=1)).all()
    assert ((both - discarded).norm(dim=1) > 0.1 * discarded.norm(dim=1)).all()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_rank_without_failures_waits_for_the_other(tmp_path):
    """Two gloo ranks, of which the second fails nowhere: collectives still match, the fit is the
    same on both."""
    flags = [*SMALL, "--steps", 2, "--run_dir", tmp_path / "run"]
    run = forked(second_rank_succeeds, *flags, ranks=2)
    assert run.returncode == 0, run.stderr[-3000:]
    saved = tmp_path / "run/checkpoints/step_000002"
    one, other = (torch.load(saved / f"rank{rank}.pt")["state"]["feedback"] for rank in (0, 1))
    assert one == other and len(one) > 0


@pytest.mark.slow
def test_a_mixture_of_experts_branches_too(tmp_path):
    """The experts' column of main rows and branches is joined, though it has two more
    dimensions."""
    flags = [*SMALL, "--steps", 1, "--model", "tiny-moe", "--run_dir", tmp_path / "run"]
    assert run_here(deep_grpo.main, *flags) == 0
    assert metrics(tmp_path / "run")[-1]["branches_used"] > 0
