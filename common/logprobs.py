"""The trainer's log-probabilities of the sampled tokens, in micro-batches.

They never need an `[N, T, V]` tensor. `sampler_gap` compares them with what the sampler reported.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.batch import Rollout
from common.cli import Flags
from common.clock import timed
from common.distributed import World, global_max, shard
from common.scale.head import Pair, Readout, TokenLogprobs
from common.scale.norms import tapped
from common.scale.routing import Routing, routers

# The fixed cost of a forward and backward pass, in tokens, of a dense model and of one with
# experts. It is measured on CPUs and estimated on GPUs, where FSDP gathers all weights twice in
# each pass, although only a few of the experts compute a token.
PASS_TOKENS = {"cpu": (256, 256), "cuda": (2048, 16384)}


def entropies(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Return the entropy (nats) of each row of log-probs, `[b, V]` -> `[b]`; the usual readout."""
    return -torch.linalg.vecdot(logprobs.exp(), logprobs)


class Policy(nn.Module):
    """A causal language model as a policy: token ids in, log π(token) and a statistic out.

    The `readout` computes the statistic from each token's distribution, usually its entropy.
    Without a readout the statistic is 0 and costs nothing. The output head runs inside this
    module's forward, because FSDP gathers its weight only there.
    """

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm, self.routing = lm, Routing(lm)
        self.compiled = False  # whether `shard` compiled the model, and so the head as well

    def forward(
        self,
        sequences: Tensor,
        predicts: Tensor,
        temperature: float,
        readout: Readout | None = None,
        replay: Tensor | None = None,
    ) -> Pair:
        """Return log π and statistic, both `[M]`, of the tokens after the M positions where
        `predicts [n, S]` is True.

        `sequences [n, S]` are right-padded. Causal attention then lets no real token see a pad, so
        no attention mask is needed. `replay [n·S, layers, k]` are the experts to send each token
        to.
        """
        self.routing.replay = replay  # gradient checkpointing repeats the pass, with it as well
        # Why nonzero()? With a mask as an index, the CPU would wait for the GPU each time.
        where = predicts.flatten().nonzero()[:, 0]  # [M]
        output = self.lm.base_model(input_ids=sequences, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, where)  # [M, H]
        targets = sequences.roll(-1, dims=1).flatten()[where]  # [M]
        weight = self.lm.lm_head.weight  # [V, H]
        return TokenLogprobs.apply(hidden, weight, targets, temperature, readout, self.compiled)


def frozen_reference(args: Flags, lm: PreTrainedModel, world: World) -> Policy | None:
    """Copy `lm` as it is now, frozen and sharded, as π_ref; None if β is 0.

    With `--offload_reference` its shards stay in CPU memory between passes.
    """
    if args.beta <= 0:
        return None
    reference = Policy(copy.deepcopy(lm))
    return shard(reference, args, world, args.offload_reference).requires_grad_(False).eval()


def micro_batches(policy: nn.Module, batch: Rollout, max_tokens: int, world: World) -> list[Tensor]:
    """Group rows of similar lengths into micro-batches of at most `max_tokens` tokens, padding
    included, and return their row indices. A longer row is a micro-batch of its own.

    Rows of 10, 10 and 90 tokens in one micro-batch would be padded to 270 tokens. All ranks get the
    same number of micro-batches, because FSDP's passes are collective; some may be empty.
    """
    lengths = batch.ends.tolist()
    dense, moe = PASS_TOKENS[world.device.type]
    pass_cost = moe if routers(policy.lm) else dense  # in tokens
    micros, tokens = [], 0  # tokens in the last micro-batch, without padding
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        # If this row joins the last micro-batch, it is the longest one, and all are padded to it.
        joined = len(micros[-1]) + 1 if micros else 1  # rows
        padded = joined * lengths[row]
        padding = padded - tokens - lengths[row]
        # It joins if the padded size fits and the padding costs less than another pass.
        if micros and padded <= max_tokens and padding <= pass_cost:
            micros[-1].append(row)
            tokens += lengths[row]
        else:
            micros.append([row])
            tokens = lengths[row]
    micros = micros[::-1] or [[]]  # the longest rows first, so that a lack of memory shows early
    most = int(global_max({"micros": len(micros)}, world)["micros"])  # of all ranks
    while len(micros) < most:
        largest = max(micros, key=len)
        micros.remove(largest)
        micros += [largest[::2], largest[1::2]]
    return [torch.tensor(rows, dtype=torch.long, device=batch.tokens.device) for rows in micros]


class Logprobs(NamedTuple):
    """A policy's results for every sampled token of a batch."""

    logp: Tensor  # [N, T]: log π(token), zero on padding
    statistic: Tensor  # [N, T]: the readout of its distribution; zero without a readout
    experts: Tensor | None  # [N, S, layers, k]: where each token was sent; None without `experts`


