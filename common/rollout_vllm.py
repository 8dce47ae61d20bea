"""Sampling with vLLM inside the trainer's process: every call to it is here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from common.batch import Rollout
from common.distributed import CLOSING, BadInput, RunStopped, World, full_parameters
from common.model import EMBEDDED
from common.routing import why_not_replayed


class VLLMEngine:
    """Samples with vLLM inside the trainer's process: an engine for each rank, or one for
    `--tensor_parallel` ranks.

    Every call to vLLM is in this class. Its weights are replaced in place after each update, so
    that CUDA graphs and the KV cache's memory stay; only the cached keys and values, which old
    weights made, are thrown away.
    """

    def __init__(self, args: object, lm: PreTrainedModel, world: World):
        cpu = world.device.type == "cpu"
        dtype = args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype
        if cpu and (dtype == "float8" or args.vllm_sleep):
            raise BadInput("--rollout vllm: --rollout_dtype float8 and --vllm_sleep need a GPU")
        if world.size % args.tensor_parallel:
            raise BadInput(
                f"--tensor_parallel {args.tensor_parallel}: does not divide the {world.size} ranks"
            )
        # In this process, where weights are handed over without a copy. On a CPU: do not pin all
        # ranks to one core.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if cpu else {}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            import vllm
        except ImportError as error:
            raise BadInput(
                "--rollout vllm: needs the package (pip install -r requirements.txt), or use --rollout hf"
            ) from error
        self.SamplingParams, self.world, self.cpu, self.calls = vllm.SamplingParams, world, cpu, 0
        self.eos, self.sleeps = lm.generation_config.eos_token_id, args.vllm_sleep
        # Else vLLM does not
        self.reports_experts = not why_not_replayed(lm) and not cpu and args.tensor_parallel == 1
        # Neighbouring ranks share an engine, as vLLM groups them; a rank's seed differs from those
        # of other engines.
        self.seed = args.seed * 100_003 + world.rank // args.tensor_parallel
        groups = torch.arange(world.size).view(-1, args.tensor_parallel).tolist()
        self.group = [dist.new_group(ranks, backend="gloo") for ranks in groups][
            world.rank // args.tensor_parallel
        ]
        options = {"gpu_memory_utilization": args.vllm_memory, "enable_sleep_mode": args.vllm_sleep}
        # For --routing_replay r3; a batch scheduled ahead would outlive the cache's reset
        if self.reports_experts:
            options |= {"enable_return_routed_experts": True, "async_scheduling": False}
        # Not the router; and Triton's experts, as others leave CUDA graphs stale after a push
        if dtype == "float8":
            options |= {"quantization": "fp8_per_channel", "moe_backend": "triton"}
            options |= {"quantization_config": {"ignore": [r"re:.*\.mlp\.gate$"]}}
        if cpu:
            from vllm import _custom_ops

            # By default linear weights are packed at load, and a later push misses what is tied to
            # them (the head).
            assert hasattr(_custom_ops, "_supports_onednn"), (
                "this vLLM packs its CPU weights in another way"
            )
            _custom_ops._supports_onednn = False
            options = {"kv_cache_memory_bytes": 2**28, "enforce_eager": True}
        longest = args.max_prompt_tokens + args.max_new_tokens
        self.llm = vllm.LLM(
            str(EMBEDDED.get(args.model, args.model)),
            skip_tokenizer_init=True,  # token ids in, token ids out
            dtype="bfloat16" if dtype == "float8" else dtype,
            distributed_executor_backend="external_launcher",  # these ranks are the workers
            tensor_parallel_size=args.tensor_parallel,
            seed=self.seed % 2**32,
            max_model_len=min(longest, lm.config.max_position_embeddings),
            # Of softmax(logits / temperature); the default is before temperature
            logprobs_mode="processed_logprobs",
            use_tqdm_on_load=False,
            # No top-p, top-k or penalty out of the model's own generation config
            generation_config="vllm",
            **options,
        )
        # VLLM keeps to it, so we must
        self.stream = None if cpu else torch.cuda.current_stream(world.device)
        CLOSING.append(self.llm.llm_engine.engine_core.shutdown)
        if self.sleeps:
            self.llm.sleep(level=1)

    @contextlib.contextmanager
    def _awake(self, *parts: str) -> Iterator[None]:
        """Work on the engine's own stream, after what the caller has under way.

        With --vllm_sleep weights are on the CPU and the KV cache is given up but for these moments;
        `parts` wakes only those named.
        """
        if self.sleeps:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=list(parts) or None)
        if self.stream:
            caller = torch.cuda.current_stream(self.world.device)
            self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield
        if self.stream:
            caller.wait_stream(self.stream)
        if self.sleeps:
            self.llm.sleep(level=1)

    def sync(self, policy: torch.nn.Module) -> None:
        """Push the trainer's weights into the engine, one whole tensor at a time."""
        with self._awake("weights"):
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": checkpoint_parameters(policy)}
            )
            if self.cpu:
                self.llm.apply_model(repack_experts)
            if not self.llm.reset_prefix_cache():
                raise RunStopped(
                    "vLLM did not drop its prefix cache: keys and values of old weights would be used"
                )

    def state_dict(self) -> dict:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]

    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        limit: int,
        temperature: float,
        prefixes: list[list[int]] | None = None,
        top_p: float = 1.0,
    ) -> Rollout:
        """As `HFEngine.generate`. Ranks that share an engine call it together, each with its own
        prompts."""
        prefixes = prefixes or [[] for _ in prompts]
        # By rank of the group: its prompts and prefixes
        asked = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(asked, list(zip(prompts, prefixes)), group=self.group)
        common = {
            "n": n,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": 0,
            "logprobs": 0,
            "flat_logprobs": True,
        }
        common |= {"stop_token_ids": self.eos, "detokenize": False}
        requests = [
            {"prompt_token_ids": prompt + prefix} for part in asked for prompt, prefix in part
        ]
        budgets = [limit - len(prefix) for part in asked for _, prefix in part]
        # a seed for each request (its n responses take the next ones): a resumed run draws the same
        self.calls += 1
        first_seed = (self.seed * 1_000_003 + self.calls) * 1_000_003
        seeds = range(first_seed, first_seed + n * len(requests), n)
        sampling = [
            self.SamplingParams(max_tokens=b, seed=s % 2**62, **common)
            for b, s in zip(budgets, seeds)
        ]
        with self._awake():
            answers = self.llm.generate(requests, sampling, use_tqdm=False) if requests else []
        first = sum(len(part) for part in asked[: dist.get_rank(self.group)])
        outputs = [
            out for answer in answers[first : first + len(prompts)] for out in answer.outputs
        ]
        tokens = [list(out.token_ids) for out in outputs]
        experts = (
            [torch.as_tensor(out.routed_experts) for out in outputs] if self.reports_experts else []
        )
        for row, seen in enumerate(experts):  # the last token is never fed back: its place stays 0
            whole = len(prompts[row // n]) + len(prefixes[row // n]) + len(tokens[row])
            experts[row] = torch.cat([seen, seen.new_zeros(whole - len(seen), *seen.shape[1:])])
        logps = [out.logprobs.logprobs for out in outputs]  # logprobs=0: of the sampled token alone
        how = {
            "prompts": prompts,
            "prefixes": prefixes,
            "eos": self.eos,
            "device": self.world.device,
        }
        return Rollout.pack(tokens=tokens, logps=logps, experts=experts, **how)


def checkpoint_parameters(policy: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`full_parameters` by the names of published checkpoints, which have each expert's matrices on
    their own."""
    for name, full in full_parameters(policy):
        if name.endswith(".experts.gate_up_proj"):  # [experts, 2·I, H]
            for i, (gate, up) in enumerate(expert.chunk(2) for expert in full):
                yield name.replace("gate_up_proj", f"{i}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{i}.up_proj.weight"), up
        elif name.endswith(".experts.down_proj"):  # [experts, H, I]
            for i, down in enumerate(full):
                yield name.replace("down_proj", f"{i}.down_proj.weight"), down
        else:
            yield name, full


def repack_experts(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs experts' weights when it first loads them, and leaves pushed ones
    unpacked: wrong outputs."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
