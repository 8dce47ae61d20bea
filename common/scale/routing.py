"""Mixtures of experts: recording which experts get each token, and replaying that choice.

Routing replay needs this in the trainer and in both engines.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# Families whose router takes the top k of its scores and derives weights from these. A router that
# first chooses groups, or that sorts, cannot be replayed.
FAMILIES = "Qwen3Moe Qwen2Moe Qwen3_5Moe Qwen3Next Olmoe Mixtral GptOss MiniMax GraniteMoe".split()
FAMILIES += ["AriaText", "Ernie4_5_Moe"]


def routers(lm: PreTrainedModel) -> list[nn.Module]:
    """List the modules that send tokens to experts, one per layer; a dense model has none."""
    return [module for module in lm.modules() if type(module).__name__.endswith("Router")]


class Selection(TorchFunctionMode):
    """A context in which `torch.topk` returns the experts `replayed` `[tokens, k]`, if any.

    A router computes scores, takes the top k, and derives the experts' weights from their scores.
    Only the choice is replaced; softmax or sigmoid, and the gradient, stay the model's own. `seen`
    lists the chosen experts.
    """

    def __init__(self, replayed: Tensor | None = None):
        super().__init__()
        self.replayed = replayed
        self.seen = []
        self.experts = 0  # how many there are to choose from

    def __torch_function__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            if self.replayed is not None:
                chosen = self.replayed.view_as(result.indices)  # [tokens, k]
                result = torch.return_types.topk((args[0].gather(-1, chosen), chosen))
            self.seen.append(result.indices.flatten(0, -2))  # [tokens, k]
            self.experts = args[0].shape[-1]
        return result


class Routing:
    """The record of which experts a model sends each token to, and the replay of such a record.

    Replay fixes only the choice. The experts' weights come from the current scores at the recorded
    indices, so the router keeps its gradient. If the model has no experts, or a router whose choice
    cannot be replayed, `active` is False, `why_not` gives the reason, and the model stays as it is.
    """

    def __init__(self, lm: PreTrainedModel):
        self.why_not = why_not_replayed(lm)
        self.active = not self.why_not
        self.last: dict[int, Tensor] = {}  # layer -> choices of the last forward pass [tokens, k]
        self.replay: Tensor | None = None  # [tokens, layers, k], for the forward pass (`Policy`)
        for layer, router in enumerate(routers(lm) if self.active else []):
            # Why no hook? The context must be entered before the forward and left after it.
            router.forward = partial(self._choose, layer, router.forward)

    @torch.compiler.disable  # what is recorded and replayed stays outside of compiled code
    def _choose(self, layer: int, forward: Callable, *inputs: Tensor, **named: object) -> object:
        replayed = None if self.replay is None else self.replay[:, layer].long()  # [tokens, k]
        with Selection(replayed) as selection:
            output = forward(*inputs, **named)
        # One byte each if possible, because a rollout has tokens x layers x k of them.
        kind = torch.uint8 if selection.experts <= 256 else torch.int16
        self.last[layer] = selection.seen[0].to(kind)  # [tokens, k]
        return output

    def recorded(self) -> Tensor:
        """Return the choices of the last forward pass, `[tokens, layers, k]`, in input order."""
        return torch.stack([self.last[layer] for layer in sorted(self.last)], 1)


def why_not_replayed(lm: PreTrainedModel) -> str:
    """Say why the choice of experts cannot be recorded and replayed in this model; "" if it can."""
    kinds = {type(router).__name__ for router in routers(lm)}
    if odd := kinds - {f"{family}TopKRouter" for family in FAMILIES}:
        return f"chooses experts by {min(odd)}, which is not replayed (use {', '.join(FAMILIES)})"
    return "" if kinds else "has no experts"
