"""Jet-RL in a run: one policy for sampler and trainer, sharded too; its trunk has two."""

import signal

import minirl
import pytest
import torch
from variants import jet

from tests.helpers import SMALL, assert_same_run, command, metrics, run_here, tensors

pytestmark = pytest.mark.slow


def test_sampler_and_trainer_are_one_policy(tmp_path):
    """KL(μ ‖ π_old) is float32's rounding at every step; with a float8 copy for the sampler alone
    it is a million times that."""
    for name, main in (("jet", jet.main), ("minirl", minirl.main)):
        assert run_here(main, *SMALL, "--steps", 2, "--run_dir", tmp_path / name) == 0
    for line, apart in zip(*(metrics(tmp_path / name)[1:] for name in ("jet", "minirl"))):
        assert 0 <= line["sampler_kl"] < 1e-11 and line["sampler_gap"] < 2e-6
        assert apart["sampler_kl"] > 1e-5 and apart["sampler_gap"] > 1e-3


def test_a_checkpoint_holds_the_masters(tmp_path):
    """In it are numbers that 8 bits cannot hold; `--save_hf` writes those that sampled."""
    flags = [*SMALL, "--steps", 2, "--save_hf", "--run_dir", tmp_path / "run"]
    assert run_here(jet.main, *flags) == 0
    saved = tensors(tmp_path / "run/checkpoints/step_000002", tmp_path / "t.pt")
    name = "model.layers.0.mlp.up_proj.weight"
    master = next(w for n, w in saved.items() if n.startswith("/policy") and n.endswith(name))
    sampled = jet.load_model(str(tmp_path / "run/model"))[0].get_parameter(name)
    assert torch.equal(jet.float8(master), sampled) and not torch.equal(master, sampled)


def test_two_ranks_that_share_a_model(tmp_path):
    """Each rounds its own rows: a killed run goes on to the bit."""
    flags = [*SMALL, "--shard_ranks", 2, "--steps", 4]
    assert command("jet", *flags, "--run_dir", tmp_path / "whole", ranks=2).returncode == 0
    assert all(line["sampler_kl"] < 1e-11 for line in metrics(tmp_path / "whole")[1:])
    where = ["--run_dir", tmp_path / "parts"]
    killed = command("jet", *flags, *where, at=("log", 3), ranks=2)
    assert -signal.SIGKILL in killed.codes
    assert command("jet", *flags, *where, "--resume", ranks=2).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 4, tmp_path)
