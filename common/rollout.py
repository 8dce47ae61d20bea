"""Sampling responses: what an engine must do, the transformers engine, and `make_engine`.

Sampler and trainer exchange token ids, never text: encoding a text again may give other ids.
"""

import copy
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers import PreTrainedModel as Model
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention

from common.batch import Rollout
from common.cli import Flags, RunStopped
from common.clock import timed
from common.distributed import LAYER, World, broadcast_module, full_parameters
from common.scale.head import head_product
from common.scale.routing import Routing

# Float8 leaves routers as they are, because a rounded router would choose other experts.
ROUTERS = ("gate.weight", "router.weight")


class Engine(Protocol):
    """A sampler, whose policy stays as it was at the last `sync`."""

    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        limit: int,
        temperature: float,
        prefixes: list[list[int]] | None = None,
        top_p: float = 1.0,
    ) -> Rollout:
        """Sample `n` responses of at most `limit` tokens to each prompt. Temperature 0 is greedy.

        The responses to prompt p continue `prefixes[p]`, whose tokens count towards the limit.
        `top_p` is for evaluation. In training it must stay 1, because log μ would belong to another
        distribution.
        """

    def sync(self, policy: torch.nn.Module) -> None:
        """Copy the trainer's weights, one whole tensor at a time. All ranks must call it."""

    def state_dict(self) -> dict:
        """Return the random state, for bit-exact resume."""

    def load_state_dict(self, state: dict) -> None: ...