def response_logprobs(
    policy: Policy, batch: Rollout, temperature: float, readout: Readout | None = entropies
) -> Pair:
    """Return log π(token), with gradient, and the readout's statistic of every sampled token: two
    `[n, T]`, zero on padding."""
    blank, where = torch.zeros_like(batch.mask), batch.mask.bool()  # [n, T]
    replayed = None
    if len(batch) == 0:
        # Why a pass without rows? Other ranks have rows, and FSDP's collectives need all ranks. It
        # computes two tokens, of which nothing is used, and its gradients are zero.
        sequences = torch.zeros(1, 2, dtype=torch.long, device=blank.device)  # [1, 2]
        predicts = torch.tensor([[True, False]], device=blank.device)  # [1, 2]
    else:
        sequences = batch.sequences[:, : batch.ends.max()]  # [n, S]
        # Token t is in column prompt_len + t, and the column before it predicts it.
        t = torch.arange(sequences.shape[1], device=blank.device) + 1  # [S]
        t = t - batch.prompt_len[:, None]  # [n, S]: the token that each column predicts
        inside = (t >= 0) & (t < where.shape[1])  # [n, S]
        predicts = inside & where.gather(1, t.clamp(0, where.shape[1] - 1))  # [n, S]
        if hasattr(batch, "replayed_experts"):
            replayed = batch.replayed_experts[:, : sequences.shape[1]]  # [n, S, layers, k]
            replayed = replayed.flatten(0, 1).to(blank.device)  # [n·S, layers, k]
    logp, statistic = policy(sequences, predicts, temperature, readout, replayed)  # [M], [M]
    logp = blank.masked_scatter(where, logp)  # [n, T]
    statistic = blank.masked_scatter(where, statistic)  # [n, T]
    if logp.requires_grad:
        logp.retain_grad()  # ∂loss/∂logp is minus the token's weight, which samples.jsonl shows
    return logp, statistic


@timed("logprobs")
@torch.no_grad()
def all_logprobs(
    policy: Policy,
    batch: Rollout,
    args: Flags,
    world: World,
    readout: Readout | None = None,
    experts: bool = False,
) -> Logprobs:
    """Compute `response_logprobs` of a whole batch in micro-batches, without gradient. With
    `experts`, also return where a mixture of experts sent each token."""
    logp, statistic = torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)  # [N, T]
    sent = None
    for rows in micro_batches(policy, batch, args.micro_tokens, world):
        micro = batch.rows(rows)
        logp[rows], statistic[rows] = response_logprobs(policy, micro, args.temperature, readout)
        if experts and policy.routing.active:
            part = policy.routing.recorded().cpu()  # [n·S, layers, k] of this pass
            if sent is None:
                sent = part.new_zeros(*batch.sequences.shape, *part.shape[1:])  # [N, S, layers, k]
            if len(rows):
                part = part.unflatten(0, (len(rows), -1))  # [n, S, layers, k]
                sent[rows.cpu(), : part.shape[1]] = part
    return Logprobs(logp, statistic, sent)


def gradient_norms(
    policy: Policy, batch: Rollout, args: Flags, world: World
) -> tuple[Tensor, Tensor]:
    """Return log π of every sampled token `[N, T]` and |g| of every response `[N]` under `policy`,
    where g is the gradient of the response's Σ log π (common/scale/norms.py).

    All ranks must call it, each with any number of responses.
    """
    logp, norms = torch.zeros_like(batch.mask), batch.mask.new_zeros(len(batch))  # [N, T], [N]
    for rows in micro_batches(policy, batch, args.micro_tokens, world):
        micro = batch.rows(rows)
        with tapped(policy.lm, micro, args.temperature) as squares:
            of_micro, _ = response_logprobs(policy, micro, args.temperature, readout=None)  # [n, T]
            (squared,) = torch.autograd.grad(of_micro.sum(), squares)  # [n]; [1] without rows
        logp[rows] = of_micro.detach()
        norms[rows] = squared[: len(micro)].clamp(min=0).sqrt()
    return logp, norms


def sampler_gap(batches: list[Rollout]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Measure how far the sampler's log-probs are from the trainer's, from the same weights.

    Returns, as pairs (sum, tokens) of this rank, KL(μ ‖ π_old) by the k3 estimator, and the mean
    and the largest |log π_old - log μ|.
    """
    kl, total, tokens, largest = 0.0, 0.0, 0.0, torch.tensor(0.0)
    for batch in batches:
        gap = (batch.old_logp - batch.rollout_logp) * batch.mask  # [n, T]
        # Not exp(gap) - 1, in which a usual gap of 1e-6 would be lost to rounding.
        kl += (gap.expm1() - gap).sum()
        total += gap.abs().sum()
        if len(gap):  # a rank may have no rows
            largest = torch.maximum(largest.to(gap), gap.abs().max())
        tokens += batch.mask.sum()
    metrics = {"sampler_kl": (kl, tokens), "sampler_gap": (total, tokens)}
    return metrics | {"sampler_gap_max": (largest, "max")}
