"""What one card or a faster one asks for: shards in CPU memory, and compiled layers."""

import copy
import signal

import grpo
import pytest
import torch
from common.distributed import shard
from common.logprobs import Policy
from torch._dynamo.utils import counters

from tests.helpers import SMALL, assert_same_run, command, metrics

pytestmark = pytest.mark.slow


def test_offloading_changes_no_number(tmp_path):
    """On two ranks that share a model (on a CPU all but the copies is as on GPUs), killed in its
    fourth step and resumed: metrics, weights and moments of the run that offloads nothing."""
    flags = [*SMALL, "--steps", 4, "--shard_ranks", 2, "--run_dir"]
    assert command("grpo", *flags, tmp_path / "plain", ranks=2).returncode == 0
    parts = [*flags, tmp_path / "parts", "--offload"]
    assert command("grpo", *parts, at=(signal.SIGKILL, 3), ranks=2).returncode
    assert [line["step"] for line in metrics(tmp_path / "parts")][-1] < 4
    ended = command("grpo", *parts, "--resume", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "plain", tmp_path / "parts", 4, tmp_path)


def test_compiled_layers_keep_the_first_ratios_one(world, tiny, monkeypatch):
    """In bfloat16: a pass without gradient, as π_old's, and one with it, compiled apart, give the
    same log-probs to the bit, for two shapes. The graphs are whole, and the layers share them."""
    compiling = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiling(f, backend="eager", **how))
    torch._dynamo.reset()
    counters.clear()
    args = grpo.Args(dtype="bfloat16", compile=True)
    policy = shard(Policy(copy.deepcopy(tiny[0])), args, world)
    for shape in ((4, 32), (7, 45)):
        sequences = torch.randint(2, 18, shape, generator=torch.Generator().manual_seed(0))
        predicts = torch.arange(shape[1]).expand(shape) < shape[1] - 1
        with torch.no_grad():
            old_logp, _ = policy(sequences, predicts, 1.0)
        logp, _ = policy(sequences, predicts, 1.0)
        assert torch.equal(logp, old_logp)
        logp.sum().backward()
    assert 0 < counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]
