"""Sampling responses: the `Rollout` batch, the engine contract and its `hf` engine, micro-batches, the sampler check.

An engine is a policy frozen at the last `sync`:
    generate(prompts, n, limit, temperature, prefixes) -> Rollout
    sync(policy)                       take over the trainer's weights; every rank calls it together
    state_dict() / load_state_dict()   its random state, for bit-exact resume
Token ids cross between sampler and trainer, never text: decoding and encoding again may give other tokens.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from common.data import Task
from common.distributed import BadInput, RunStopped, World, full_parameters, global_sum
from common.model import Routing


class Rollout:
    """N = P·G sampled responses; row i answers prompt i // G. Every attribute is a tensor with N rows.

    sequences `[N, S]`      prompt, prefix and response, right-padded
    prompt_len `[N]`        tokens before the sampled response (prefix included)
    prefix_len `[N]`        how many of those belong to a given response prefix (0 unless the caller gave one)
    tokens `[N, T]`         the sampled tokens, right-padded
    mask `[N, T]`           1.0 on sampled tokens, the EOS that ended them included; 0.0 on padding
    rollout_logp `[N, T]`   log μ(token) at the sampling temperature, as the sampler reports it
    finished `[N]`          False where the length limit cut the response
    sampler_experts `[N, S, layers, k]`, of a mixture of experts: where the sampler sent each token of `sequences`
    The trainer attaches its own columns (old_logp, advantages, ...); `rows` selects from all of them.
    """

    def __init__(self, **columns: Tensor):
        vars(self).update(columns)

    @classmethod
    def pack(
        cls, prompts: list, prefixes: list, tokens: list, logps: list, experts: list, eos: list[int], device: object
    ) -> Rollout:
        """The columns, from one list per row: prompt, response prefix, sampled tokens, log-probs, chosen experts."""

        def padded(rows: list, dtype: torch.dtype) -> Tensor:
            return pad_sequence([torch.as_tensor(row, dtype=dtype) for row in rows], batch_first=True).to(device)

        routed = {"sampler_experts": padded(experts, torch.uint8)} if experts else {}
        ended = [[token] for token in eos]
        return cls(
            sequences=padded([a + b + c for a, b, c in zip(prompts, prefixes, tokens)], torch.long),
            prompt_len=torch.tensor([len(a) + len(b) for a, b in zip(prompts, prefixes)], device=device),
            prefix_len=torch.tensor([len(prefix) for prefix in prefixes], device=device),
            tokens=padded(tokens, torch.long),
            mask=padded([[1.0] * len(row) for row in tokens], torch.float32),
            rollout_logp=padded(logps, torch.float32),
            finished=torch.tensor([row[-1:] in ended for row in tokens], device=device),
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
            return torch.cat(columns) if flat else pad_sequence([r for c in columns for r in c], batch_first=True)

        return cls(**{name: joined([getattr(part, name) for part in parts]) for name in vars(parts[0])})

    def __len__(self) -> int:
        return len(self.tokens)

    def response_ids(self) -> list[list[int]]:
        """Per row the whole response: given prefix and sampled tokens."""
        ends = self.prompt_len + self.mask.sum(1).long()  # [N]
        starts = self.prompt_len - self.prefix_len  # [N]
        return [row[a:b] for row, a, b in zip(self.sequences.tolist(), starts.tolist(), ends.tolist())]


class HFEngine:
    """Samples with the transformers model in this process, from an own copy of the weights (whole, not sharded).

    About twice as fast as `model.generate` on the embedded model: a prompt is read once for its whole group, and
    finished rows leave the batch.
    """

    def __init__(self, lm: PreTrainedModel, world: World, seed: int, dtype: str, max_rows: int):
        """`dtype` float32, bfloat16, or float8: the decoder layers' matrices rounded to e4m3, computing in bfloat16."""
        self.float8, precision = dtype == "float8", torch.float32 if dtype == "float32" else torch.bfloat16
        self.lm = copy.deepcopy(lm).to(world.device).eval().requires_grad_(False)
        for parameter in self.lm.parameters():  # not .to(dtype): rotary frequencies must stay float32, as the trainer's
            parameter.data = parameter.data.to(precision)
        self.device, self.max_rows, self.routing = world.device, max_rows, Routing(self.lm)
        self.eos = torch.tensor(lm.generation_config.eos_token_id, device=world.device)
        # Ranks must draw different samples for their different prompts, and the same ones when the run is repeated.
        self.generator = torch.Generator(world.device).manual_seed(seed * 100_003 + world.rank)

    def sync(self, policy: torch.nn.Module) -> None:
        """Copy the trainer's weights into the sampler's, one whole tensor at a time."""
        own = dict(self.lm.named_parameters())
        for name, full in full_parameters(policy):
            rounded = self.float8 and full.dim() >= 2 and ".layers." in name and not name.endswith("gate.weight")
            own[name].copy_(float8(full) if rounded else full)

    def state_dict(self) -> dict:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["generator"])

    def generate(
        self, prompts: list[list[int]], n: int, limit: int, temperature: float, prefixes: list[list[int]] | None = None
    ) -> Rollout:
        """Sample `n` responses of at most `limit` tokens to each prompt; temperature 0 is greedy.

        Full vocabulary: no top-p, no top-k, or log μ would belong to another distribution. With `prefixes[p]` the
        response to prompt p goes on from these tokens, which count towards the limit.
        """
        prefixes = prefixes or [[] for _ in prompts]
        group, sampled = max(1, self.max_rows // n), ([], [], [])  # tokens, log-probs, experts: a list per row
        for chunk in (slice(start, start + group) for start in range(0, len(prompts), group)):
            for rows, more in zip(sampled, self._sample(prompts[chunk], prefixes[chunk], n, limit, temperature)):
                rows.extend(more)
        prompts, prefixes = ([row for row in rows for _ in range(n)] for rows in (prompts, prefixes))  # P -> N rows
        return Rollout.pack(prompts, prefixes, *sampled, self.eos.tolist(), self.device)

    @torch.no_grad()
    def _sample(self, prompts: list, prefixes: list, n: int, limit: int, temperature: float) -> tuple[list, list, list]:
        """Sampled tokens, log-probs and experts (if any) of each of the len(prompts)·n rows, decoded together."""
        contexts = [prompt + prefix for prompt, prefix in zip(prompts, prefixes)]
        width, rows, on = max(map(len, contexts)), len(contexts) * n, {"device": self.device}
        # Left padding ends all contexts in the same column, so that one column a step extends every row.
        padded = torch.tensor([[0] * (width - len(c)) + c for c in contexts], **on)  # [P, width]
        length = torch.tensor([len(c) for c in contexts], **on)  # [P]
        attention = (torch.arange(width, **on) >= width - length[:, None]).long()  # [P, width]
        position = (attention.cumsum(1) - 1).clamp(min=0)  # [P, width]
        cache = DynamicCache(config=self.lm.config)
        step = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        logits = self.lm(padded, attention_mask=attention, position_ids=position, **step).logits[:, -1]  # [P, V]
        routed = torch.zeros(0)
        if self.routing.last:  # [N, width + limit, layers, k]; the prompt's part moves from left- to right-padded
            seen = self.routing.recorded().unflatten(0, padded.shape)  # [P, width, layers, k]
            routed = seen.new_zeros(len(contexts), width + limit, *seen.shape[2:])
            routed[:, :width][attention.flip(1).bool()] = seen[attention.bool()]
            routed = routed.repeat_interleave(n, 0)
        # Each prompt was read once; now it branches into n rows.
        cache.batch_repeat_interleave(n)
        logits, attention = logits.repeat_interleave(n, 0), attention.repeat_interleave(n, 0)  # [N, V], [N, width]
        position = length.repeat_interleave(n)[:, None]  # [N, 1]
        budget = (limit - torch.tensor([len(p) for p in prefixes], **on)).repeat_interleave(n)  # [N]
        tokens = torch.zeros(rows, limit, dtype=torch.long, **on)  # [N, limit]
        logp = torch.zeros(rows, limit, **on)  # [N, limit]
        count = torch.zeros(rows, dtype=torch.long, **on)  # [N]
        alive = torch.arange(rows, **on)  # rows still being decoded
        for t in range(limit):
            distribution = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)  # [alive, V]
            if temperature > 0:
                token = torch.multinomial(distribution.exp(), 1, generator=self.generator)  # [alive, 1]
            else:
                token = distribution.argmax(-1, keepdim=True)  # [alive, 1]
            tokens[alive, t], count[alive] = token[:, 0], t + 1
            logp[alive, t] = distribution.gather(-1, token)[:, 0]
            going = (~torch.isin(token[:, 0], self.eos) & (t + 1 < budget[alive])).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < len(alive):  # finished rows leave the batch: the few long ones go on without them
                cache.batch_select_indices(going)
                alive, token, attention, position = alive[going], token[going], attention[going], position[going]
            attention = torch.cat([attention, attention.new_ones(len(alive), 1)], dim=1)
            logits = self.lm(token, attention_mask=attention, position_ids=position, **step).logits[:, -1]  # [alive, V]
            if self.routing.last:
                routed[alive, position[:, 0]] = self.routing.recorded()
            position = position + 1
        ends, last = count.tolist(), (length.repeat_interleave(n) + count).tolist()
        kept = ([row[:end] for row, end in zip(column.tolist(), ends)] for column in (tokens, logp))
        return *kept, [row[:end] for row, end in zip(routed.cpu(), last)]


