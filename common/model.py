"""The policy: loading, a forward pass made for sharding, log-probabilities that never hold a full [N, T, V] tensor."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from common.distributed import BadInput, first_line

logging.disable_progress_bar()  # the run has its own
EMBEDDED = {"tiny": Path(__file__).parent / "tiny" / "model", "tiny-moe": Path(__file__).parent / "tiny" / "model-moe"}
BLOCK_ELEMENTS = 2**26  # logits that token_logprobs makes at once: 256 MB in float32, whatever the vocabulary


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (float32 on the CPU, attention by sdpa) and tokenizer, by hub name, local folder, or `tiny`.

    Weights are loaded in float32 because they are the optimiser's master copy: at lr 1e-6 an update is smaller than
    the spacing of bfloat16 numbers and would round to nothing. The forward pass casts down (see `distributed.shard`).
    """
    source = Path(EMBEDDED.get(name, name))
    if source.is_dir() and not (any(source.glob("*.safetensors")) and (source / "config.json").exists()):
        raise BadInput(f"--model {name}: the folder holds no config.json with *.safetensors weights")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {name}: not a folder, and not loadable from the hub ({first_line(error)})") from error
    lm.generation_config.eos_token_id = sorted(eos_ids(lm, tokenizer))
    return lm, tokenizer


def eos_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token id that ends a response: chat models often have one in the tokenizer and more in the config."""
    declared = lm.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    if not ids:
        raise BadInput("--model: neither its tokenizer nor its generation config names an EOS token")
    return ids


def routers(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules that send tokens to experts, a layer each; none in a dense model."""
    return [module for module in lm.modules() if type(module).__name__.endswith("TopKRouter")]


class Routing:
    """Records which experts a mixture-of-experts model sends each token to, and can replay a recorded choice.

    Replay fixes the selection only: the experts' weights are the current softmax at the recorded indices, so that the
    router keeps its gradient. Without experts in the model (`active` False) this does nothing.
    """

    def __init__(self, lm: PreTrainedModel):
        self.active = bool(routers(lm))
        self.last: list[Tensor] = [None] * len(routers(lm))  # of the last forward pass, a layer each: [tokens, k]
        self.replay: Tensor | None = None  # [tokens, layers, k], for the forward passes to come
        for layer, router in enumerate(routers(lm)):
            router.register_forward_hook(partial(self._choose, layer))

    def _choose(self, layer: int, router: nn.Module, inputs: tuple, output: tuple) -> tuple:
        logits, scores, chosen = output  # [tokens, experts], [tokens, k], [tokens, k]
        if self.replay is not None:
            chosen = self.replay[:, layer].long()  # [tokens, k]
            scores = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)  # [tokens, k]
            if router.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)  # [tokens, k]
        self.last[layer] = chosen
        return logits, scores.to(logits.dtype), chosen

    def recorded(self) -> Tensor:
        """The last forward pass's choices, `[tokens, layers, k]`, in row order of its inputs."""
        return torch.stack(self.last, dim=1).to(torch.int16)


class Policy(nn.Module):
    """A causal language model seen as a policy: token ids in, log π(token) and entropy of the asked positions out.

    The output head runs inside this module's forward, so that FSDP has gathered its weight when we use it by hand.
    """

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm, self.routing = lm, Routing(lm)

    def forward(self, sequences: Tensor, predicts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`sequences [n, S]` right-padded, `predicts [n, S]` true where the NEXT token is wanted -> two `[M]` vectors.

        With right padding and causal attention no real token ever sees a pad: no attention mask is needed.
        """
        hidden = self.lm.base_model(input_ids=sequences, use_cache=False).last_hidden_state  # [n, S, H]
        targets = sequences.roll(-1, dims=1)[predicts]  # [M]
        return token_logprobs(hidden[predicts], self.lm.lm_head.weight, targets, temperature)


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets], and the entropy of that softmax (nats, no gradient).

    hidden `[M, H]`, weight `[V, H]`, targets `[M]` -> logp `[M]`, entropy `[M]`, float32.
    """
    return TokenLogprobs.apply(hidden, weight, targets, temperature)


class TokenLogprobs(torch.autograd.Function):
    """The logits are made a block of rows at a time, and again in the backward pass.

    At a vocabulary of 152k, 16k tokens of float32 logits are 10 GB a copy, and the plain formula keeps several.
    """

    @staticmethod
    def logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
        """`[b, V]`, float32: a softmax in bfloat16 would add its own rounding to the product's."""
        return (hidden @ weight.T).float() / temperature

    @staticmethod
    def blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
        rows = max(1, BLOCK_ELEMENTS // len(weight))
        return [slice(start, start + rows) for start in range(0, len(hidden), rows)]

    @staticmethod
    def forward(
        ctx: object, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature
        logp, entropy = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))  # [M], [M]
        for rows in TokenLogprobs.blocks(hidden, weight):
            logprobs = TokenLogprobs.logits(hidden[rows], weight, temperature).log_softmax(-1)  # [b, V]
            logp[rows] = logprobs.gather(-1, targets[rows, None])[:, 0]
            entropy[rows] = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: object, d_logp: Tensor, _: None) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)  # [M, H]
        # Summed over blocks in float32: in bfloat16 every block's sum would round what came before it.
        d_weight = torch.zeros_like(weight, dtype=torch.float32)  # [V, H]
        for rows in TokenLogprobs.blocks(hidden, weight):
            p = TokenLogprobs.logits(hidden[rows], weight, ctx.temperature).softmax(-1)  # [b, V]
            d_logits = p.mul_(-d_logp[rows, None])  # [b, V]: d log p(target) / d logits = 1{target} - p
            d_logits.scatter_add_(1, targets[rows, None], d_logp[rows, None])
            d_logits = (d_logits / ctx.temperature).to(weight.dtype)  # [b, V]
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.T @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None
