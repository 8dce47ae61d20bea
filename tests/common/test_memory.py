"""Memory of real shapes, counted without any: on tensors that have a shape and no storage.

`Memory` adds up what operations allocate and what is still alive of it. (It does not see what
kernels need inside, nor an allocator's slack.)
"""

import weakref

import pytest
import torch
from common.logprobs import BLOCK_ELEMENTS, token_logprobs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

pytestmark = pytest.mark.slow
V, H, TOKENS = 151_936, 2048, 16_384


class Memory(TorchDispatchMode):
    """Within it: bytes `live`, and their `peak`, of all storages that operations have made."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(
        self, func: object, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        for tensor in filter(torch.is_tensor, tree_iter((args, kwargs))):
            self.count(tensor, made=False)  # a view of it is not made here either
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_iter(result)):
            self.count(tensor, made=True)
        self.peak = max(self.peak, self.live)
        return result

    def count(self, tensor: torch.Tensor, made: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.live += storage.nbytes() * made
            weakref.finalize(storage, self.free, storage._cdata, storage.nbytes() * made)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float()  # [M, V]
    return logits.log_softmax(-1).gather(1, targets[:, None])


def test_log_probs_of_a_large_vocabulary():
    """16k tokens, V = 152k, bfloat16: the head's gradient, in float32 and cast, and a few blocks.
    The plain formula's peak is eight times that."""
    peaks = []
    for formula in (lambda *given: token_logprobs(*given, 1.0)[0], plain):
        with torch.device("meta"):
            hidden, weight = (
                torch.randn(n, H, dtype=torch.bfloat16, requires_grad=True) for n in (TOKENS, V)
            )
            targets = torch.zeros(TOKENS, dtype=torch.long)
        with Memory() as memory:
            formula(hidden, weight, targets).sum().backward()
        peaks.append(memory.peak)
    bound = (4 + 2) * V * H + 2 * TOKENS * H + 3 * 4 * BLOCK_ELEMENTS
    assert peaks[0] < bound < peaks[1] / 8, peaks
