"""What runs on GPUs alone, as far as it can be held without one: torch.cuda and vLLM are stubs.

Whether the kernels do what they should is for tests/gpu.
"""

import ast
import contextlib
import copy
import importlib.util
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import grpo
import minirl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from common.batch import Rollout
from common.distributed import CLOSING, BadInput, World, full_parameters, setup, shard
from common.plumbing.launch import check, parse
from common.logprobs import Policy
from common.plumbing.model import head_logits, load_model
from common.plumbing.vllm import VLLMEngine, checkpoint_parameters
from common.rollout import HFEngine
from checks.files import algorithms
from torch.distributed.tensor import DTensor

from tests.helpers import ROOT, SMALL, forked, run_here

OPTIONS = "dtype seed logprobs_mode enforce_eager kv_cache_dtype compilation_config"
GPU = World(0, 1, torch.device("cuda", 0))
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")


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

    experts = np.uint8  # vLLM's: uint16 where there are more than 256

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
        self.requests, self.sampling, answers = requests, sampling, []
        logps = SimpleNamespace(logprobs=[-0.5, -0.25])
        for request, how in zip(requests, sampling):
            prompt = request["prompt_token_ids"]
            output = SimpleNamespace(token_ids=[prompt[-1], 1], logprobs=logps)
            if self.options.get("enable_return_routed_experts"):
                # The last token is never fed back.
                output.routed_experts = np.ones((len(prompt) + 1, 2, 2), self.experts)
            answers.append(SimpleNamespace(outputs=[output] * how.n))
        return answers


@pytest.fixture
def fake_vllm(world, cuda, monkeypatch):
    """An importable vllm that holds `FakeLLM`, in a world of one."""
    vllm = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **how: SimpleNamespace(**how))
    vllm.EngineArgs = make_dataclass("EngineArgs", OPTIONS.split())
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


@pytest.mark.parametrize(
    ("model", "installed", "device", "engine"),
    [
        ("Qwen/Qwen3-1.7B", True, "cuda", "vllm"),
        ("Qwen/Qwen3-1.7B", False, "cuda", "hf"),  # not installed: no reason to stop
        ("tiny", True, "cuda", "hf"),  # starting vLLM would take longer than the run
        ("Qwen/Qwen3-1.7B", True, "cpu", "hf"),
    ],
)
def test_auto_takes_the_engine_that_fits(cuda, monkeypatch, model, installed, device, engine):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    args = grpo.Args(model=model)
    check(args, World(0, 1, torch.device(device)))
    assert args.rollout == engine


@pytest.mark.parametrize(
    ("capability", "asked", "dtype"),
    [
        ((7, 5), "auto", "float32"),  # T4
        ((8, 0), "auto", "bfloat16"),  # A100
        ((7, 5), "bfloat16", "bfloat16"),  # emulated: as one likes
    ],
)
def test_a_gpu_without_bfloat16_trains_in_float32(
    cuda, monkeypatch, capsys, capability, asked, dtype
):
    """And says so in one line, on one rank."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for rank in range(2):
        args = grpo.Args(dtype=asked, prompts_per_step=8)
        check(args, World(rank, 2, torch.device("cuda", rank)))
        assert args.dtype == dtype
        said = f"compute capability below 8.0: {dtype} on cuda:0\n"
        assert capsys.readouterr().err == said * (rank == 0 and capability < (8, 0))


def test_apples_gpus_are_not_used(monkeypatch, capsys):
    """One line, where there is one; elsewhere none."""
    for there in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        check(grpo.Args(), World(0, 1, torch.device("cpu")))
        said = capsys.readouterr().err
        assert said == "Apple's GPUs are not used: float32 on cpu\n" * there


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update"


@pytest.mark.parametrize(
    ("build", "devices", "visible", "refused"),
    [
        ("13.0", ["/dev/nvidiactl"], None, True),
        ("13.0", ["/dev/nvidiactl"], "", False),  # the user wants the CPU
        ("13.0", [], None, False),  # a laptop with pip's default torch
        (None, ["/dev/nvidiactl"], None, False),  # torch's CPU build, chosen by hand
    ],
)
def test_a_driver_too_old_is_no_run_on_the_cpu(
    monkeypatch, capsys, tmp_path, build, devices, visible, refused
):
    """torch only warns, and says that there is no GPU: here it is one line and exit code 2."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", build)
    real = os.path.exists
    there = lambda path: path in devices if "/dev/nvidia" in str(path) else real(path)  # noqa: E731
    monkeypatch.setattr(os.path, "exists", there)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code = run_here(grpo.main, *SMALL, "--steps", 1, "--run_dir", tmp_path / "run")
    said = capsys.readouterr().err
    assert code == 2 * refused and (TOO_OLD in said) == refused
    if refused:
        assert said.count("\n") == 1 and "on its CPU: CUDA_VISIBLE_DEVICES=" in said


