"""What one card or a faster one asks for: shards in CPU memory, and compiled layers."""

import copy
from types import SimpleNamespace

import grpo
import pytest
import torch
from common import distributed
from common.batch import Rollout
from common.distributed import BadInput, World, shard, whole_tensor
from common.logprobs import Policy, response_logprobs
from common.plumbing.model import add_product, load_model
from common.plumbing.norms import strange_part
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.helpers import SMALL, assert_same_run, command, metrics
from tests.engines.pretended import CUDA, Card

# Offloading


def test_offloading_changes_no_number(tmp_path):
    """On two ranks that share a model (on a CPU all but the copies is as on GPUs), killed in its
    fourth step and resumed: metrics, weights and moments of the run that offloads nothing."""
    flags = [*SMALL, "--steps", 4, "--shard_ranks", 2, "--run_dir"]
    assert command("grpo", *flags, tmp_path / "plain", ranks=2).returncode == 0
    parts = [*flags, tmp_path / "parts", "--offload"]
    assert command("grpo", *parts, at=("log", 3), ranks=2).returncode
    assert [line["step"] for line in metrics(tmp_path / "parts")][-1] < 4
    ended = command("grpo", *parts, "--resume", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "plain", tmp_path / "parts", 4, tmp_path)


MESH = {"shards": None, "replicas": SimpleNamespace(get_group=lambda: None)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_offloaded(monkeypatch, tiny, device):
    """With --offload the policy, and with it the reference; --offload_reference the latter alone. A
    GPU's copies come from pinned memory; one rank is sharded too, in float32 as well."""
    asked = []
    monkeypatch.setattr(distributed, "receive", lambda module, world: module)
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *how, **names: MESH)
    monkeypatch.setattr(distributed, "fully_shard", lambda m, **how: asked.append(how) or m)
    mine, world = Policy(copy.deepcopy(tiny[0])), World(0, 1, torch.device(device))
    for flags, reference, expected in (
        ({}, False, False),
        ({"offload": True}, False, True),
        ({"offload": True}, True, True),
        ({"offload_reference": True}, True, True),
        ({"offload_reference": True}, False, False),
    ):
        asked.clear()
        shard(mine, grpo.Args(dtype="float32", **flags), world, reference)
        policies = [how.get("offload_policy") for how in asked]
        assert len(policies) == 3 * expected  # two layers and the rest; else a plain module
        assert all(isinstance(one, CPUOffloadPolicy) for one in policies)
        assert all(one.pin_memory == (device == "cuda") for one in policies)


def test_offloaded_shards_are_gathered_on_the_gpu(monkeypatch):
    """NCCL gathers them there; gloo would take minutes for a push."""
    moved = []

    class Shards:
        device_mesh = SimpleNamespace(device_type="cuda")

        def to(self, device: str) -> "Shards":
            moved.append(device)
            return self

        def full_tensor(self) -> str:
            assert moved == ["cuda"], "gathered where it lay"
            return "whole"

    monkeypatch.setattr(distributed, "DTensor", Shards)
    assert whole_tensor(Shards()) == "whole"


# Compiling


def batch(n: int, length: int) -> Rollout:
    """Random tokens after prompts of four."""
    generator = torch.Generator().manual_seed(length)
    sequences = torch.randint(2, 18, (n, length), generator=generator)
    tokens = sequences[:, 4:]
    lengths = torch.full((n,), 4)
    return Rollout(
        sequences=sequences, prompt_len=lengths, tokens=tokens, mask=torch.ones(tokens.shape)
    )


BACKENDS = [pytest.param("aot_eager", marks=pytest.mark.variants)]  # a minute of compiling


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_keep_the_first_ratios_one(world, tiny, monkeypatch, backend):
    """In bfloat16: a pass without gradient, as π_old's, and one with it, compiled apart, give the
    same log-probs to the bit. All layers share their graphs, which are whole: two, and two more
    where the second shape shows what varies."""
    compiling = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiling(f, backend=backend, **how))
    torch._dynamo.reset()
    counters.clear()
    args = grpo.Args(dtype="bfloat16", compile=True)
    policy = shard(Policy(copy.deepcopy(tiny[0])), args, world)
    eager = shard(Policy(copy.deepcopy(tiny[0])), grpo.Args(dtype="bfloat16"), world)
    for some in (batch(4, 32), batch(7, 45)):
        with torch.no_grad():
            old_logp, _ = response_logprobs(policy, some, 1.0)
            usual, _ = response_logprobs(eager, some, 1.0)
        logp, _ = response_logprobs(policy, some, 1.0)
        assert torch.equal(logp, old_logp)
        logp.sum().backward()
        assert all(p.grad.to_local().isfinite().all() for p in policy.parameters())
        assert (logp - usual).abs().max() < 0.3  # other roundings, the same numbers
    assert counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]
    assert strange_part(policy) == "--compile"  # vcpo.py's taps hang on hooks: refused


def test_experts_are_not_compiled(world):
    lm, _ = load_model("tiny-moe")
    with pytest.raises(BadInput, match="--compile: not with experts"):
        shard(Policy(lm), grpo.Args(dtype="float32", compile=True), world)


# The head


def test_the_heads_gradient_is_added_up_by_the_product(monkeypatch):
    """On a GPU in the kernel, out of bfloat16 into float32, in place; on a CPU in two steps."""
    asked, add = [], torch.addmm

    def product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **how) -> None:
        asked.append(how.pop("out_dtype"))
        assert how.pop("out") is total and not how
        total.copy_(add(total, left.float(), right.float()))

    monkeypatch.setattr(torch, "addmm", product)
    left, right = torch.randn(3, 4).bfloat16(), torch.randn(4, 2).bfloat16()
    exact = 1 + left.float() @ right.float()
    total = torch.ones(3, 2)
    add_product(total, left, right)
    assert not asked and (total - exact).abs().max() < 0.05
    with Card():
        there = torch.ones(3, 2).to(CUDA)
        add_product(there, left.to(CUDA), right.to(CUDA))
    assert asked == [torch.float32] and torch.allclose(there.held, exact)
