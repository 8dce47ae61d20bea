"""Sampling responses: the `Rollout` batch, the engines `hf` and `vllm`, micro-batches, the sampler
check.

An engine is a policy frozen at the last `sync`:
    generate(prompts, n, limit, temperature, prefixes, top_p) -> Rollout
    sync(policy)                       take over the trainer's weights; every rank calls it together
    state_dict() / load_state_dict()   its random state, for bit-exact resume
Token ids cross between sampler and trainer, never text: decoding and encoding again may give other
tokens.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from common.distributed import CLOSING, BadInput, RunStopped, World, full_parameters, global_sum
from common.model import EMBEDDED, Routing, why_not_replayed

# Float8 leaves them as they are: a rounded one chooses other experts
ROUTERS = ("gate.weight", "router.weight")
# What a forward and backward pass costs whatever its size, in tokens (embedded model: 150 to 300)
PASS_TOKENS = 256


class Rollout:
    """N = P·G sampled responses; row i answers prompt i // G. Every attribute is a tensor with N
    rows.

    sequences `[N, S]`      prompt, prefix and response, right-padded
    prompt_len `[N]`        tokens before the sampled response (prefix included)
    prefix_len `[N]`        how many of those belong to a given response prefix (0 unless the caller gave one)
    tokens `[N, T]`         the sampled tokens, right-padded
    mask `[N, T]`           1.0 on sampled tokens, the EOS that ended them included; 0.0 on padding
    rollout_logp `[N, T]`   log μ(token) at the sampling temperature, as the sampler reports it
    finished `[N]`          False where the length limit cut the response
    sampler_experts `[N, S, layers, k]`, of a mixture of experts: where the sampler sent each token of `sequences`
    The trainer attaches its own columns (old_logp, advantages, ...); `rows` selects from all of them. With a column
    `replayed_experts`, like `sampler_experts`, its forward passes use that routing (`response_logprobs`).
    """

    def __init__(self, **columns: Tensor):
        vars(self).update(columns)

    @property
    def ends(self) -> Tensor:
        """`[N]`: tokens in each row of `sequences`."""
        return self.prompt_len + self.mask.sum(1).long()

    @classmethod
    def pack(
        cls,
        *,
        prompts: list[list[int]],
        tokens: list[list[int]],
        logps: list[list[float]],
        eos: list[int],
        device: object,
        prefixes: list[list[int]] | None = None,
        experts: list[Tensor] | None = None,
    ) -> Rollout:
        """The columns, from lists: prompts and prefixes P of them, tokens, log-probs and experts
        one for each row."""
        n = len(tokens) // max(1, len(prompts))
        prompts = [prompt for prompt in prompts for _ in range(n)]  # P -> N
        prefixes = (
            [prefix for prefix in prefixes for _ in range(n)] if prefixes else [[]] * len(tokens)
        )

        def padded(rows: list, dtype: torch.dtype) -> Tensor:
            rows = [torch.as_tensor(row, dtype=dtype) for row in rows] or [
                torch.zeros(0, dtype=dtype)
            ]
            return pad_sequence(rows, batch_first=True)[: len(tokens)].to(device)

        routed = {"sampler_experts": padded(experts, torch.int16)} if experts else {}
        whole = {"dtype": torch.long, "device": device}
        return cls(
            sequences=padded([a + b + c for a, b, c in zip(prompts, prefixes, tokens)], torch.long),
            prompt_len=torch.tensor([len(a) + len(b) for a, b in zip(prompts, prefixes)], **whole),
            prefix_len=torch.tensor([len(prefix) for prefix in prefixes], **whole),
            tokens=padded(tokens, torch.long),
            mask=padded([[1.0] * len(row) for row in tokens], torch.float32),
            rollout_logp=padded(logps, torch.float32),
            finished=torch.tensor(
                [bool(row) and row[-1] in eos for row in tokens], dtype=torch.bool, device=device
            ),
            **routed,
        )

    def rows(self, index: Tensor | slice) -> Rollout:
        """The sub-batch of these rows."""
        return Rollout(**{name: column[index] for name, column in vars(self).items()})

    @classmethod
    def join(cls, *parts: Rollout) -> Rollout:
        """The rows of several batches as one batch, padded to the longest."""

        def joined(columns: list[Tensor]) -> Tensor:
            flat = columns[0].dim() == 1
            return (
                torch.cat(columns)
                if flat
                else pad_sequence([r for c in columns for r in c], batch_first=True)
            )

        parts = [part for part in parts if len(part)]  # without rows a batch may lack columns
        return cls(
            **{name: joined([getattr(part, name) for part in parts]) for name in vars(parts[0])}
        )

    def to(self, device: object) -> Rollout:
        """The same batch on that device."""
        return Rollout(**{name: column.to(device) for name, column in vars(self).items()})

    def __len__(self) -> int:
        return len(self.tokens)

    def response_ids(self) -> list[list[int]]:
        """Per row the whole response: given prefix and sampled tokens."""
        starts = self.prompt_len - self.prefix_len  # [N]
        return [
            row[a:b]
            for row, a, b in zip(self.sequences.tolist(), starts.tolist(), self.ends.tolist())
        ]


class HFEngine:
    """Samples with the transformers model in this process, from an own copy of the weights (whole,
    not sharded).

    Faster than `model.generate`: a prompt is read once for its whole group, and finished rows leave
    the batch.
    """

    def __init__(self, lm: PreTrainedModel, world: World, seed: int, dtype: str, max_rows: int):
        """`dtype` float32, bfloat16, or float8: the decoder layers' matrices rounded to e4m3,
        computing in bfloat16."""
        self.float8, precision = (
            dtype == "float8",
            torch.float32 if dtype == "float32" else torch.bfloat16,
        )
        self.lm = copy.deepcopy(lm).to(world.device).eval().requires_grad_(False)
        # Not .to(dtype): rotary frequencies must stay float32, as the trainer's
        for parameter in self.lm.parameters():
            parameter.data = parameter.data.to(precision)
        self.device, self.max_rows, self.routing = world.device, max_rows, Routing(self.lm)
        self.reports_experts = self.routing.active
        self.eos = torch.tensor(lm.generation_config.eos_token_id, device=world.device)
        # Ranks must draw different samples for their different prompts, and the same ones when the
        # run is repeated.
        self.generator = torch.Generator(world.device).manual_seed(seed * 100_003 + world.rank)

    def sync(self, policy: torch.nn.Module) -> None:
        """Copy the trainer's weights into the sampler's, one whole tensor at a time."""
        own = dict(self.lm.named_parameters())
        for name, full in full_parameters(policy):
            rounded = (
                self.float8
                and full.dim() >= 2
                and ".layers." in name
                and not name.endswith(ROUTERS)
            )
            own[name].copy_(float8(full) if rounded else full)

    def state_dict(self) -> dict:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["generator"])

    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        limit: int,
        temperature: float,
        prefixes: list[list[int]] | None = None,
        top_p: float = 1.0,
    ) -> Rollout:
        """Sample `n` responses of at most `limit` tokens to each prompt; temperature 0 is greedy.

        With `prefixes[p]` the response to prompt p goes on from these tokens, which count towards
        the limit. `top_p` is for evaluation: in training it stays 1, or log μ would belong to
        another distribution.
        """
        prefixes = prefixes or [[] for _ in prompts]
        # Tokens, log-probs, experts: a list per row
        group, sampled = max(1, self.max_rows // n), ([], [], [])
        for chunk in (slice(start, start + group) for start in range(0, len(prompts), group)):
            more = self._sample(prompts[chunk], prefixes[chunk], n, limit, temperature, top_p)
            for rows, new in zip(sampled, more):
                rows.extend(new)
        tokens, logps, experts = sampled
        how = {
            "prompts": prompts,
            "prefixes": prefixes,
            "eos": self.eos.tolist(),
            "device": self.device,
        }
        return Rollout.pack(tokens=tokens, logps=logps, experts=experts, **how)

    @torch.inference_mode()
    def _sample(
        self, prompts: list, prefixes: list, n: int, limit: int, temperature: float, top_p: float
    ) -> tuple[list, list, list]:
        """Sampled tokens, log-probs and experts (if any) of each of the len(prompts)·n rows,
        decoded together."""
        contexts = [prompt + prefix for prompt, prefix in zip(prompts, prefixes)]
        width, rows, on = max(map(len, contexts)), len(contexts) * n, {"device": self.device}
        # Left padding ends all contexts in the same column, so that one column a step extends every
        # row.
        padded = torch.tensor([[0] * (width - len(c)) + c for c in contexts], **on)  # [P, width]
        length = torch.tensor([len(c) for c in contexts], **on)  # [P]
        attention = (torch.arange(width, **on) >= width - length[:, None]).long()  # [P, width]
        position = (attention.cumsum(1) - 1).clamp(min=0)  # [P, width]
        cache = DynamicCache(config=self.lm.config)
        step = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        logits = self.lm(padded, attention_mask=attention, position_ids=position, **step).logits[
            :, -1
        ]  # [P, V]
        if not logits.isfinite().all():
            raise RunStopped(
                "the model's logits are NaN or infinite: a learning rate far too high, or damaged weights in --model"
            )
        routed = torch.zeros(0)
        # The prompt's part moves from left- to right-padded
        if self.routing.active:  # [N, width + limit, layers, k]
            seen = self.routing.recorded().unflatten(0, padded.shape)  # [P, width, layers, k]
            routed = seen.new_zeros(len(contexts), width + limit, *seen.shape[2:])
            routed[:, :width][attention.flip(1).bool()] = seen[attention.bool()]
            routed = routed.repeat_interleave(n, 0)
        # Each prompt was read once; now it branches into n rows.
        cache.batch_repeat_interleave(n)
        logits, attention = (
            logits.repeat_interleave(n, 0),
            attention.repeat_interleave(n, 0),
        )  # [N, V], [N, width]
        position = length.repeat_interleave(n)[:, None]  # [N, 1]
        budget = (limit - torch.tensor([len(p) for p in prefixes], **on)).repeat_interleave(
            n
        )  # [N]
        tokens = torch.zeros(rows, limit, dtype=torch.long, **on)  # [N, limit]
        logp = torch.zeros(rows, limit, **on)  # [N, limit]
        count = torch.zeros(rows, dtype=torch.long, **on)  # [N]
        alive = torch.arange(rows, **on)  # rows still being decoded
        for t in range(limit):
            distribution = torch.log_softmax(
                logits.float() / (temperature or 1.0), dim=-1
            )  # [alive, V]
            if top_p < 1:  # keep the likeliest tokens that together reach top_p
                likeliest, order = distribution.exp().sort(
                    dim=-1, descending=True
                )  # [alive, V], [alive, V]
                beyond = likeliest.cumsum(-1) - likeliest >= top_p  # [alive, V]
                distribution = distribution.masked_fill(
                    beyond.gather(-1, order.argsort(-1)), float("-inf")
                )
            if temperature > 0:
                token = torch.multinomial(
                    distribution.exp(), 1, generator=self.generator
                )  # [alive, 1]
            else:
                token = distribution.argmax(-1, keepdim=True)  # [alive, 1]
            tokens[alive, t], count[alive] = token[:, 0], t + 1
            logp[alive, t] = distribution.gather(-1, token)[:, 0]
            going = (~torch.isin(token[:, 0], self.eos) & (t + 1 < budget[alive])).nonzero()[:, 0]
            if len(going) == 0:
                break
            # Finished rows leave the batch: the few long ones go on without them
            if len(going) < len(alive):
                cache.batch_select_indices(going)
                alive, token, attention, position = (
                    alive[going],
                    token[going],
                    attention[going],
                    position[going],
                )
            attention = torch.cat([attention, attention.new_ones(len(alive), 1)], dim=1)
            logits = self.lm(token, attention_mask=attention, position_ids=position, **step).logits[
                :, -1
            ]  # [alive, V]
            if self.routing.active:
                routed[alive, position[:, 0]] = self.routing.recorded()
            position = position + 1
        ends, last = count.tolist(), (length.repeat_interleave(n) + count).tolist()
        kept = ([row[:end] for row, end in zip(column.tolist(), ends)] for column in (tokens, logp))
        return *kept, [row[:end] for row, end in zip(routed.cpu(), last)]


def float8(weight: Tensor) -> Tensor:
    """Each row rounded to 8-bit floats (e4m3, largest number 448) at a scale of its own, as FP8
    inference does."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


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


