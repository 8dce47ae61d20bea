"""Memory of real shapes, counted without any: on tensors that have a shape and no storage.

`Memory` adds up what operations allocate and what is still alive of it. (It does not see what
kernels need inside, nor an allocator's slack.)
"""

import weakref

import pytest
import torch
from common.logprobs import BLOCK_ELEMENTS, token_logprobs
from tools.memory import SHAPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

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


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-8B-Base"])
def test_a_decoder_layer_keeps_what_tools_memory_says(name):
    """Of a micro-batch of 16k tokens, to 12%; its backward pass adds the gradient of its weights
    and less than half as much again."""
    shape = SHAPES[name]
    config = {"hidden_size": shape.hidden, "num_attention_heads": shape.heads, "head_dim": 128}
    config |= {"num_key_value_heads": shape.kv_heads, "num_hidden_layers": 1, "vocab_size": 256}
    config |= {"intermediate_size": shape.intermediate, "pad_token_id": 0}
    config |= {"moe_intermediate_size": shape.intermediate, "num_experts": shape.experts}
    config |= {"num_experts_per_tok": shape.active}
    family = AutoConfig.for_model("qwen3_moe" if shape.experts > 1 else "qwen3", **config)
    with FakeTensorMode():
        lm = AutoModelForCausalLM.from_config(family, dtype=torch.bfloat16).train()
        layer, x = lm.model.layers[0], torch.randn(1, TOKENS, shape.hidden, dtype=torch.bfloat16)
        position = lm.model.rotary_emb(x, torch.arange(TOKENS)[None])
        with Memory() as memory:
            y = layer(x.requires_grad_(), position_embeddings=position, attention_mask=None)
            kept = memory.live
            y.sum().backward()
    weights = 2 * sum(parameter.numel() for parameter in layer.parameters())
    assert weights == pytest.approx(2 * shape.layer(), rel=1e-3)
    assert kept == pytest.approx(shape.kept() * TOKENS, rel=0.12)
    assert kept < memory.peak < 1.5 * kept + weights, (kept / 1e9, memory.peak / 1e9)
