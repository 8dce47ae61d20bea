"""What runs on GPUs alone, as far as it can be held without one: torch.cuda and vLLM are stubs.

Whether the kernels do what they should is for tests/gpu.
"""

import contextlib
import importlib.util
import os
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import grpo
import minirl
import pytest
import torch
from common.batch import Rollout
from common.distributed import CLOSING, BadInput, World, full_parameters, setup
from common.launch import check
from common.logprobs import Policy
from common.model import head_logits, load_model
from common.rollout_vllm import VLLMEngine

from tests.helpers import run_here

GPU = World(0, 1, torch.device("cuda", 0))


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda of a machine with one H100."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


class FakeLLM:
    """vLLM's LLM as far as the engine knows it: what sleeps cannot work."""

    def __init__(self, **options: object):
        self.options, self.calls, self.awake = options, ["start"], {"weights", "kv_cache"}
        cache = SimpleNamespace(num_gpu_blocks=100, block_size=16)
        core = SimpleNamespace(shutdown=lambda: None)
        config = SimpleNamespace(cache_config=cache)
        self.llm_engine = SimpleNamespace(engine_core=core, vllm_config=config)

    def sleep(self, level: int) -> None:
        self.calls, self.awake = [*self.calls, "sleep"], set()

    def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & set(tags), "woken twice"
        self.calls, self.awake = (
            [*self.calls, *(f"wake {tag}" for tag in tags)],
            self.awake | {*tags},
        )

    def collective_rpc(self, name: str, kwargs: dict) -> None:
        assert name == "reload_weights" and "weights" in self.awake, "a push to sleeping weights"
        self.pushed = dict(kwargs["weights_iterator"])
        self.calls.append("push")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def generate(self, requests: list[dict], sampling: list, use_tqdm: bool) -> list:
        assert self.awake == {"weights", "kv_cache"}, "sampling asleep"
        self.calls.append("generate")
        self.sampling = sampling
        logps = SimpleNamespace(logprobs=[-0.5, -0.25])
        output = SimpleNamespace(token_ids=[5, 1], logprobs=logps)
        if self.options.get("enable_return_routed_experts"):
            length = len(requests[0]["prompt_token_ids"]) + 1  # the last token is never fed back
            output.routed_experts = torch.ones(length, 2, 2, dtype=torch.uint8)
        return [SimpleNamespace(outputs=[output] * one.n) for one in sampling]


@pytest.fixture
def fake_vllm(world, cuda, monkeypatch):
    """An importable vllm that holds `FakeLLM`, in a world of one."""
    vllm = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **how: SimpleNamespace(**how))
    vllm.EngineArgs = make_dataclass("EngineArgs", ["seed", "enforce_eager", "kv_cache_dtype"])
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    yield
    CLOSING.clear()


def engine_of(Args: type = grpo.Args, model: str = "tiny", **flags: object) -> VLLMEngine:
    """The engine of one GPU; what it samples stays on the CPU."""
    lm, _ = load_model(model)
    flags = {"dtype": "bfloat16"} | flags
    engine = VLLMEngine(Args(rollout="vllm", model=model, **flags), lm, GPU)
    engine.world = World(0, 1, torch.device("cpu"))
    return engine


def test_more_ranks_than_gpus_are_refused(cuda, monkeypatch):
    for name, value in (("WORLD_SIZE", 2), ("RANK", 1), ("LOCAL_RANK", 1), ("MASTER_PORT", 1)):
        monkeypatch.setitem(os.environ, name, str(value))
    with pytest.raises(BadInput, match=r"with 1 GPU\(s\): --nproc_per_node 1"):
        setup()


@pytest.mark.parametrize(
    ("model", "installed", "device", "engine"),
    [
        ("Qwen/Qwen3-1.7B", True, "cuda", "vllm"),
        ("Qwen/Qwen3-1.7B", False, "cuda", "hf"),  # not installed: no reason to stop
        ("tiny", True, "cuda", "hf"),  # starting vLLM would take longer than the run
        ("Qwen/Qwen3-1.7B", True, "cpu", "hf"),
    ],
)
def test_auto_takes_the_engine_that_fits(monkeypatch, model, installed, device, engine):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    args = grpo.Args(model=model)
    check(args, World(0, 1, torch.device(device)))
    assert args.rollout == engine


def test_float8_needs_a_gpu_that_has_it(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BadInput, match="compute capability 8.9"):
        engine_of(rollout_dtype="float8")


