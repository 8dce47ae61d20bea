"""Log-probabilities of the sampled tokens as the trainer computes them, in micro-batches.

No `[N, T, V]` tensor is ever held, and what the sampler reported is checked against them.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.batch import Rollout
from common.cli import Flags
from common.clock import timed
from common.distributed import Compiled, World, global_sum, shard
from common.model import Head, add_product, head_of, head_product
from common.routing import Routing, routers

# Logits made at once: 512 MB in float32, whatever the vocabulary, and three such tensors at a time.
BLOCK_ELEMENTS = 2**27
Pair = tuple[Tensor, Tensor]
Readout = Callable[[Tensor, Tensor], Tensor]  # log π `[b, V]`, tokens `[b]` -> `[b]`
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


def read_block(product: Tensor, tokens: Tensor, head: Head, readout: Readout | None) -> Pair:
    """log π of the `tokens [b, K]` at the head's product `[b, V]`: `[b, K]`; and the statistic of
    each row: `[b]`."""
    logprobs = head.logits(product).log_softmax(-1)  # [b, V]
    statistic = readout(logprobs, tokens[:, 0]) if readout else product.new_zeros(len(product))
    return logprobs.gather(-1, tokens), statistic


def d_product(
    product: Tensor, tokens: Tensor, d_logp: Tensor, head: Head, dtype: torch.dtype
) -> Tensor:
    """The gradient at the head's product: `[b, V]`, in `dtype`. At the logits it is the sum over
    the `tokens [b, K]` of `d_logp [b, K]` times 1{token} - p."""
    logits = head.logits(product)  # [b, V]
    d_logits = logits.softmax(-1).mul_(-d_logp.sum(-1, keepdim=True))  # [b, V]
    d_logits.scatter_add_(-1, tokens, d_logp)
    if head.temperature != 1:
        d_logits /= head.temperature
    if head.cap:  # tanh' = 1 - tanh²
        d_logits *= 1 - (logits * (head.temperature / head.cap)).square()
    return d_logits.to(dtype)


# Compiled, they write fewer tensors of that size, and read them less often.
compiled_read_block = Compiled(read_block)
compiled_d_product = Compiled(d_product)


class TokenLogprobs(torch.autograd.Function):
    """log softmax(head's logits)[targets], and what `readout` makes of the distribution.

    hidden `[M, H]`, weight `[V, H]`, targets `[M]` -> logp `[M]`, statistic `[M]` (no gradient),
    both float32. Targets `[M, K]` are K tokens at each place: logp `[M, K]`, and the statistic is
    of the first one. Makes the logits a block of rows at a time, and again in the backward pass.

    At a vocabulary of 152k, 16k tokens of float32 logits are 10 GB a copy, and the plain formula
    keeps several.
    """

    @staticmethod
    def blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
        rows = max(1, BLOCK_ELEMENTS // len(weight))
        return [slice(start, start + rows) for start in range(0, len(hidden), rows)]

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: Head,
        readout: Readout | None,
        compiled: bool = False,
    ) -> Pair:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.head, ctx.compiled = head, compiled
        read = compiled_read_block if compiled else read_block
        tokens = columns(targets)  # [M, K]
        logp = torch.empty(targets.shape, device=hidden.device)  # [M], or [M, K]
        statistic = torch.zeros(len(hidden), device=hidden.device)  # [M]
        for rows in TokenLogprobs.blocks(hidden, weight):
            product = head_product(hidden[rows], weight)  # [b, V]
            part, statistic[rows] = read(product, tokens[rows], head, readout)
            columns(logp)[rows] = part  # [b, K]
        ctx.mark_non_differentiable(statistic)
        return logp, statistic

    @staticmethod
    def backward(ctx, d_logp: Tensor, _: None) -> tuple:
        hidden, weight, targets = ctx.saved_tensors
        tokens, d_logp = columns(targets), columns(d_logp)  # [M, K]
        d_hidden = torch.empty_like(hidden)  # [M, H]
        # Summed over blocks in float32: in bfloat16 every block would round what came before it.
        d_weight = torch.zeros_like(weight, dtype=torch.float32)  # [V, H]
        differentiate = compiled_d_product if ctx.compiled else d_product
        for rows in TokenLogprobs.blocks(hidden, weight):
            product = head_product(hidden[rows], weight)  # [b, V]
            inputs = product, tokens[rows], d_logp[rows], ctx.head, weight.dtype
            gradient = differentiate(*inputs)  # [b, V]
            d_hidden[rows] = gradient @ weight
            add_product(d_weight, gradient.T, hidden[rows])
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


def columns(x: Tensor) -> Tensor:
    """`[M]` as `[M, 1]`; `[M, K]` as it is."""
    return x if x.dim() == 2 else x[:, None]


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
    if others is None:
        logp, statistic = policy(sequences, predicts, temperature, readout, replayed)  # [M], [M]
    else:
        asked = sequences, predicts, temperature, readout, replayed, others
        every, statistic = policy(*asked)  # [M, 1 + K], [M]
        logp = every[:, 0]  # [M]
    if hasattr(batch, "sampler_top_ids"):
        batch.top_logp = blank.new_zeros(batch.sampler_top_ids.shape)  # [n, T, K]
        if others is not None:
            batch.top_logp = batch.top_logp.masked_scatter(where[..., None], every[:, 1:])
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
