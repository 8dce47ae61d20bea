"""Sampling responses: the transformers engine, and the choice of one.

An engine is a policy frozen at the last `sync`:
    generate(prompts, n, limit, temperature, prefixes, top_p) -> Rollout
    sync(policy)                       take over the trainer's weights; every rank calls it together
    state_dict() / load_state_dict()   its random state, for bit-exact resume
Token ids cross between sampler and trainer, never text: decoding and encoding again may give other
tokens.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from common.batch import Rollout
from common.distributed import RunStopped, World, full_parameters
from common.routing import Routing

# Float8 leaves them as they are: a rounded one chooses other experts
ROUTERS = ("gate.weight", "router.weight")


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


def make_engine(args: object, lm: PreTrainedModel, world: World) -> object:
    """The engine that `--rollout` names, holding an own copy of `lm`'s weights."""
    if args.rollout == "vllm" or (args.rollout == "auto" and world.device.type == "cuda"):
        from common.rollout_vllm import VLLMEngine

        return VLLMEngine(args, lm, world)
    dtype = args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype
    return HFEngine(lm, world, args.seed, dtype, args.rollout_rows)
