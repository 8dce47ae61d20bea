"""Sampling with vLLM inside the trainer's process. No other module calls vLLM."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from common.batch import Rollout
from common.cli import BadInput, Flags, RunStopped, blame, in_one_line, key_values, say
from common.clock import timed
from common.distributed import TIMEOUT, World, from_all, full_parameters
from common.model_files import EMBEDDED
from common.scale.routing import why_not_replayed


class VLLMEngine:
    """A sampler that runs vLLM, with an engine for each rank or for `--tensor_parallel` ranks.

    After each update its weights are replaced in place, so that CUDA graphs and the KV cache's
    memory stay. Only the cached keys and values are dropped, because old weights made them.
    """

    def __init__(
        self, args: Flags, lm: PreTrainedModel, world: World, record_experts: bool = False
    ):
        # Run the engine in this process, so that weights need not be copied to another one.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with blame("--rollout vllm: pip install -r requirements.txt, or use --rollout hf"):
            from vllm import LLM, SamplingParams
        ranks = args.tensor_parallel
        options = vllm_options(args, lm, world, record_experts)
        self.SamplingParams = SamplingParams
        self.world = world
        self.calls = 0
        self.eos = lm.generation_config.eos_token_id
        self.sleeps = args.vllm_sleep
        self.reports_experts = "enable_return_routed_experts" in options
        # Neighbouring ranks share an engine, as vLLM groups them. Each engine has its own seed.
        self.seed = options["seed"]
        self.dtype = options["dtype"]
        sharing = torch.arange(world.size).view(-1, ranks).tolist()  # ranks by engine
        groups = [dist.new_group(group, TIMEOUT, backend="gloo") for group in sharing]
        self.group = groups[world.rank // ranks]
        if world.rank == 0:
            say("vLLM starts; the first time this takes one to three minutes")
        try:
            self.llm = LLM(**options)
        except (TypeError, ValueError, AssertionError) as error:  # for example too little memory
            why = "another --vllm_memory, a lower --max_new_tokens, or other --vllm options"
            raise BadInput(f"vLLM does not start: {why} ({in_one_line(error)})") from error
        world.closing.callback(self._close)
        self.awake = {"weights", "kv_cache"}
        self._sleep()

    def _close(self) -> None:
        """Wake the engine and shut it down. Asleep, it would print many CUDA errors."""
        with contextlib.suppress(Exception):  # without memory to wake it, it prints them
            self._wake("weights", "kv_cache")
        self.llm.llm_engine.engine_core.shutdown()

    def _sleep(self) -> None:
        """With --vllm_sleep, move the weights to the CPU and free the KV cache."""
        if self.sleeps and self.awake:
            self.llm.sleep(level=1)
            self.awake = set()

    def _wake(self, *parts: str) -> None:
        """With --vllm_sleep, bring back the parts that are needed next."""
        asleep = sorted(set(parts) - self.awake)
        if asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=asleep)
            self.awake.update(asleep)

    @timed("sync")
    def sync(self, policy: torch.nn.Module) -> None:
        """Push the trainer's weights into the engine, one whole tensor at a time. The engine's
        weights stay on the GPU, because sampling or a checkpoint follows."""
        weights = {"weights_iterator": checkpoint_tensors(policy, self.dtype)}
        self._wake("weights")
        self.llm.apply_model(forget)
        try:
            self.llm.collective_rpc("reload_weights", kwargs=weights)
            (names,) = self.llm.apply_model(forgotten)
            missed = from_all(names, self.group)  # by rank
            # A weight may be missing on one rank, whose share of the vocabulary may be padding.
            everywhere = set.intersection(*missed)
            if everywhere:
                raise ValueError(f"{min(everywhere)} did not arrive, or is NaN")
        except (AttributeError, KeyError, ValueError, AssertionError) as error:  # vLLM's loaders
            why = f"vLLM does not take over the trainer's weights ({in_one_line(error)})"
            raise RunStopped(f"{why}: use --rollout hf") from error
        if not self.llm.reset_prefix_cache():
            raise RunStopped("vLLM kept its prefix cache: keys and values of old weights")

    def state_dict(self) -> dict:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]

    @timed("rollout")
    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        limit: int,
        temperature: float,
        prefixes: list[list[int]] | None = None,
        top_p: float = 1.0,
    ) -> Rollout:
        """Sample; see `Engine`. Ranks that share an engine call it together, with their prompts."""
        prefixes = prefixes or [[] for _ in prompts]
        rank_pairs = from_all(list(zip(prompts, prefixes)), self.group)  # by rank
        pairs = [pair for part in rank_pairs for pair in part]
        # Each request has a seed, and its n responses take the next n, also in a resumed run.
        self.calls += 1
        seed = (self.seed * 1_000_003 + self.calls) * 1_000_003
        requests = []
        sampling = []
        for prompt, prefix in pairs:
            requests.append({"prompt_token_ids": prompt + prefix})
            params = self.SamplingParams(
                n=n,
                max_tokens=limit - len(prefix),
                seed=seed % 2**62,
                temperature=temperature,
                top_p=top_p,
                top_k=0,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                stop_token_ids=self.eos,
                detokenize=False,
            )
            sampling.append(params)
            seed += n
        self._wake("weights", "kv_cache")
        answers = self.llm.generate(requests, sampling, use_tqdm=False) if requests else []
        self._sleep()  # the trainer needs the memory now
        first = sum(len(part) for part in rank_pairs[: dist.get_rank(self.group)])
        mine = answers[first : first + len(prompts)]
        outputs = [output for answer in mine for output in answer.outputs]
        columns = {"tokens": [], "logps": [], "experts": []}  # of rows
        for row, output in enumerate(outputs):
            columns["tokens"].append(list(output.token_ids))
            columns["logps"].append(output.logprobs.logprobs)  # [tokens]
            if self.reports_experts:
                seen = torch.as_tensor(output.routed_experts)  # [tokens, layers, k]
                if seen.dtype == torch.uint16:  # few operations support this dtype
                    seen = seen.short()
                # The last token is never fed back, so its experts stay 0.
                length = len(prompts[row // n]) + len(prefixes[row // n]) + len(output.token_ids)
                unseen = seen.new_zeros(length - len(seen), *seen.shape[1:])
                columns["experts"].append(torch.cat([seen, unseen]))
        how = {"prefixes": prefixes, "eos": self.eos, "device": self.world.device}
        return Rollout.pack(prompts=prompts, **columns, **how)


def vllm_options(
    args: Flags, lm: PreTrainedModel, world: World, record_experts: bool = False
) -> dict:
    """Collect the options of `vllm.LLM` on this rank; options in `--vllm` override them."""
    ranks = args.tensor_parallel
    precision = args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype
    # Responses that all engines get together; a program that evaluates has no groups.
    rows = getattr(args, "prompts_per_step", 1024) * getattr(args, "group_size", 1)
    longest = args.max_prompt_tokens + args.max_new_tokens
    options = {
        "model": str(EMBEDDED.get(args.model, args.model)),
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "dtype": torch.float32 if precision == "float32" else torch.bfloat16,
        "distributed_executor_backend": "external_launcher",  # our ranks are vLLM's workers
        "tensor_parallel_size": ranks,
        # Not more rows than needed, because the KV cache would lose the memory reserved for them.
        "max_num_seqs": min(1024, rows * ranks // world.size),
        "seed": (args.seed * 100_003 + world.rank // ranks) % 2**32,
        "max_model_len": min(longest, lm.config.max_position_embeddings),
        "logprobs_mode": "processed_logprobs",  # after temperature; the default is before it
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # ignore top-p, top-k and penalties of the model's own file
    }
    gpu = world.device.type == "cuda"
    if precision == "float8":
        if not gpu or torch.cuda.get_device_capability(world.device) < (8, 9):
            needs = "needs a GPU of compute capability 8.9 (H100, L40, RTX 40) or newer"
            raise BadInput(f"--rollout_dtype float8: {needs}: use auto")
        # Other kernels for experts leave CUDA graphs stale after a push. Routers stay unrounded.
        options["quantization"] = "fp8_per_channel"
        options["moe_backend"] = "triton"
        options["quantization_config"] = {"ignore": [r"re:.*\.mlp\.gate$"]}
    if gpu:
        options["gpu_memory_utilization"] = args.vllm_memory
        options["enable_sleep_mode"] = args.vllm_sleep
        options["hf_overrides"] = {"head_dtype": "float32"}  # as in the trainer: see head_product
        if ranks > 1:  # it shares addresses, which expandable segments (common/__init__) lack
            options["disable_custom_all_reduce"] = True
        # Only on request, because it slows vLLM: experts are copied at every step, and no batch may
        # be scheduled ahead, as it would outlive the reset of the cache.
        if record_experts and not why_not_replayed(lm) and ranks == 1:
            options["enable_return_routed_experts"] = True
            options["async_scheduling"] = False
    return options | key_values("--vllm", args.vllm)


def checkpoint_tensors(policy: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield `full_parameters` with the names and shapes of published checkpoints, for vLLM.

    transformers stacks a layer's experts, for example, and undoes this when it saves a model.
    """
    for name, full in full_parameters(policy, dtype):
        yield from revert_weight_conversion(policy.lm, {name: full}).items()


def forget(model: torch.nn.Module) -> None:
    """Fill vLLM's weights with NaN, so that `forgotten` finds those that a push did not reach: vLLM
    warns after correct pushes, too. A float8 matrix is found by its float32 scale."""
    for weight in model.parameters():
        if weight.element_size() > 1:
            weight.data.fill_(torch.nan)


def forgotten(model: torch.nn.Module) -> set[str]:
    """List the names of vLLM's weights that hold a NaN."""
    wide = [pair for pair in model.named_parameters() if pair[1].element_size() > 1]
    return {name for name, weight in wide if weight.isnan().any()}
