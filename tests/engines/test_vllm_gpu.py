"""Every set of options that a GPU's run gives to vLLM, through vLLM's own validation, on a machine
without one: it is made to believe in an H100. Skipped where the package is missing.

This proves the configuration, not the kernels. `python -m tests.engines.test_vllm_gpu` prints
what vLLM makes of each set, a line of JSON each: in a process of its own, as it replaces vLLM's
platform.
"""

import importlib.util
import itertools
import json
import sys
import types

import minirl
import pytest
import torch
from common.distributed import World
from common.model import load_model
from common.vllm import vllm_options

from tests.helpers import started

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
MORE = ("kv_cache_dtype=fp8", "enforce_eager=true", "max_num_batched_tokens=4096")
# What the kernels' modules and operations would be.
MODULES = "_C_stable_libtorch _C _moe_C _moe_C_stable_libtorch cumem_allocator "
MODULES += "vllm_flash_attn._vllm_fa2_C"
KERNELS = "scaled_mm_supports_block_fp8 scaled_mm_supports_fp8 scaled_mm_supports_fp4"
KERNELS += " group_gemm_supported"


def cases() -> list[dict]:
    """dtype x sleep x ranks of an engine (x r3) as flags, and one with further options."""
    found = []
    for dtype, sleep, ranks in itertools.product(DTYPES, (False, True), (1, 2)):
        flags = {"rollout_dtype": dtype, "vllm_sleep": sleep, "tensor_parallel": ranks}
        found += [{"model": "tiny", **flags}, {"model": "tiny-moe", **flags}]
        found += [{"model": "tiny-moe", "routing_replay": "r3", **flags}]
    return [*found, {"model": "tiny", "rollout_dtype": "bfloat16", "vllm": MORE}]


def pretend() -> None:
    """Make vLLM believe in an H100 with Triton."""
    for name in MODULES.split():
        sys.modules[f"vllm.{name}"] = types.ModuleType(name)
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)
        device_count = classmethod(lambda cls: 8)
        is_cumem_allocator_available = classmethod(lambda cls: True)
        import_kernels = log_warnings = classmethod(lambda cls: None)

    torch.cuda.get_device_capability = lambda device: (9, 0)
    platforms._current_platform = H100()  # before other modules ask which it is
    import vllm.config.vllm as config

    config.HAS_TRITON = True
    library = H100.kernels = torch.library.Library("_C", "FRAGMENT")  # kept: they go with it
    for kernel in KERNELS.split():
        library.define(f"cutlass_{kernel}(int capability) -> bool")
        library.impl(f"cutlass_{kernel}", lambda capability: True, "CompositeExplicitAutograd")


def main() -> None:
    """Print what vLLM makes of each case."""
    pretend()
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    models = {name: load_model(name)[0] for name in ("tiny", "tiny-moe")}
    for flags in cases():
        args = minirl.Args(rollout="vllm", dtype="bfloat16", prompts_per_step=8, **flags)
        world = World(0, args.tensor_parallel, torch.device("cuda", 0))
        options = vllm_options(args, models[args.model], world, args.routing_replay == "r3")
        config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
        model, scheduler = config.model_config, config.scheduler_config
        found = {
            "runner": 2 if config.use_v2_model_runner else 1,
            "async": scheduler.async_scheduling,
            "experts": config.aux_output_config.enable_return_routed_experts,
            "rows": scheduler.max_num_seqs,
            "dtype": str(model.dtype),
            "head": str(model.head_dtype),
            "quantization": model.quantization,
            "logprobs": model.logprobs_mode,
            "sleep": model.enable_sleep_mode,
            "ranks": config.parallel_config.world_size,
        }
        print("FOUND", json.dumps([flags, found]))


@pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="needs vLLM (CONTRIBUTING.md#tests)"
)
def test_vllm_accepts_every_set_of_options():
    """And makes of it what is expected. Its second model runner is what the CPU never runs: with
    the first one recorded experts, for one, would not exist."""
    run = started("-m", "tests.engines.test_vllm_gpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    lines = [line[6:] for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(cases()), run.stderr[-3000:]
    for flags, config in map(json.loads, lines):
        r3 = "routing_replay" in flags and flags["tensor_parallel"] == 1
        assert config == {
            "runner": 2,
            "async": not r3,
            "experts": r3,
            "rows": 8 * 8,  # of all ranks that share the engine: prompts x group
            "dtype": str(DTYPES[flags["rollout_dtype"]]),
            "head": "torch.float32",
            "quantization": "fp8_per_channel" if flags["rollout_dtype"] == "float8" else None,
            "logprobs": "processed_logprobs",
            "sleep": flags.get("vllm_sleep", False),
            "ranks": flags.get("tensor_parallel", 1),
        }, flags


if __name__ == "__main__":
    main()
