"""The output head: from hidden states to log-probabilities, a block of rows at a time.

With a vocabulary of 152k, the float32 logits of 16k tokens take 10 GB, and the plain formula keeps
several copies. Here a block's logits are read and dropped, and computed again in the backward pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.distributed import compiled

# Logits computed at once: 512 MB in float32 for any vocabulary, and up to three such tensors.
BLOCK_ELEMENTS = 2**27
Pair = tuple[Tensor, Tensor]
Readout = Callable[[Tensor, Tensor], Tensor]  # log π `[b, V]`, tokens `[b]` -> `[b]`


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply hidden `[..., H]` by the transposed weight `[V, H]`: `[..., V]`, float32.

    On a GPU the product of bfloat16 numbers leaves the kernel in float32. In bfloat16, logits of 16
    to 32 would be 0.125 apart and log-probs off by 0.01. Sampler and trainer would disagree, and no
    ratio would be 1. (CPUs have no such kernel.)
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        flat = hidden.flatten(0, -2)  # [b, H]
        product = torch.mm(flat, weight.T, out_dtype=torch.float32)  # [b, V]
        return product.unflatten(0, hidden.shape[:-1])
    return nn.functional.linear(hidden, weight).float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left [V, b]` @ `right [b, H]` to `total [V, H]`, float32.

    On a GPU the product's kernel adds it, so that nothing is rounded to bfloat16 in between.
    """
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def read_block(
    product: Tensor, tokens: Tensor, temperature: float, readout: Readout | None
) -> Pair:
    """Return log π of the `tokens [b]` at the head's product `[b, V]`, and the statistic of each
    row, both `[b]`."""
    logprobs = (product / temperature).log_softmax(-1)  # [b, V]
    statistic = readout(logprobs, tokens) if readout else product.new_zeros(len(product))
    return logprobs.gather(-1, tokens[:, None])[:, 0], statistic


def d_product(
    product: Tensor, tokens: Tensor, d_logp: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Compute the gradient at the head's product, `[b, V]`, in `dtype`. At the logits it is
    `d_logp [b]` times 1{token} - p, of the `tokens [b]`."""
    d_logits = (product / temperature).softmax(-1).mul_(-d_logp[:, None])  # [b, V]
    d_logits.scatter_add_(-1, tokens[:, None], d_logp[:, None])
    return (d_logits / temperature).to(dtype)


class TokenLogprobs(torch.autograd.Function):
    """The function log softmax(logits / temperature)[targets], with the `readout`'s statistic.

    hidden `[M, H]`, weight `[V, H]`, targets `[M]` -> logp `[M]`, statistic `[M]` (no gradient),
    both float32.
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
        temperature: float,
        readout: Readout | None,
        compile: bool = False,
    ) -> Pair:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.compile = temperature, compile
        # When compiled, a block writes and reads fewer tensors of that size.
        read = compiled(read_block) if compile else read_block
        logp = torch.empty(len(hidden), device=hidden.device)  # [M]
        statistic = torch.zeros(len(hidden), device=hidden.device)  # [M]
        for rows in TokenLogprobs.blocks(hidden, weight):
            product = head_product(hidden[rows], weight)  # [b, V]
            logp[rows], statistic[rows] = read(product, targets[rows], temperature, readout)
        ctx.mark_non_differentiable(statistic)
        return logp, statistic

    @staticmethod
    def backward(ctx, d_logp: Tensor, _: None) -> tuple:
        hidden, weight, targets = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)  # [M, H]
        # Sum over blocks in float32, because in bfloat16 each block would round the earlier ones.
        d_weight = torch.zeros_like(weight, dtype=torch.float32)  # [V, H]
        differentiate = compiled(d_product) if ctx.compile else d_product
        for rows in TokenLogprobs.blocks(hidden, weight):
            product = head_product(hidden[rows], weight)  # [b, V]
            inputs = product, targets[rows], d_logp[rows], ctx.temperature, weight.dtype
            gradient = differentiate(*inputs)  # [b, V]
            d_hidden[rows] = gradient @ weight
            add_product(d_weight, gradient.T, hidden[rows])
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None
