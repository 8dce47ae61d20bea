"""|g_i|, the norm of every single response's gradient g_i = ∇ Σ_t log π(y_t), from one pass.

A backward pass gives the sum of all g_i, but layer by layer it also gives the terms of each g_i. At
the weight of a linear map y = W x, response i has the gradient Σ_s d_s x_sᵀ: d_s is the gradient at
y, and s runs over the positions of response i. At a norm's weight it has Σ_s d_s ⊙ x̂_s; at the
embedding, d_s is added to the row of token s. The square of each part is added to |g_i|², and the
part is dropped, so the gradient of the batch is never formed. (Goodfellow 2015, arXiv 1510.01799;
for Transformers Li et al. 2021, arXiv 2110.05679.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from common.batch import Rollout
from common.scale.head import BLOCK_ELEMENTS, d_product, head_product


def unsupported_module(policy: nn.Module) -> str:
    """Return the class of the first module that `tapped` cannot compute a part of, or ""."""
    embedding = policy.lm.get_input_embeddings()
    known = {embedding} if type(embedding) is nn.Embedding else set()
    for module in policy.modules():
        if [*module.parameters(recurse=False)] and module not in known and not part_of(module):
            return type(module).__name__
    return ""


@contextmanager
def tapped(lm: nn.Module, micro: Rollout, temperature: float) -> Iterator[Tensor]:
    """Tap every module of a model, so that log π of a micro-batch depends on the tensor that this
    yields: the gradient of Σ log π with respect to it is |g|² of each response, `[n]`.

    The backward pass ends at the embedding's output. No parameter gets a gradient, so FSDP has
    nothing to add up.
    """
    embedding = lm.get_input_embeddings()
    squares = micro.mask.new_zeros(max(1, len(micro)), requires_grad=True)  # [n], see Tap
    head = HeadPart(lm, micro, temperature)

    def tap(part: Callable) -> Callable:
        """Make a forward hook that puts a Tap behind a module."""
        return lambda module, inputs, output: Tap.apply(output, inputs[0], squares, part)

    def tap_head(module: nn.Module, inputs: tuple, output: object) -> None:
        hidden = output.last_hidden_state  # [n, S, H]
        output.last_hidden_state = Tap.apply(hidden, hidden, squares, head)

    hooks = [lm.base_model.register_forward_hook(tap_head)]
    hooks.append(embedding.register_forward_hook(tap(partial(embedding_part, embedding, head))))
    for module in lm.base_model.modules():
        part = part_of(module)
        if part:
            hooks.append(module.register_forward_hook(tap(part)))
    try:
        # A layer that was compiled without hooks would skip them.
        with torch.compiler.set_stance("force_eager"):
            yield squares
    finally:
        for hook in hooks:
            hook.remove()


class Tap(torch.autograd.Function):
    """An identity on a module's output, whose backward adds the module's part of |g_i|².

    `squares` `[n]` does not change the output. Its gradient serves as an accumulator: each tap
    returns its squares as the gradient of `squares`, and autograd adds them up over all taps.
    `part(x, d_output)` computes them from the module's input `x` and the gradient at its output.
    `save_for_backward` keeps the input, so that gradient checkpointing can drop it and compute it
    again.
    """

    @staticmethod
    def forward(ctx: object, output: Tensor, x: Tensor, squares: Tensor, part: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        return output.view_as(output)

    @staticmethod
    def backward(ctx: object, d_output: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (x,) = ctx.saved_tensors
        return d_output, None, ctx.part(x, d_output), None


class HeadPart:
    """The output head's part of |g_i|².

    The head is a linear map too. But TokenLogprobs computes its output in blocks and drops them, so
    this class computes them a second time.
    """

    def __init__(self, lm: nn.Module, micro: Rollout, temperature: float):
        self.lm = lm
        self.micro = micro
        self.temperature = temperature
        # The head's gradient in the row of each position's token. If embedding and head share their
        # weight, the embedding needs it, which the backward pass reaches last.
        self.at_tokens: Tensor | None = None  # [n, S, H]

    def __call__(self, hidden: Tensor, _: Tensor) -> Tensor:
        """Compute the squares `[n]` from the last hidden state `[n, S, H]`."""
        micro, weight = self.micro, self.lm.lm_head.weight  # [V, H]
        S = hidden.shape[1]
        squares = hidden.new_zeros(max(1, len(micro)), dtype=torch.float32)  # [n]
        self.at_tokens = torch.zeros_like(hidden)
        for row, prompt_len in enumerate(micro.prompt_len.tolist()):
            gradient = torch.zeros_like(weight, dtype=torch.float32)  # [V, H]: for one response
            x = hidden[row, prompt_len - 1 :]  # [T, H]: at the positions that predict its tokens
            tokens = micro.tokens[row, : len(x)]  # [T]
            ones = micro.mask[row, : len(x)]  # [T]
            steps = torch.arange(len(tokens), device=hidden.device)  # [T]
            for block in steps.split(max(1, BLOCK_ELEMENTS // len(weight))):
                inputs = tokens[block], ones[block], self.temperature, weight.dtype
                d = d_product(head_product(x[block], weight), *inputs)  # [b, V]
                gradient += d.T @ x[block]
            squares[row] = torch.linalg.vector_norm(gradient).square()
            self.at_tokens[row] = gradient[micro.sequences[row, :S]].to(hidden.dtype)
        return squares


def embedding_part(embedding: nn.Embedding, head: HeadPart, tokens: Tensor, d: Tensor) -> Tensor:
    """Compute the embedding's part of |g_i|² `[n]`. A token's row adds up the gradients d
    `[n, S, H]` of all positions `[n, S]` with this token, and the head's gradient if it is tied."""
    if embedding.padding_idx is not None:  # autograd gives this row no gradient
        d = d * (tokens != embedding.padding_idx)[..., None]
    same = tokens[:, :, None] == tokens[:, None]  # [n, S, S]
    row = same.to(d.dtype) @ d  # [n, S, H]: the gradient of each position's row
    if head.lm.lm_head.weight is embedding.weight:
        # The one weight has two gradients, b = `row` and the head's, a = `at_tokens`. HeadPart has
        # counted |a|². |a + b|² still lacks b (b + 2a), and b sums d over positions.
        row = row + 2 * head.at_tokens
    return (d.float() * row.float()).sum((1, 2))


