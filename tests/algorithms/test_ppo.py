"""ppo.py where it is unlike the others: groups of one, a critic with experts, its own state."""

from pathlib import Path

import pytest
import torch
from variants import ppo

from tests import adapters
from tests.helpers import SMALL, metrics, run_here, tensors

pytestmark = pytest.mark.runs


def test_a_group_of_one(tmp_path: Path):
    """What the others refuse; the critic compares."""
    flags = [*SMALL, "--group_size", 1, "--steps", 2, "--critic_warmup", 1]
    assert run_here(ppo.main, *flags, "--run_dir", tmp_path / "run") == 0
    first, second = metrics(tmp_path / "run")[1:]
    assert first["lr"] == 0 < second["lr"] and first["critic_norm"] > 0
    assert "grad_norm" not in first and second["grad_norm"] > 0


def test_a_critic_with_experts_and_checkpointed_layers(tmp_path: Path):
    """In the warm-up the policy's weights and moments stay, the critic's move; both are in the
    checkpoint."""
    flags = ["--model", "tiny-moe", "--gradient_checkpointing", "--critic_warmup", 9]
    assert run_here(ppo.main, *SMALL, *flags, "--steps", 2, "--run_dir", tmp_path / "run") == 0
    saved = tensors(tmp_path / "run/checkpoints/step_000002", tmp_path / "t.pt")
    policy = {name: x for name, x in saved.items() if name.startswith("/policy/0.lm.model.")}
    assert len(policy) > 10
    for name, weight in policy.items():
        critic = name.replace("/policy/0.lm.model.", "/policy/1.lm.")
        assert not torch.equal(weight, saved[critic]), name
    assert saved["/policy/1.head.weight"].any()
    moments = {name for name in saved if name.endswith(".exp_avg") or name.endswith("/exp_avg")}
    assert not any(saved[name].any() for name in moments if "/0." in name)
    assert any(saved[name].any() for name in moments if "/1.head" in name)
    assert any("/0." in name for name in moments)


def test_the_adapters_gae():
    """Three tokens by hand: δ = 0.2, -0.1, 0.5 with γ = 1, of which λ = 0.5 makes Â."""
    rewards, values = torch.tensor([[0.0, 0, 1, 9]]), torch.tensor([[0.4, 0.6, 0.5, 7]])
    mask = torch.tensor([[1.0, 1, 1, 0]])
    advantages, returns = adapters.gae(rewards, values, mask, 1.0, 0.5)
    assert torch.allclose(advantages, torch.tensor([[0.275, 0.15, 0.5, 0]]))
    assert torch.allclose(returns, torch.tensor([[0.675, 0.75, 1, 0]]))