class HFEngine:
    """A sampler that runs the transformers model in this process, with its own copy of the weights.

    It is faster than `model.generate`, because it reads a prompt only once for its whole group, and
    drops rows from the batch when they finish.
    """

    def __init__(
        self, lm: Model, world: World, seed: int, dtype: str, max_rows: int, experts: bool = False
    ):
        """`dtype` is float32, bfloat16, or float8: e4m3 matrices that compute in bfloat16. Report
        `experts`, if the model has any."""
        if not torch.cuda.is_available():
            # With a mask, transformers copies keys and values for every query head, which CPU
            # kernels do not need. (This changes it for the whole process.)
            sdpa_attention.use_gqa_in_sdpa = lambda *_: True
        precision = torch.float32 if dtype == "float32" else torch.bfloat16
        self.float8 = dtype == "float8"
        # `sync` casts weights to this dtype. None, because float8 rounds the float32 weights.
        self.sync_dtype = None if self.float8 else precision
        self.lm = broadcast_module(copy.deepcopy(lm), world).eval().requires_grad_(False)
        self.device = world.device
        self.max_rows = max_rows
        self.routing = Routing(self.lm)
        self.reports_experts = experts and self.routing.active
        self.eos = torch.tensor(lm.generation_config.eos_token_id, device=world.device)
        # Each rank has its own seed. A run with the same seed draws the same samples.
        self.rank = world.rank
        self.generator = torch.Generator(world.device).manual_seed(seed * 100_003 + world.rank)
        for parameter in self.lm.parameters():  # not lm.to(): rotary frequencies must stay float32
            parameter.data = parameter.data.to(precision)

    @timed("sync")
    def sync(self, policy: torch.nn.Module) -> None:
        weights = self.lm.state_dict()
        for name, full in full_parameters(policy, self.sync_dtype):
            matrix = full.dim() >= 2 and LAYER.search(name) and not name.endswith(ROUTERS)
            weights[name].copy_(float8(full) if self.float8 and matrix else full)

    def state_dict(self) -> dict:
        return {"generator": self.generator.get_state(), "rank": self.rank}

    def load_state_dict(self, state: dict) -> None:
        if state["rank"] == self.rank:  # a rank that saved no state keeps its fresh seed
            self.generator.set_state(state["generator"])

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
        prefixes = prefixes or [[] for _ in prompts]
        columns = {"tokens": [], "logps": [], "experts": []}  # of rows
        at_once = max(1, self.max_rows // n)  # prompts
        for start in range(0, len(prompts), at_once):
            chunk = slice(start, start + at_once)
            sampled = self._sample(prompts[chunk], prefixes[chunk], n, limit, temperature, top_p)
            for name, rows in sampled.items():
                columns[name] += rows
        how = {"prefixes": prefixes, "eos": self.eos.tolist(), "device": self.device}
        return Rollout.pack(prompts=prompts, **columns, **how)

    def _prefill(self, contexts: list[list[int]], n: int, limit: int) -> tuple:
        """Read each context once, and make n rows of it, N in all. Returns the logits `[N, V]`
        of the next tokens, the attention mask `[N, width]`, the contexts' lengths `[N]`, the cache,
        and the experts so far, with room for `limit` more tokens."""
        width = max(map(len, contexts))
        on = {"device": self.device}
        # With left padding all contexts end in the same column, so one column extends every row.
        padded = torch.tensor([[0] * (width - len(c)) + c for c in contexts], **on)  # [P, width]
        length = torch.tensor([len(c) for c in contexts], **on)  # [P]
        attention = (torch.arange(width, **on) >= width - length[:, None]).long()  # [P, width]
        position = (attention.cumsum(1) - 1).clamp(min=0)  # [P, width]
        cache = DynamicCache(config=self.lm.config)
        logits = self._logits(padded, attention, position, cache)  # [P, V]
        if not logits.isfinite().all():
            why = "a learning rate far too high, or damaged weights in --model"
            raise RunStopped(f"the model's logits are NaN or infinite: {why}")
        routed = torch.zeros(0)
        if self.reports_experts:
            # Move the prompt's part from left to right padding. A response's last token is never
            # fed back, so its experts stay 0.
            seen = self.routing.recorded().unflatten(0, padded.shape)  # [P, width, layers, k]
            routed = seen.new_zeros(len(contexts), width + limit, *seen.shape[2:])
            routed[:, :width][attention.flip(1).bool()] = seen[attention.bool()]
            routed = routed.repeat_interleave(n, 0)  # [N, width + limit, layers, k]
        cache.reorder_cache(torch.arange(len(contexts), **on).repeat_interleave(n))
        logits = logits.repeat_interleave(n, 0)  # [N, V]
        attention = attention.repeat_interleave(n, 0)  # [N, width]
        length = length.repeat_interleave(n)  # [N]
        return logits, attention, length, cache, routed

    @torch.inference_mode()
    def _sample(
        self, prompts: list, prefixes: list, n: int, limit: int, temperature: float, top_p: float
    ) -> dict[str, list]:
        """Decode N = len(prompts)·n rows together. Returns lists of N rows: tokens, log-probs, and
        experts if they are reported."""
        contexts = [prompt + prefix for prompt, prefix in zip(prompts, prefixes)]
        logits, attention, length, cache, routed = self._prefill(contexts, n, limit)
        rows, on = len(logits), {"device": self.device}
        # Without sliding windows, sdpa takes a boolean mask.
        boolean = all(type(layer) is DynamicLayer for layer in cache.layers)
        position = length[:, None]  # [N, 1]
        prefix_lengths = torch.tensor([len(p) for p in prefixes], **on)  # [P]
        budget = limit - prefix_lengths.repeat_interleave(n)  # [N]
        tokens = torch.zeros(rows, limit, dtype=torch.long, **on)  # [N, limit]
        logp = torch.zeros(rows, limit, **on)  # [N, limit]
        count = torch.zeros(rows, dtype=torch.long, **on)  # [N]
        alive = torch.arange(rows, **on)  # rows still being decoded
        for t in range(limit):
            token, logprobs = self._choose(logits, temperature, top_p)  # [alive, 1], [alive, V]
            tokens[alive, t] = token[:, 0]
            logp[alive, t] = logprobs.gather(-1, token)[:, 0]
            count[alive] = t + 1
            ended = torch.isin(token[:, 0], self.eos)  # [alive]
            too_long = t + 1 >= budget[alive]  # [alive]
            going = (~ended & ~too_long).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < len(alive):  # finished rows leave, and the few long ones go on alone
                cache.reorder_cache(going)
                alive, token = alive[going], token[going]
                attention, position = attention[going], position[going]
            attention = torch.cat([attention, attention.new_ones(len(alive), 1)], dim=1)
            # In the kernel's shape; from [alive, columns] transformers would make this mask again.
            mask = attention
            if boolean:
                mask = attention.bool()[:, None, None]  # [alive, 1, 1, columns]
            logits = self._logits(token, mask, position, cache)  # [alive, V]
            if self.reports_experts:
                routed[alive, position[:, 0]] = self.routing.recorded()
            position = position + 1
        ends = count.tolist()
        return {
            "tokens": cut(tokens.tolist(), ends),
            "logps": cut(logp.tolist(), ends),
            "experts": cut(routed.cpu(), (length + count).tolist()),
        }

    def _logits(
        self, tokens: Tensor, attention: Tensor, position: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Put the keys and values of `tokens` into the cache; return the last column's logits."""
        step = {"past_key_values": cache, "use_cache": True, "position_ids": position}
        output = self.lm.base_model(tokens, attention_mask=attention, **step)
        last = output.last_hidden_state[:, -1:]  # [rows, 1, H]
        return head_product(last, self.lm.lm_head.weight)[:, 0]  # [rows, V]

    def _choose(self, logits: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
        """Sample each row's next token; return it, `[rows, 1]`, and all log-probs, `[rows, V]`."""
        logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)  # [rows, V]
        if top_p < 1:  # keep the most likely tokens that together reach top_p
            probs, order = logp.exp().sort(dim=-1, descending=True)  # [rows, V], [rows, V]
            before = probs.cumsum(-1) - probs  # [rows, V]: the mass of more likely tokens
            beyond = before >= top_p  # [rows, V], in sorted order
            logp = logp.masked_fill(beyond.gather(-1, order.argsort(-1)), float("-inf"))
        if temperature > 0:
            token = torch.multinomial(logp.exp(), 1, generator=self.generator)  # [rows, 1]
        else:
            token = logp.argmax(-1, keepdim=True)  # [rows, 1]
        return token, logp


def cut(rows: list | Tensor, ends: list[int]) -> list:
    """Cut the padding off: row i ends at `ends[i]`."""
    return [row[:end] for row, end in zip(rows, ends)]


def float8(weight: Tensor) -> Tensor:
    """Round each row to 8-bit floats (e4m3, at most 448) at its own scale, as FP8 kernels do."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def make_engine(args: Flags, lm: Model, world: World, record_experts: bool = False) -> Engine:
    """Make the engine that `--rollout` names, with its own copy of the weights.

    With `record_experts`, its rollouts say which experts each token was sent to.
    """
    if args.rollout == "vllm":
        from common.scale.vllm import VLLMEngine

        return VLLMEngine(args, lm, world, record_experts)
    dtype = args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype
    return HFEngine(lm, world, args.seed, dtype, args.rollout_rows, record_experts)