def float8(weight: Tensor) -> Tensor:
    """Each row rounded to 8-bit floats (e4m3, largest number 448) at a scale of its own, as FP8 inference does."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


ENGINES = {"hf": HFEngine}


def make_engine(args: object, lm: PreTrainedModel, world: World) -> HFEngine:
    """The engine that `--rollout` names, holding an own copy of `lm`'s weights."""
    name = "hf" if args.rollout == "auto" else args.rollout
    if name not in ENGINES:
        raise BadInput(f"--rollout {args.rollout}: unknown engine, use one of auto, {', '.join(ENGINES)}")
    dtype = args.dtype if args.rollout_dtype == "auto" else args.rollout_dtype
    return ENGINES[name](lm, world, args.seed, dtype, args.rollout_rows)


def micro_batches(batch: Rollout, max_tokens: int, world: World) -> list[Tensor]:
    """Row indices of micro-batches of at most `max_tokens` padded tokens, rows of similar length together.

    Every rank gets the same number of them, since FSDP's forward and backward passes are collective.
    """
    lengths = (batch.prompt_len + batch.mask.sum(1).long()).tolist()
    micros: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):  # the row added last is the longest
        if micros[-1] and (len(micros[-1]) + 1) * lengths[row] > max_tokens:
            micros.append([])
        micros[-1].append(row)
    wanted = int(global_sum({"micros_max": len(micros)}, world)["micros_max"])
    while len(micros) < wanted:
        largest = micros.pop(max(range(len(micros)), key=lambda i: len(micros[i])))
        micros += [largest[::2], largest[1::2]]
    return [torch.tensor(rows, device=batch.tokens.device) for rows in micros]


