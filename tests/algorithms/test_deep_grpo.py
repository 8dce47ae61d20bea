"""DEEP-GRPO in a run: its branches, what gets a gradient, ranks that fail nowhere."""

import os

import deep_grpo
import pytest
import torch
from common.logprobs import Policy, response_logprobs
from common.plumbing.model import load_model
from common.rollout import HFEngine

from checks import loss_of
from tests.helpers import SMALL, drive, forked
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
    columns |= {"ref_logp": logp.detach() - 0.1, "branch": torch.tensor([0.0, 1.5, 1.5, 1.5])}
    loss_of(deep_grpo, deep_grpo.Args(beta=0.1), **columns)[0].backward()
    start = len(prompt) + len(prefix)
    assert rollout.prompt_len.tolist() == [start] * 4
    assert rollout.prefix_len.tolist() == [len(prefix)] * 4
    assert (seen[0].grad[:, : start - 1] == 0).all()
    for row, length in enumerate(rollout.mask.sum(1).int().tolist()):
        assert (seen[0].grad[row, start - 1 : start - 1 + length].norm(dim=1) > 0).all()
        assert (seen[0].grad[row, start - 1 + length :] == 0).all()


def test_without_weight_branches_change_nothing(world, tmp_path, monkeypatch):
    """λ = 0 and β = 0: the gradient is that of a run which discards its branches, and that of λ = 1
    is another."""
    rollout, given = stored_rollout(world), (PROMPTS, world, tmp_path, monkeypatch, "deep_grpo")
    weightless = gradients(rollout, *given, beta=0.0, branch_weight=0.0)
    both = gradients(rollout, *given, beta=0.0)
    join = deep_grpo.Branches.join
    nothing = slice(0, 0)
    monkeypatch.setattr(
        deep_grpo.Branches, "join", lambda self, main, grown: join(self, main, grown.rows(nothing))
    )
    discarded = gradients(rollout, *given, beta=0.0)
    assert ((weightless - discarded).norm(dim=1) < 2e-6 * discarded.norm(dim=1)).all()
    assert ((both - discarded).norm(dim=1) > 0.1 * discarded.norm(dim=1)).all()


def second_rank_succeeds(*flags: object) -> None:
    """A run whose verifier passes everything on the second rank."""
    load = deep_grpo.load_task

    def lenient(*arguments: object) -> object:
        task = load(*arguments)
        if os.environ["RANK"] == "1":
            task.verifier = lambda completions, answers: [1.0] * len(answers)
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
