"""A pretended GPU: tensors on it keep their values on the CPU, and are computed there.

What differs on a real one is noticed: where the host would wait for what the GPU computes, or for a
copy between the two, `Card.waits` counts; where CPU and GPU tensors meet, an error is raised. What
is made up: kernels (they are the CPU's), time, memory, and torch.cuda itself.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

CUDA = torch.device("cuda", 0)
# Operators whose result's size only the GPU knows, or that hand a number to the host
ASKS = set("nonzero masked_select masked_scatter_backward unique2 _unique2 equal".split())
ASKS |= {"_local_scalar_dense", "bincount"}
BY_INDEX = ("index", "index_put", "_index_put_impl", "_unsafe_index")  # nonzero inside for a mask


class OnCard(Tensor):
    """A tensor of the pretended GPU; `held` is what it stands for."""

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Tensor:
        how = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        how |= {"dtype": held.dtype, "device": "meta", "requires_grad": held.requires_grad}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **how)
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: object, types: tuple, args: tuple, kwargs: dict) -> None:
        raise RuntimeError("a tensor of the pretended GPU outside of `with Card():`")


def is_card(device: object) -> bool:
    """Whether a device is the GPU; "meta" is what torch itself says of its tensors."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


class Card(TorchFunctionMode):
    """Within it device "cuda" is the pretended GPU. `waits` counts by `stage()` and by cause."""

    def __init__(self, stage: Callable[[], str] = str):
        super().__init__()
        self.waits, self.stage = Counter(), stage
        self.operators = Operators(self)

    def __enter__(self) -> "Card":
        self.operators.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self.operators.__exit__(*raised)

    def wait(self, cause: str) -> None:
        self.waits[self.stage(), cause] += 1

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """What makes tensors out of Python's numbers, or Python's numbers out of tensors."""
        kwargs = dict(kwargs or {})
        if function in (Tensor.tolist, Tensor.cpu, Tensor.numpy) and isinstance(args[0], OnCard):
            self.wait(function.__name__)
            return function(args[0].held.clone(), *args[1:], **kwargs)
        if function is Tensor.new_tensor and isinstance(args[0], OnCard):
            self.wait("new_tensor")
            return OnCard(torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)))
        if function is Tensor.to:
            target = [one for one in args[1:] if isinstance(one, str | torch.device)]
            target += [kwargs.pop("device")] if kwargs.get("device") is not None else []
            if target:
                rest = [one for one in args[1:] if not isinstance(one, str | torch.device)]
                return self.moved(args[0], is_card(target[0]), rest, kwargs)
        if function in (torch.tensor, torch.as_tensor) and is_card(kwargs.get("device")):
            given = args[0]
            if isinstance(given, Tensor):
                return self.moved(given, True, [], {"dtype": kwargs.get("dtype")})
            self.wait("tensor of a list")
            return OnCard(torch.tensor(given, dtype=kwargs.get("dtype")))
        if is_card(kwargs.get("device")):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)

    def moved(self, tensor: Tensor, there: bool, rest: list, kwargs: dict) -> Tensor:
        """`tensor.to(device, *rest)`; between the two it is a copy for which the host waits."""
        if isinstance(tensor, OnCard) != there:
            self.wait("copy to the GPU" if there else "copy to the host")
            values = tensor.held.clone() if isinstance(tensor, OnCard) else tensor.detach().clone()
            tensor = OnCard(values) if there else values
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        kwargs.pop("non_blocking", None)
        return tensor.to(*rest, **kwargs) if rest or kwargs else tensor


class Operators(TorchDispatchMode):
    """What torch's operators do with tensors of the GPU, also inside of others and backward."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(
        self, operator: object, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs, name = dict(kwargs or {}), operator.__name__.split(".")[0].rstrip("_")
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        here = [one for one in tensors if not isinstance(one, OnCard)]
        there = len(tensors) > len(here)
        if is_card(device := kwargs.get("device")):
            there, kwargs["device"] = True, "cpu"
        elif device is not None:
            there = False
        if there and len(here) < len(tensors):
            # A CPU number may take part in an operator on the GPU (its value is read at once).
            mixed = [tuple(one.shape) for one in here if one.dim()]
            assert not mixed or name == "copy", f"{operator}: CPU tensors {mixed} meet the GPU's"
            by_mask = name in BY_INDEX and any(
                isinstance(one, OnCard) and one.dtype == torch.bool for one in args[1]
            )
            if name in ASKS or by_mask:
                self.card.wait(f"{name} by a mask" if by_mask else name)
        held = [
            tree_map(lambda one: one.held if isinstance(one, OnCard) else one, part)
            for part in (args, kwargs)
        ]
        result = operator(*held[0], **held[1])
        if operator._schema.is_mutable and args and isinstance(args[0], OnCard):
            return args[0]
        wrap = lambda one: OnCard(one) if isinstance(one, Tensor) else one  # noqa: E731
        return tree_map(wrap, result) if there else result