def response_logprobs(policy: torch.nn.Module, batch: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """log π(token) and entropy of every sampled token under `policy`: two `[n, T]`, zero on padding."""
    end = batch.prompt_len + batch.mask.sum(1).long()  # [n]
    sequences = batch.sequences[:, : int(end.max())]  # [n, S]
    column = torch.arange(sequences.shape[1], device=sequences.device)  # [S]
    predicts = (column >= batch.prompt_len[:, None] - 1) & (column < end[:, None] - 1)  # [n, S]
    replayed = getattr(batch, "experts", None)  # [n, S, layers, k] if the caller wants a recorded routing
    policy.routing.replay = None if replayed is None else replayed[:, : sequences.shape[1]].flatten(0, 1)
    logp, entropy = policy(sequences, predicts, temperature)  # [M], [M]
    blank, where = torch.zeros_like(batch.mask), batch.mask.bool()  # [n, T]
    return blank.masked_scatter(where, logp), blank.masked_scatter(where, entropy)


@torch.no_grad()
def all_logprobs(policy: torch.nn.Module, batch: Rollout, args: object, world: World) -> tuple[Tensor, Tensor]:
    """`response_logprobs` of a whole batch without gradient, in micro-batches: two `[N, T]`.

    With a mixture of experts the batch gets a column `trainer_experts`, like the sampler's.
    """
    logp, entropy = torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)  # [N, T]
    if policy.routing.last:
        batch.trainer_experts = torch.zeros_like(batch.sampler_experts)  # [N, S, layers, k]
    for rows in micro_batches(batch, args.micro_tokens, world):
        micro = batch.rows(rows)
        logp[rows], entropy[rows] = response_logprobs(policy, micro, args.temperature)
        if policy.routing.last:
            routed = policy.routing.recorded().unflatten(0, (len(rows), -1))  # [n, S, layers, k]
            batch.trainer_experts[rows, : routed.shape[1]] = routed
    return logp, entropy