def make_engine(args: object, lm: PreTrainedModel, world: World) -> HFEngine | VLLMEngine:
    """The engine that `--rollout` names, holding an own copy of `lm`'s weights."""
    if args.rollout == "vllm" or (args.rollout == "auto" and world.device.type == "cuda"):
        return VLLMEngine(args, lm, world)
    dtype = args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype
    return HFEngine(lm, world, args.seed, dtype, args.rollout_rows)


def micro_batches(batch: Rollout, max_tokens: int, world: World) -> list[Tensor]:
    """Row indices of micro-batches of at most `max_tokens` padded tokens, rows of similar length
    together.

    The division that costs least, by dynamic programming: a pass costs its padded tokens and
    PASS_TOKENS more. Every rank gets the same number of them, since FSDP's forward and backward
    passes are collective; some may be empty.
    """
    lengths = batch.ends.tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # For the `end` shortest rows: least cost, and where the last of their micro-batches starts
    least = [(0, 0)]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        fit = max(1, min(end, max_tokens // longest))  # rows of this length in one micro-batch
        least.append(
            min((least[i][0] + PASS_TOKENS + (end - i) * longest, i) for i in range(end - fit, end))
        )
    micros, end = [], len(order)
    while end:  # the longest rows come first: too little memory shows early
        micros.append(order[least[end][1] : end])
        end = least[end][1]
    micros = micros or [[]]
    wanted = int(global_sum({"micros_max": len(micros)}, world)["micros_max"])
    while len(micros) < wanted:
        largest = micros.pop(max(range(len(micros)), key=lambda i: len(micros[i])))
        micros += [largest[::2], largest[1::2]]
    return [torch.tensor(rows, dtype=torch.long, device=batch.tokens.device) for rows in micros]


def response_logprobs(
    policy: torch.nn.Module, batch: Rollout, temperature: float
) -> tuple[Tensor, Tensor]:
    """log π(token) and entropy of every sampled token under `policy`: two `[n, T]`, zero on
    padding."""
    blank, where = torch.zeros_like(batch.mask), batch.mask.bool()  # [n, T]
    # Other ranks have rows left and wait for this one's part of FSDP's collectives
    if len(batch) == 0:
        pair = torch.zeros(1, 2, dtype=torch.long, device=blank.device)
        policy.routing.replay = None
        logp, entropy = policy(
            pair, torch.tensor([[True, False]], device=blank.device), temperature
        )
        return blank.masked_scatter(where, logp), blank
    sequences = batch.sequences[:, : batch.ends.max()]  # [n, S]
    column = torch.arange(sequences.shape[1], device=sequences.device)  # [S]
    predicts = (column >= batch.prompt_len[:, None] - 1) & (
        column < batch.ends[:, None] - 1
    )  # [n, S]
    replayed = getattr(batch, "replayed_experts", None)  # [n, S, layers, k]
    policy.routing.replay = (
        None if replayed is None else replayed[:, : sequences.shape[1]].flatten(0, 1)
    )
    logp, entropy = policy(sequences, predicts, temperature)  # [M], [M]
    return blank.masked_scatter(where, logp), blank.masked_scatter(where, entropy)


@torch.no_grad()
def all_logprobs(
    policy: torch.nn.Module, batch: Rollout, args: object, world: World
) -> tuple[Tensor, Tensor]:
    """`response_logprobs` of a whole batch without gradient, in micro-batches: two `[N, T]`.

    With a mixture of experts the batch gets a column `trainer_experts`, like the sampler's.
    """
    logp, entropy = torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)  # [N, T]
    routed = []  # of each micro-batch
    micros = micro_batches(batch, args.micro_tokens, world)
    for rows in micros:
        logp[rows], entropy[rows] = response_logprobs(policy, batch.rows(rows), args.temperature)
        if policy.routing.active:
            recorded = policy.routing.recorded()  # [n·S, layers, k]
            routed.append(
                recorded.unflatten(0, (len(rows), -1)) if len(rows) else recorded[None, :0]
            )
    if routed:
        batch.trainer_experts = routed[0].new_zeros(
            *batch.sequences.shape, *routed[0].shape[2:]
        )  # [N, S, layers, k]
        for rows, part in zip(micros, routed):  # [n, S, layers, k]
            batch.trainer_experts[rows, : part.shape[1]] = part
    return logp, entropy


def check_sampler(batch: Rollout, args: object, world: World) -> dict[str, float]:
    """Compare the sampler's log-probs with the trainer's on the sampled tokens: the same weights
    must give the same.

    Returns KL(μ ‖ π_old) by the k3 estimator and the mean |log π_old - log μ|; raises when the
    latter is beyond the tolerance, since every ratio of the run would then be wrong without a word.
    """
    precision = {args.dtype, args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype}
    tolerance = args.sampler_tolerance or (
        0.1 if "float8" in precision else 0.05 if "bfloat16" in precision else 1e-3
    )
    gap = (batch.old_logp - batch.rollout_logp) * batch.mask  # [N, T]
    # Expm1, or rounding would drown the gaps of 1e-6 that are usual here
    k3 = gap.expm1() - gap  # [N, T]
    sums = global_sum({"kl": k3.sum(), "gap": gap.abs().sum(), "tokens": batch.mask.sum()}, world)
    mean = sums["gap"] / sums["tokens"]
    if not mean <= tolerance:
        raise RunStopped(
            f"sampler and trainer disagree: mean |log π_old - log μ| is {mean:.2g}, tolerance {tolerance:.2g}. Usual "
            "causes: weights not synced after the last update, a temperature or top-p that only one side applies, "
            "token ids re-encoded from text, a lower precision on one side (then raise --sampler_tolerance)."
        )
    return {"sampler_kl": sums["kl"] / sums["tokens"], "sampler_gap": mean}