@pytest.mark.parametrize("theirs", [None, "garbage_collection_threshold:0.8"])
def test_the_users_allocator_settings_win(theirs):
    """Also under their older name, over which torch prefers the newer one."""
    given = {"PYTORCH_CUDA_ALLOC_CONF": theirs} if theirs else {}
    env = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    code = "import common, os; print(os.environ['PYTORCH_ALLOC_CONF'])"
    how = {"env": env | given, "cwd": ROOT, "capture_output": True, "text": True}
    assert subprocess.run([sys.executable, "-c", code], **how).stdout.strip() == (
        theirs or "expandable_segments:True"
    )


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


@pytest.mark.parametrize("key", ["dtype", "seed", "logprobs_mode", "max_model_len"])
def test_further_options_cannot_be_ours(fake_vllm, key):
    with pytest.raises(BadInput, match=f"--vllm {key}: follows from the other flags"):
        engine_of(vllm=("kv_cache_dtype=fp8", f"{key}=1"))


def test_further_options_go_to_vllm(fake_vllm):
    """JSON where it parses, else text; nothing else changes."""
    given = ("kv_cache_dtype=fp8", "enforce_eager=true", 'compilation_config={"level": 0}')
    usual, more = engine_of().llm.options, engine_of(vllm=given).llm.options
    expected = {"kv_cache_dtype": "fp8", "enforce_eager": True, "compilation_config": {"level": 0}}
    assert more == usual | expected


