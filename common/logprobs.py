"""Log-probabilities of the sampled tokens as the trainer computes them, in micro-batches.

No `[N, T, V]` tensor is ever held, and what the sampler reported is checked against them.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.batch import Rollout
from common.cli import Flags
from common.clock import timed
from common.distributed import World, global_sum, shard
from common.scale.head import Pair, Readout, TokenLogprobs, head_of
from common.scale.routing import Routing, routers

# The fixed cost of a forward and backward pass, in tokens: of a dense model, of one with experts.
# Measured on a CPU (150 to 300), estimated on a GPU: FSDP gathers all weights twice in each pass,
# and few of the experts compute a token.
PASS_TOKENS = {"cpu": (256, 256), "cuda": (2048, 16384)}


def entropies(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """The entropy (nats) of each row of log-probs `[b, V]`: `[b]`. The usual `Readout`."""
    return -torch.linalg.vecdot(logprobs.exp(), logprobs)


class Policy(nn.Module):
    """A causal language model as a policy: token ids in, log π(token) and a statistic out.

    The `readout` computes this statistic of each token's distribution. It is usually `entropies`.
    Without a readout the statistic is 0, and costs nothing. The output head runs inside this
    module's forward, where FSDP has gathered its weight.
    """

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm, self.routing = lm, Routing(lm)
        self.compiled = False  # the head too; see `shard`

    def forward(
        self,
        sequences: Tensor,
        predicts: Tensor,
        temperature: float,
        readout: Readout | None = None,
        replay: Tensor | None = None,
        others: Tensor | None = None,
    ) -> Pair:
        """log π and statistic, two `[M]`, of the token after each place in `predicts [n, S]`.

        `sequences [n, S]` are right-padded: with causal attention no real token sees a pad, and no
        attention mask is needed. `replay [n·S, layers, k]`: the experts to send each token to.
        `others [M, K]`: further tokens, whose log π at the same places are wanted, too; then log π
        is `[M, 1 + K]`.
        """
        self.routing.replay = replay  # also for the pass that gradient checkpointing repeats
        # nonzero() once: with a mask as index, the CPU would wait for the GPU each time.
        where = predicts.flatten().nonzero()[:, 0]  # [M]
        output = self.lm.base_model(input_ids=sequences, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, where)  # [M, H]
        targets = sequences.roll(-1, dims=1).flatten()[where]  # [M]
        if others is not None:
            targets = torch.cat([targets[:, None], others], dim=1)  # [M, 1 + K]
        weight = self.lm.lm_head.weight  # [V, H]
        asked = targets, head_of(self.lm, temperature), readout
        return TokenLogprobs.apply(hidden, weight, *asked, self.compiled)


def frozen_reference(args: Flags, lm: PreTrainedModel, world: World) -> Policy | None:
    """π_ref: `lm` as it is now, frozen and sharded; None if β is 0.

    With `--offload_reference` its shards wait in CPU memory.
    """
    if args.beta <= 0:
        return None
    reference = Policy(copy.deepcopy(lm))
    return shard(reference, args, world, args.offload_reference).requires_grad_(False).eval()


def micro_batches(policy: nn.Module, batch: Rollout, max_tokens: int, world: World) -> list[Tensor]:
    """Row indices of micro-batches of at most `max_tokens` padded tokens, of similar lengths. A
    longer row stands alone.

    Rows of 10, 10 and 90 tokens as one micro-batch would be padded to 270 tokens, of which 160 are
    padding. All ranks get the same number, because FSDP's passes are collective; some may be empty.
    """
    lengths = batch.ends.tolist()
    dense, moe = PASS_TOKENS[world.device.type]
    pass_cost = moe if routers(policy.lm) else dense  # in tokens
    micros, tokens = [], 0  # tokens: those of the last micro-batch, without padding
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        # If this row joins the last micro-batch, it is the longest there: all are padded to it.
        joined = len(micros[-1]) + 1 if micros else 1  # rows
        padded = joined * lengths[row]
        padding = padded - tokens - lengths[row]
        # It joins, unless there are too many tokens, or another pass costs less than the padding.
        if micros and padded <= max_tokens and padding <= pass_cost:
            micros[-1].append(row)
            tokens += lengths[row]
        else:
            micros.append([row])
            tokens = lengths[row]
    micros = micros[::-1] or [[]]  # the longest rows come first: too little memory shows early
    most = int(global_sum({"micros_max": len(micros)}, world)["micros_max"])  # of all ranks
    while len(micros) < most:
        largest = max(micros, key=len)
        micros.remove(largest)
        micros += [largest[::2], largest[1::2]]
    return [torch.tensor(rows, dtype=torch.long, device=batch.tokens.device) for rows in micros]


class Logprobs(NamedTuple):
    """What a policy makes of every sampled token of a batch."""

    logp: Tensor  # [N, T]: log π(token), zero on padding
    statistic: Tensor  # [N, T]: what the readout makes of the distribution; zero without one
    experts: Tensor | None  # [N, S, layers, k]: where each token was sent; None if not asked for


def response_logprobs(
    policy: Policy, batch: Rollout, temperature: float, readout: Readout | None = entropies
) -> Pair:
    """log π(token), with gradient, and a statistic of every sampled token: two `[n, T]`, zero on
    padding.

    Where the sampler reported its most likely tokens (`sampler_top_ids`), the batch gets a column
    `top_logp [n, T, K]`: log π of these, with gradient.
    """
    blank, where = torch.zeros_like(batch.mask), batch.mask.bool()  # [n, T]
    replayed, others = None, None
    if len(batch) == 0:
        # Other ranks have rows left, and FSDP's collectives need all ranks: a pass over two tokens,
        # of which nothing is used. Its gradients are zeros.
        sequences = torch.zeros(1, 2, dtype=torch.long, device=blank.device)  # [1, 2]
        predicts = torch.tensor([[True, False]], device=blank.device)  # [1, 2]
    else:
        sequences = batch.sequences[:, : batch.ends.max()]  # [n, S]
        # Token t stands in column prompt_len + t, and the column before that one predicts it
        t = torch.arange(sequences.shape[1], device=blank.device) + 1  # [S]
        t = t - batch.prompt_len[:, None]  # [n, S]: the token that each column predicts
        inside = (t >= 0) & (t < where.shape[1])  # [n, S]
        predicts = inside & where.gather(1, t.clamp(0, where.shape[1] - 1))  # [n, S]
        if hasattr(batch, "replayed_experts"):
            replayed = batch.replayed_experts[:, : sequences.shape[1]]  # [n, S, layers, k]
            replayed = replayed.flatten(0, 1).to(blank.device)  # [n·S, layers, k]
        if hasattr(batch, "sampler_top_ids"):
            others = batch.sampler_top_ids[where].long()  # [M, K]
    asked = sequences, predicts, temperature, readout, replayed, others
    logp, statistic = policy(*asked)  # [M] or, with `others`, [M, 1 + K]; [M]
    if hasattr(batch, "sampler_top_ids"):
        batch.top_logp = blank.new_zeros(batch.sampler_top_ids.shape)  # [n, T, K]
    if others is not None:
        batch.top_logp = batch.top_logp.masked_scatter(where[..., None], logp[:, 1:])
        logp = logp[:, 0]  # [M]
    logp = blank.masked_scatter(where, logp)  # [n, T]
    statistic = blank.masked_scatter(where, statistic)  # [n, T]
    if logp.requires_grad:
        logp.retain_grad()  # ∂loss/∂logp is minus each token's weight, which samples.jsonl shows
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
    """`response_logprobs` of a whole batch without gradient, in micro-batches. `experts`: also say
    where a mixture of experts sent each token."""
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


def sampler_gap(batches: list[Rollout]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The difference between the sampler's and the trainer's log-probs, from the same weights.

    KL(μ ‖ π_old) by the k3 estimator, the mean and the largest |log π_old - log μ|, as pairs
    (sum, tokens) of this rank.
    """
    kl, total, tokens, largest = 0.0, 0.0, 0.0, torch.tensor(0.0)
    for batch in batches:
        gap = (batch.old_logp - batch.rollout_logp) * batch.mask  # [n, T]
        # expm1, because exp(gap) - 1 would lose the usual gaps of 1e-6 to rounding.
        kl += (gap.expm1() - gap).sum()
        total += gap.abs().sum()
        if len(gap):  # a rank may have no rows
            largest = torch.maximum(largest.to(gap), gap.abs().max())
        tokens += batch.mask.sum()
    metrics = {"sampler_kl": (kl, tokens), "sampler_gap": (total, tokens)}
    return metrics | {"sampler_gap_max": (largest, None)}
