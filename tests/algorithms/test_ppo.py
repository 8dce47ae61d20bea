"""ppo.py where it is unlike the others: groups of one, a critic with experts, its own state."""

import pytest
from variants import ppo

from tests.helpers import SMALL, metrics, run_here, tensors

pytestmark = pytest.mark.slow


def test_a_group_of_one(tmp_path):
    """What the others refuse; the critic compares."""
    flags = [*SMALL, "--group_size", 1, "--steps", 2, "--critic_warmup", 1]
    assert run_here(ppo.main, *flags, "--run_dir", tmp_path / "run") == 0
    first, second = metrics(tmp_path / "run")[1:]
    assert first["lr"] == 0 < second["lr"] and first["critic_norm"] > 0
    assert "grad_norm" not in first and second["grad_norm"] > 0


def test_a_critic_with_experts_and_checkpointed_layers(tmp_path):
    """In the warm-up the policy's moments stay 0, the critic's do not; both are in the
    checkpoint."""
    flags = ["--model", "tiny-moe", "--gradient_checkpointing", "--critic_warmup", 9]
    assert run_here(ppo.main, *SMALL, *flags, "--steps", 2, "--run_dir", tmp_path / "run") == 0
    saved = tensors(tmp_path / "run/checkpoints/step_000002", tmp_path / "t.pt")
    assert saved["/policy/1.head.weight"].any()
    moments = {name for name in saved if name.endswith((".exp_avg", "/exp_avg"))}
    assert any("/0." in name for name in moments)
    assert not any(saved[name].any() for name in moments if "/0." in name)
    assert any(saved[name].any() for name in moments if "/1.head" in name)