def test_further_options_that_vllm_refuses_are_one_line(fake_vllm, monkeypatch):
    """In vLLM's words, and so is what its memory forbids; what else goes wrong without further
    options is a mistake of ours, with its traceback."""
    error = ValueError("1 validation error for CacheConfig\ncache_dtype\n  Input should be ...")

    def refuse(self: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(FakeLLM, "__init__", refuse)
    with pytest.raises(BadInput, match="--vllm kv_cache_dtype=x: vLLM refuses that .1 valid"):
        engine_of(vllm=("kv_cache_dtype=x",))
    error = ValueError("No available memory for the cache blocks.\nTry a larger share")
    with pytest.raises(BadInput, match="not start: another --vllm_memory, .* .No available memory"):
        engine_of()
    error = RuntimeError("a mistake of ours")
    with pytest.raises(RuntimeError):
        engine_of()


def test_further_options_come_from_the_command_line(monkeypatch):
    words = "--vllm enforce_eager=true kv_cache_dtype=fp8 --rollout vllm"
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
    args = parse(grpo.Args)
    assert args.vllm == ("enforce_eager=true", "kv_cache_dtype=fp8") and args.rollout == "vllm"


def test_further_options_are_part_of_the_run(tmp_path, capsys):
    """Saved in config.json; a resumed run has to have the same."""
    flags = [*SMALL, "--run_dir", tmp_path / "run", "--steps"]
    same, other = ["--vllm", "enforce_eager=true", "a=1"], ["--vllm", "a=1"]
    assert run_here(grpo.main, *flags, 2, *same) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["vllm"] == same[1:]
    assert run_here(grpo.main, *flags, 3, "--resume", *other) == 2
    assert "has vllm ['enforce_eager=true', 'a=1'], not ['a=1']" in capsys.readouterr().err
    assert run_here(grpo.main, *flags, 3, "--resume", *same) == 0


def test_ranks_that_share_an_engine_get_their_own_answers(fake_vllm, monkeypatch):
    """Of four ranks, two to an engine, this is the last: it asks for all of its engine's prompts
    and keeps the answers to its own."""
    groups: list[list[int]] = []

    def new_group(ranks: list[int], timeout: object, backend: str) -> list[int]:
        groups.append(ranks)
        return ranks

    def gather(asked: list, own: list, group: list[int]) -> None:
        mate = [([9, 9, 9], []), ([8], []), ([7], [])]  # the other rank has three prompts
        asked[:] = [mate, own]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_world_size", len)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.index(3))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    lm, _ = load_model("tiny")
    args = grpo.Args(rollout="vllm", dtype="bfloat16", tensor_parallel=2)
    engine = VLLMEngine(args, lm, World(3, 4, torch.device("cuda", 3)))
    assert groups == [[0, 1], [2, 3]] and engine.group == [2, 3]
    assert engine.llm.options["tensor_parallel_size"] == 2
    assert engine.llm.options["max_num_seqs"] == 16 * 8 // 2  # of the two ranks
    engine.world = World(3, 4, torch.device("cpu"))
    rollout = engine.generate([[5, 6], [4]], 2, 8, 1.0, [[3], []])
    assert [r["prompt_token_ids"] for r in engine.llm.requests][-2:] == [[5, 6, 3], [4]]
    assert len(engine.llm.requests) == 5 and len(rollout) == 4
    assert rollout.prompt_len.tolist() == [3, 3, 1, 1]
    # Each answer begins with the last token of its prompt.
    assert rollout.tokens[:, 0].tolist() == [3, 3, 4, 4]


def test_pushed_weights_have_the_engines_precision(fake_vllm, tiny):
    engine = engine_of()
    engine.sync(Policy(tiny[0]))
    pushed = engine.llm.pushed
    assert pushed and all(tensor.dtype == torch.bfloat16 for tensor in pushed.values())
    whole = dict(full_parameters(Policy(tiny[0])))
    assert all(torch.equal(pushed[name], whole[name].bfloat16()) for name in pushed)


@pytest.mark.parametrize(
    ("dtype", "asked"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float8", None)]
)
def test_the_hf_engine_is_pushed_its_own_precision(world, tiny, monkeypatch, dtype, asked):
    """Half the bytes where it computes in bfloat16, and the same numbers; float8 rounds the
    trainer's own."""
    seen, real = [], full_parameters
    monkeypatch.setattr(
        "common.rollout.full_parameters",
        lambda policy, cast: seen.append(cast) or real(policy, cast),
    )
    engine, policy = HFEngine(tiny[0], world, 0, dtype, 8), Policy(copy.deepcopy(tiny[0]))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    engine.sync(policy)
    assert seen == [asked]
    matrix, norm = (dict(engine.lm.named_parameters())[n] for n in NAMES)
    true = dict(policy.lm.named_parameters())
    if dtype != "float8":
        assert torch.equal(matrix, true[NAMES[0]].to(asked))
    assert torch.equal(norm, true[NAMES[1]].to(norm.dtype))


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
    assert rollout.sampler_experts.dtype == torch.uint8


def test_more_than_256_experts_take_two_bytes(fake_vllm, monkeypatch):
    monkeypatch.setattr(FakeLLM, "experts", np.uint16)
    engine = engine_of(minirl.Args, "tiny-moe", routing_replay="r3", rollout_dtype="auto")
    assert engine.generate([[5, 6]], 2, 8, 1.0).sampler_experts.dtype == torch.int16


class Pushed:
    """What a rank gathers in a push: bytes of each whole tensor, and how many are alive at most."""

    def __init__(self, gather: Callable):
        self.gather, self.bytes, self.alive, self.most = gather, 0, 0, 0

    def __call__(self, tensor: DTensor) -> torch.Tensor:
        whole = self.gather(tensor)
        self.bytes += whole.nbytes
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(whole.untyped_storage(), self.free)
        return whole

    def free(self) -> None:
        self.alive -= 1


def push(folder: Path) -> None:
    """On each of two ranks: all parameters, as the engine asks for them."""
    world = setup()
    lm, _ = load_model("tiny-moe")
    args = grpo.Args(dtype="bfloat16", shard_ranks=2)
    policy = shard(Policy(lm), args, world)
    pushed = Pushed(DTensor.full_tensor)
    DTensor.full_tensor = lambda tensor: pushed(tensor)
    names = [name for name, _ in checkpoint_parameters(policy, torch.bfloat16)]
    found = {"bytes": pushed.bytes, "most": pushed.most, "names": len(names)}
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_a_push_gathers_each_weight_once_in_two_bytes(tmp_path):
    """Cast before it is gathered; while one tensor is handed over, the next may be alive, and
    gloo's thread may hold one or two a moment longer. Never all 24 of them."""
    ended = forked(push, tmp_path, ranks=2)
    assert ended.returncode == 0, ended.stderr
    lm, _ = load_model("tiny-moe")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["bytes"] == 2 * sum(parameter.numel() for parameter in lm.parameters())
        assert 2 <= found["most"] <= 4 and found["names"] > len([*lm.named_parameters()])


def test_no_module_draws_from_torchs_global_generator():
    """vLLM seeds it when it starts, and a resumed run would not get back what it drew."""
    draws = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal"}
    draws |= {"rand_like", "randn_like", "randint_like", "manual_seed", "seed", "dropout"}
    draws |= {f"{name}_" for name in ("normal", "uniform", "bernoulli", "exponential", "random")}
    for path in (*algorithms(), *(ROOT / "common").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                own = any(word.arg == "generator" for word in call.keywords)
                owner = ast.unparse(call.func.value)
                theirs = owner.startswith("torch.Generator") or "rng" in owner or own
                assert call.func.attr not in draws or theirs, f"{path}:{call.lineno}"


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
    monkeypatch.setattr("common.plumbing.launch.os._exit", lambda code: sys.exit(10 + code))
    assert run_here(fail, "--steps", 1) == 11
    assert "ValueError: a mistake of ours\n" in capsys.readouterr().err


def test_the_suite_does_not_see_gpus():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