def test_nothing_sleeps_or_wakes_in_vain(fake_vllm, tiny):
    """Asleep while the trainer computes; the weights, once pushed, stay awake for the sampling."""
    engine = engine_of(vllm_sleep=True)
    engine.sync(Policy(tiny[0]))
    assert engine.llm.calls == ["start", "sleep", "wake weights", "push", "reset"]
    engine.llm.calls.clear()
    rollout = engine.generate([[5, 6], [7]], 3, 8, 1.0)
    assert engine.llm.calls == ["wake kv_cache", "generate", "sleep"]
    assert len(rollout) == 6 and rollout.rollout_logp[0].tolist() == [-0.5, -0.25]
    engine.llm.calls.clear()
    engine.generate([[5, 6]], 1, 8, 0.0)
    assert engine.llm.calls == ["wake kv_cache", "wake weights", "generate", "sleep"]


def test_awake_engines_never_sleep(fake_vllm, tiny):
    engine = engine_of()
    engine.sync(Policy(tiny[0]))
    engine.generate([[5, 6]], 2, 8, 1.0)
    assert engine.llm.calls == ["start", "push", "reset", "generate"]


def test_pushed_weights_have_the_engines_precision(fake_vllm, tiny):
    engine = engine_of()
    engine.sync(Policy(tiny[0]))
    pushed = engine.llm.pushed
    assert pushed and all(tensor.dtype == torch.bfloat16 for tensor in pushed.values())
    whole = dict(full_parameters(Policy(tiny[0])))
    assert all(torch.equal(pushed[name], whole[name].bfloat16()) for name in pushed)


def test_what_the_engine_asks_for(fake_vllm):
    """Log-probs after temperature, the head in float32, room for this engine's rows and no more."""
    options = engine_of(prompts_per_step=4, group_size=4).llm.options
    assert options["logprobs_mode"] == "processed_logprobs" and options["max_num_seqs"] == 16
    assert options["hf_overrides"] == {"head_dtype": "float32"}
    assert options["generation_config"] == "vllm" and options["dtype"] == torch.bfloat16
    assert engine_of(prompts_per_step=512, group_size=16).llm.options["max_num_seqs"] == 1024


def test_each_request_has_seeds_of_its_own(fake_vllm):
    """A request's n responses take the n seeds from its own on; the next call has others."""
    engine, seen = engine_of(), []
    for _ in range(2):
        engine.generate([[5, 6], [7], [8]], 4, 8, 1.0)
        seen += [one.seed + i for one in engine.llm.sampling for i in range(one.n)]
    assert len(set(seen)) == 24


def test_experts_are_recorded_on_request_alone(fake_vllm):
    """It costs vLLM its scheduling ahead, and a copy to the host at every step."""
    idle = engine_of(minirl.Args, "tiny-moe", routing_replay="none", rollout_dtype="auto")
    assert not idle.reports_experts and "async_scheduling" not in idle.llm.options
    asked = engine_of(minirl.Args, "tiny-moe", routing_replay="r3", rollout_dtype="auto")
    assert asked.reports_experts and asked.llm.options["async_scheduling"] is False
    rollout: Rollout = asked.generate([[5, 6]], 2, 8, 1.0)
    assert rollout.sampler_experts.shape == (2, 4, 2, 2)
    assert rollout.sampler_experts[0, :, 0, 0].tolist() == [1, 1, 1, 0]


def test_the_heads_product_is_float32(monkeypatch):
    """On a GPU by the kernel's own output type: rounded to bfloat16 first it would be too late."""
    asked = {}
    flat = torch.zeros(4, 2, dtype=torch.bfloat16)

    def product(left: torch.Tensor, right: torch.Tensor, **how: object) -> torch.Tensor:
        asked.update(how)
        return left.float() @ right.float()

    monkeypatch.setattr(torch, "mm", product)
    shape = {"dtype": torch.bfloat16, "shape": torch.Size([4, 1, 2])}
    hidden = SimpleNamespace(is_cuda=True, flatten=lambda start, end: flat, **shape)
    assert head_logits(hidden, torch.zeros(3, 2, dtype=torch.bfloat16)).shape == (4, 1, 3)
    assert asked == {"out_dtype": torch.float32}
    low = torch.ones(1, 2, dtype=torch.bfloat16)
    assert head_logits(low, low).dtype == torch.float32


def test_a_rank_that_fails_does_not_wait_for_the_others(monkeypatch, capsys):
    """Its clean-up would wait for ranks that wait for it, and torchrun would learn of it late."""

    def fail(args: object, world: World) -> None:
        world.size = 2
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(fail, "__module__", "grpo", raising=False)
    monkeypatch.setattr("common.launch.os._exit", lambda code: sys.exit(code))
    assert run_here(fail, "--steps", 1) == 1
    said = capsys.readouterr().err
    assert "a mistake of ours" in said and "rank 0 failed in" in said


def test_the_suite_does_not_see_gpus():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