def part_of(module: nn.Module) -> Callable | None:
    """Return the function that computes a module's part of |g_i|² for `Tap`, or None."""
    if type(module) is nn.Linear:
        return partial(linear_part, module)
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return partial(norm_part, module)
    return None


def linear_part(module: nn.Linear, x: Tensor, d: Tensor) -> Tensor:
    """Compute |Σ_s d_s x_sᵀ|² = Σ_s Σ_s' (d_s · d_s') (x_s · x_s') `[n]`, by the cheaper side.

    x is `[n, S, I]`, d `[n, S, O]`.
    """
    S, inner = x.shape[1:]
    outer = d.shape[2]
    if S * (inner + outer) < inner * outer:
        pairs = ((y @ y.mT).flatten(1).float() for y in (x, d))  # [n, S·S] each
        squares = torch.linalg.vecdot(*pairs)  # [n]
    else:
        rows = max(1, BLOCK_ELEMENTS // (inner * outer))
        gradients = (b.mT @ a for a, b in zip(x.split(rows), d.split(rows)))  # [r, O, I] each
        norm = partial(torch.linalg.vector_norm, dim=(1, 2), dtype=torch.float32)
        squares = torch.cat([norm(gradient) for gradient in gradients]).square()  # [n]
    return squares if module.bias is None else squares + d.float().sum(1).square().sum(1)


def norm_part(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """Compute |Σ_s d_s ⊙ x̂_s|² `[n]` over positions and heads, with x̂ = x / sqrt(mean x² + ε).

    x and d are `[n, ..., H]`.
    """
    x, d = (y.float().flatten(1, -2) for y in (x, d))  # [n, S, H]
    scale = (x.square().mean(-1) + module.variance_epsilon).rsqrt()  # [n, S]
    return (scale[:, None] @ (x * d)).square().sum((1, 2))