def check_sampler(batch: Rollout, args: object, world: World) -> dict[str, float]:
    """Compare the sampler's log-probs with the trainer's on the sampled tokens: the same weights must give the same.

    Returns KL(μ ‖ π_old) by the k3 estimator and the mean |log π_old - log μ|; raises when the latter is beyond
    the tolerance, since every ratio of the run would then be wrong without a word.
    """
    exact = args.dtype == "float32" and args.rollout_dtype in ("auto", "float32")
    tolerance = args.sampler_tolerance or (1e-3 if exact else 0.05)
    gap = (batch.old_logp - batch.rollout_logp) * batch.mask  # [N, T]
    k3 = gap.expm1() - gap  # [N, T]: expm1, or rounding would drown the gaps of 1e-6 that are usual here
    sums = global_sum({"kl": k3.sum(), "gap": gap.abs().sum(), "tokens": batch.mask.sum()}, world)
    mean = sums["gap"] / sums["tokens"]
    if not mean <= tolerance:
        raise RunStopped(
            f"sampler and trainer disagree: mean |log π_old - log μ| is {mean:.2g}, tolerance {tolerance:.2g}. Usual "
            "causes: weights not synced after the last update, a temperature or top-p that only one side applies, "
            "token ids re-encoded from text, a lower precision on one side (then raise --sampler_tolerance)."
        )
    return {"sampler_kl": sums["kl"] / sums["tokens"], "sampler_gap": mean}


def evaluate(
    engine: HFEngine, task: Task, tokenizer: PreTrainedTokenizerBase, args: object, world: World
) -> dict[str, float]:
    """Accuracy on the held-out problems: `greedy` (one response) and `sampled` (mean of --eval_samples responses)."""
    problems, state, right = task.held_out[world.rank :: world.size], engine.state_dict(), {}
    for name, n, temperature in (("greedy", 1, 0.0), ("sampled", args.eval_samples, args.temperature)):
        right[name] = 0.0
        if problems:  # a rank may have none: AIME has 30
            rollout = engine.generate([p.prompt_ids for p in problems], n, args.max_new_tokens, temperature)
            texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
            right[name] = sum(task.judge(texts, [p.answer for p in problems for _ in range(n)])) / n
    engine.load_state_dict(state)  # training's samples do not depend on how often one looks
    return {name: total / len(task.held_out) for name, total in global_sum(right, world).items()}
