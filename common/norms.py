"""|g_i|, the norm of the gradient g_i = ∇ Σ_t log π(y_t) of each single response, in one pass for many.

A backward pass gives the sum of all g_i, but what each of them is made of comes by: at the weight of
a linear map `out = W x` response i has the gradient Σ_s d_s x_sᵀ, with d_s the gradient at the output
and s running over the tokens of response i alone; at the weight of a norm Σ_s d_s ⊙ x̂_s; at the
embedding Σ_s d_s in the row of token s. Its square is added to |g_i|² and forgotten, and no gradient
of the weights is ever made. (Goodfellow 2015, arXiv 1510.01799; for Transformers Li et al. 2021,
arXiv 2110.05679.)
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from common.batch import Rollout
from common.distributed import World, clip_gradients
from common.logprobs import BLOCK_ELEMENTS, TokenLogprobs, micro_batches, response_logprobs


def gradient_norms(
    policy: nn.Module, batch: Rollout, args: object, world: World
) -> tuple[Tensor, Tensor]:
    """log π of every sampled token `[N, T]`, and |g| of every response `[N]`, under `policy`.

    All ranks call it together, each with responses of its own, as many as it has.
    """
    one_by_one = bool(strange_part(policy))
    logp, norms = torch.zeros_like(batch.mask), batch.mask.new_zeros(len(batch))  # [N, T], [N]
    for rows in micro_batches(batch, 1 if one_by_one else args.micro_tokens, world):
        micro = batch.rows(rows)
        if one_by_one:
            logp[rows], norms[rows] = in_turn(policy, micro, args.temperature, world)
        else:
            logp[rows], norms[rows] = in_one_pass(policy, micro, args.temperature)
    return logp, norms


def strange_part(policy: nn.Module) -> str:
    """The kind of the first module with parameters whose gradient `in_one_pass` does not know; ""
    where there is none."""
    embedding = policy.lm.get_input_embeddings()
    for module in policy.modules():
        plain = type(module) is nn.Embedding and module is embedding
        if [*module.parameters(recurse=False)] and not plain and not rule(module):
            return type(module).__name__
    return ""


def in_turn(
    policy: nn.Module, row: Rollout, temperature: float, world: World
) -> tuple[Tensor, float]:
    """log π `[1, T]` and |g| of one response, by a backward pass for each rank's in turn; `row` is
    empty on ranks that have none left."""
    norms = []
    for owner in range(world.size):
        logp, _ = response_logprobs(policy, row, temperature)  # [1, T]
        # FSDP takes the mean over ranks: what is left is the owner's gradient
        (logp.sum() * (world.size * (owner == world.rank))).backward()
        norms.append(clip_gradients(policy, float("inf")))  # inf: measures and does not clip
        policy.zero_grad()
    return logp.detach(), norms[world.rank]


def in_one_pass(policy: nn.Module, micro: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """log π `[n, T]` and |g| `[n]` of a micro-batch: a forward pass, and one back to the embedding."""
    lm, embedding = policy.lm, policy.lm.get_input_embeddings()
    squares = micro.mask.new_zeros(max(1, len(micro)), requires_grad=True)  # [n], see Tap
    at_tokens: list[Tensor] = []

    def head_part(hidden: Tensor, _: Tensor) -> Tensor:
        """The output head is a linear map of which TokenLogprobs never shows the whole output."""
        weight, (n, S, _) = lm.lm_head.weight, hidden.shape  # [V, H]
        step = torch.arange(min(S, micro.tokens.shape[1]), device=hidden.device)  # [T]
        row = torch.arange(len(micro), device=hidden.device)  # [n]
        place = (micro.prompt_len[:, None] - 1 + step).clamp(
            max=S - 1
        )  # [n, T]: where t is predicted
        x, found = hidden[row[:, None], place], hidden.new_zeros(n, dtype=torch.float32)
        at_tokens.append(torch.zeros_like(hidden))  # [n, S, H]
        for some in row.split(max(1, BLOCK_ELEMENTS // weight.numel())) if len(row) else ():
            gradient = weight.new_zeros(len(some), *weight.shape, dtype=torch.float32)  # [r, V, H]
            for part in step.split(max(1, BLOCK_ELEMENTS // (len(some) * len(weight)))):
                at = some[:, None], part
                given = x[at], weight, micro.tokens[at], micro.mask[at], temperature
                gradient += TokenLogprobs.d_logits(*given).mT @ x[at]
            found[some] = gradient.square().sum((1, 2))
            own = torch.arange(len(some), device=hidden.device)[:, None]  # [r, 1]
            at_tokens[0][some] = gradient[own, micro.sequences[some, :S]].to(hidden.dtype)
        return found

    def embedding_part(tokens: Tensor, d: Tensor) -> Tensor:
        """A token's row collects from all its places. If it is the head's too, the sum is squared."""
        if embedding.padding_idx is not None:  # autograd gives that row no gradient
            d = d * (tokens != embedding.padding_idx)[..., None]
        same = tokens[:, :, None] == tokens[:, None]  # [n, S, S]
        collected = same.to(d.dtype) @ d  # [n, S, H]: the gradient of each place's row
        if lm.lm_head.weight is embedding.weight:
            collected = collected + 2 * at_tokens[0]
        return (d.float() * collected.float()).sum((1, 2))

    def tap(part: Callable) -> Callable:
        return lambda module, inputs, output: Tap.apply(output, inputs[0], squares, part)

    def tap_head(module: nn.Module, inputs: tuple, output: object) -> None:
        hidden = output.last_hidden_state  # [n, S, H]
        output.last_hidden_state = Tap.apply(hidden, hidden, squares, head_part)

    body = lm.base_model
    hooks = [body.register_forward_hook(tap_head)]
    hooks += [embedding.register_forward_hook(tap(embedding_part))]
    hooks += [m.register_forward_hook(tap(rule(m))) for m in body.modules() if rule(m)]
    logp, _ = response_logprobs(policy, micro, temperature)  # [n, T]
    (found,) = torch.autograd.grad(logp.sum(), squares)  # [n]
    for hook in hooks:
        hook.remove()
    return logp.detach(), found[: len(micro)].clamp(min=0).sqrt()


class Tap(torch.autograd.Function):
    """Hands a module's output on as it is. In the backward pass `part` makes |gradient of the
    module's parameters|² `[n]` of what went in and the gradient at the output; that is handed on as
    the gradient of `squares`, where autograd adds up what all taps give.

    What went in is saved as autograd saves: gradient checkpointing drops it and makes it again.
    """

    @staticmethod
    def forward(
        ctx: object, output: Tensor, given: Tensor, squares: Tensor, part: Callable
    ) -> Tensor:
        ctx.save_for_backward(given)
        ctx.part = part
        return output.view_as(output)

    @staticmethod
    def backward(ctx: object, d_output: Tensor) -> tuple[Tensor, None, Tensor, None]:
        return d_output, None, ctx.part(*ctx.saved_tensors, d_output), None


def rule(module: nn.Module) -> Callable | None:
    """The `part` of a module for `Tap`; None where it is not known."""
    if type(module) is nn.Linear:
        return partial(linear_part, module)
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return partial(norm_part, module)
    return None


def linear_part(module: nn.Linear, x: Tensor, d: Tensor) -> Tensor:
    """‖Σ_s d_s x_sᵀ‖² = Σ_s Σ_s' (d_s · d_s') (x_s · x_s'): the side that is less work. Inputs `[n, S, I]`, `[n, S, O]`."""
    (S, inner), outer = x.shape[1:], d.shape[2]
    if S * (inner + outer) < inner * outer:
        pairs = ((y @ y.mT).flatten(1).float() for y in (x, d))  # [n, S·S] each
        found = torch.linalg.vecdot(*pairs)
    else:
        rows = max(1, BLOCK_ELEMENTS // (inner * outer))
        gradients = (d.mT @ x for x, d in zip(x.split(rows), d.split(rows)))  # [r, O, I]
        norm = partial(torch.linalg.vector_norm, dim=(1, 2), dtype=torch.float32)
        found = torch.cat([norm(gradient) for gradient in gradients]).square()
    return found if module.bias is None else found + d.float().sum(1).square().sum(1)


def norm_part(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """‖Σ_s d_s ⊙ x̂_s‖² with x̂ = x / sqrt(mean x² + ε), over places and heads. Inputs `[n, ..., H]`."""
    x, d = (y.float().flatten(1, -2) for y in (x, d))  # [n, S, H]
    scale = (x.square().mean(-1) + module.variance_epsilon).rsqrt()  # [n, S]
    return (scale[:, None] @ (x * d)).square().sum((1, 2))
