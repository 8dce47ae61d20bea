"""What vLLM's CPU build needs beyond `common.scale.vllm`, which is written for GPUs.

`use_cpu_build()` changes the engine of this process. A program runs with it by
`python -m tests.engines.cpu_vllm MODULE FLAGS`.
"""

import os
import runpy
import sys

from common.scale import vllm as engine
import torch


def use_cpu_build() -> None:
    """Add the CPU build's options to the engine's, and pack experts again after each push."""
    vllm_options, sync = engine.vllm_options, engine.VLLMEngine.sync

    def options_for_a_cpu(*arguments: object) -> dict:
        # The engine calls this between `import vllm` and the making of its LLM.
        push_reaches_all_weights()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or all ranks share one core
        options = vllm_options(*arguments)
        return options | {"kv_cache_memory_bytes": 2**28, "enforce_eager": True}

    def sync_and_repack(self: engine.VLLMEngine, policy: torch.nn.Module) -> None:
        sync(self, policy)
        self.llm.apply_model(repack_experts)

    engine.vllm_options = options_for_a_cpu
    engine.VLLMEngine.sync = sync_and_repack


def push_reaches_all_weights() -> None:
    """Let a push reach all weights. By default linear weights are packed at load, and a later push
    misses what is tied to them (the head)."""
    from vllm import _custom_ops as kernels

    assert hasattr(kernels, "_supports_onednn"), "vLLM packs its CPU weights in another way"
    kernels._supports_onednn = False


def repack_experts(model: torch.nn.Module) -> None:
    """Pack experts' weights again. On a CPU vLLM packs them only at the first load, but pushed
    weights need it, too."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


if __name__ == "__main__":
    use_cpu_build()
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
