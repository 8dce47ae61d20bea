"""The policy: loading, a forward pass made for sharding, log-probabilities that never hold a full
[N, T, V] tensor."""

import copy
import difflib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from common.distributed import BadInput

logging.disable_progress_bar()  # the run has its own
EMBEDDED = {
    "tiny": Path(__file__).parent / "tiny" / "model",
    "tiny-moe": Path(__file__).parent / "tiny" / "model-moe",
}
# Tests/test_routing.py has more
FAMILIES = "Qwen3-MoE, Qwen3.5-MoE, OLMoE, Mixtral, GPT-OSS, Granite-MoE"
# Logits that token_logprobs makes at once: 256 MB in float32, whatever the vocabulary
BLOCK_ELEMENTS = 2**26


def load_model(name: str, flag: str = "--model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (float32 on the CPU, attention by sdpa) and tokenizer, by hub name, local folder, or
    `tiny`.

    Weights are loaded in float32 because they are the optimiser's master copy: at lr 1e-6 an update
    is smaller than the spacing of bfloat16 numbers and would round to nothing. The forward pass
    casts down (see `distributed.shard`).
    """
    source, close = Path(EMBEDDED.get(name, name)), difflib.get_close_matches(name, EMBEDDED, 1)
    local = bool(name) and source.is_dir()
    # Not a hub name either: do not ask the network
    if not local and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        known = f"use a folder, a hub name (owner/name), {' or '.join(EMBEDDED)}"
        raise BadInput(
            f"{flag} {name!r}: no such folder; {f'did you mean {close[0]}?' if close else known}"
        )
    if local and not (any(source.glob("*.safetensors")) and (source / "config.json").is_file()):
        raise BadInput(f"{flag} {name}: the folder holds no config.json with *.safetensors weights")
    logging.set_verbosity_error()  # what transformers only warns about is refused by check_weights
    options = {
        "attn_implementation": "sdpa",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        # Where none is, one is made up
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")
        lm, report = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
        check_weights(lm, report)
    # Transformers, safetensors, tokenizers and the hub's client raise many kinds
    except Exception as error:
        where = "cannot be loaded" if local else "not a folder, and not loadable from the hub"
        reason = " ".join(str(error).split())[:240] or type(error).__name__
        raise BadInput(f"{flag} {name}: {where} ({reason})") from error
    lm.generation_config.eos_token_id = sorted(eos_ids(lm, tokenizer))
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    # Its own is often another model's or none
    tokenizer.model_max_length = positions or tokenizer.model_max_length
    # Tokens beyond have no meaning to this model
    tokenizer.embedded = lm.get_input_embeddings().num_embeddings
    # Dropout would make the trainer's log-probs another policy's than the sampler's
    for module in lm.modules():
        for attribute in ("p", "attention_dropout", "dropout", "hidden_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return lm, tokenizer


def check_weights(lm: PreTrainedModel, report: dict) -> None:
    """Refuse weights that are not those of `config.json`: transformers fills what is missing with
    random numbers."""
    wrong = [
        f"{key} is {tuple(found)}, not {tuple(own)}"
        for key, found, own in sorted(report["mismatched_keys"])
    ]
    wrong += [f"{key} is missing" for key in sorted(report["missing_keys"])]
    # A vision tower's weights may be left over, but none of the language model's layers and no
    # classifier.
    extra = ("model.layers.", "score.", "classifier.")
    wrong += [
        f"{key} has no place" for key in sorted(report["unexpected_keys"]) if key.startswith(extra)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config.json, first: {wrong[0]}")
    head = getattr(lm, "lm_head", None)
    # `Policy.forward` uses its weight alone
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"{type(lm).__name__} has no output head lm_head without a bias")


def eos_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token id that ends a response: chat models often have one in the tokenizer and more in
    the config."""
    declared = lm.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    if not all(isinstance(one, int | None) for one in ids):
        raise BadInput(
            f"--model: generation_config.json names an EOS token that is no number ({declared})"
        )
    ids = set(ids) - {None}
    if not ids:
        raise BadInput(
            "--model: neither its tokenizer nor its generation config names an EOS token"
        )
    return ids


def routers(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules that send tokens to experts, a layer each; none in a dense model."""
    return [module for module in lm.modules() if type(module).__name__.endswith("Router")]


class Selection(TorchFunctionMode):
    """Within it `torch.topk` takes the experts `given` `[tokens, k]`, if any, not the best; `seen`
    lists what it took.

    A router computes scores, takes the top k, and derives the experts' weights from those.
    Replacing only the choice leaves the rest, softmax or sigmoid, before or after the top k, to the
    model's own code, and the gradient too.
    """

    def __init__(self, given: Tensor | None = None):
        super().__init__()
        self.given, self.seen = given, []

    def __torch_function__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            if self.given is not None:
                chosen = self.given.view_as(result.indices)  # [tokens, k]
                result = torch.return_types.topk((args[0].gather(-1, chosen), chosen))
            self.seen.append(result.indices.flatten(0, -2))  # [tokens, k]
        return result


class Routing:
    """Records which experts a mixture-of-experts model sends each token to, and can replay a
    recorded choice.

    Replay fixes the selection only: the experts' weights come from the current scores at the
    recorded indices, so that the router keeps its gradient. Where the model has no experts, or a
    router whose choice cannot be replayed, `active` is False and `why_not` says so: the model is
    then left as it is.
    """

    def __init__(self, lm: PreTrainedModel):
        self.why_not = why_not_replayed(lm)
        self.active = not self.why_not
        # Of the last forward pass, a layer each: [tokens, k]
        self.last: list[Tensor] = [None] * len(routers(lm))
        self.replay: Tensor | None = None  # [tokens, layers, k], for the forward passes to come
        for layer, router in enumerate(routers(lm) if self.active else []):
            router.forward = partial(self._choose, layer, router.forward)

    def _choose(self, layer: int, forward: Callable, *inputs: Tensor, **named: object) -> object:
        given = None if self.replay is None else self.replay[:, layer].long()  # [tokens, k]
        with Selection(given) as selection:
            output = forward(*inputs, **named)
        self.last[layer] = selection.seen[0]
        return output

    def recorded(self) -> Tensor:
        """The last forward pass's choices, `[tokens, layers, k]`, in row order of its inputs."""
        return torch.stack(self.last, dim=1).to(torch.int16)


def why_not_replayed(lm: PreTrainedModel) -> str:
    """Why no choice of experts can be recorded and replayed in this model; "" where it can."""
    found, width = routers(lm), getattr(lm.config.get_text_config(), "hidden_size", 0)
    if odd := {type(router).__name__ for router in found if not replayable(router, width)}:
        return f"chooses experts by {min(odd)}, which cannot be replayed (use one of {FAMILIES})"
    return "" if found else "has no experts"


def replayable(router: nn.Module, width: int) -> bool:
    """Whether a copy of `router`, on random numbers, follows a replayed choice, and gives the same
    for its own one."""
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    # Whatever the original's device and precision
    probe = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    for values in filter(torch.is_floating_point, (*probe.parameters(), *probe.buffers())):
        values.data = torch.randn(values.shape, generator=generator)
    hidden, given, outputs = torch.randn(8, width, generator=generator), None, []  # [tokens, H]
    try:
        with torch.no_grad():
            # Freely; its own choice replayed; each token's choice given to the next token
            for step in range(3):
                with Selection(given) as selection:
                    outputs.append(probe(hidden.clone()))
                # a router that chooses groups first, or by sorting, cannot be replayed
                (chosen,) = selection.seen
                given = chosen if step == 0 else chosen.roll(1, dims=0)
    except Exception:  # another's code, called with what may not be enough
        return False
    return all(map(torch.equal, outputs[0], outputs[1])) and any(
        torch.equal(part, chosen) for part in outputs[2]
    )


class Policy(nn.Module):
    """A causal language model seen as a policy: token ids in, log π(token) and entropy of the asked
    positions out.

    The output head runs inside this module's forward, so that FSDP has gathered its weight when we
    use it by hand.
    """

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm, self.routing = lm, Routing(lm)

    def forward(
        self, sequences: Tensor, predicts: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`sequences [n, S]` right-padded, `predicts [n, S]` true where the NEXT token is wanted ->
        two `[M]` vectors.

        With right padding and causal attention no real token ever sees a pad: no attention mask is
        needed.
        """
        hidden = self.lm.base_model(
            input_ids=sequences, use_cache=False
        ).last_hidden_state  # [n, S, H]
        targets = sequences.roll(-1, dims=1)[predicts]  # [M]
        return token_logprobs(hidden[predicts], self.lm.lm_head.weight, targets, temperature)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets], and the entropy of that softmax (nats,
    no gradient).

    hidden `[M, H]`, weight `[V, H]`, targets `[M]` -> logp `[M]`, entropy `[M]`, float32.
    """
    return TokenLogprobs.apply(hidden, weight, targets, temperature)


class TokenLogprobs(torch.autograd.Function):
    """The logits are made a block of rows at a time, and again in the backward pass.

    At a vocabulary of 152k, 16k tokens of float32 logits are 10 GB a copy, and the plain formula
    keeps several.
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
        logp, entropy = (
            torch.empty(len(hidden), device=hidden.device) for _ in range(2)
        )  # [M], [M]
        for rows in TokenLogprobs.blocks(hidden, weight):
            logprobs = TokenLogprobs.logits(hidden[rows], weight, temperature).log_softmax(
                -1
            )  # [b, V]
            logp[rows] = logprobs.gather(-1, targets[rows, None])[:, 0]
            entropy[rows] = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: object, d_logp: Tensor, _: None) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)  # [M, H]
        # Summed over blocks in float32: in bfloat16 every block's sum would round what came before
        # it.
        d_weight = torch.zeros_like(weight, dtype=torch.float32)  # [V, H]
        for rows in TokenLogprobs.blocks(hidden, weight):
            p = TokenLogprobs.logits(hidden[rows], weight, ctx.temperature).softmax(-1)  # [b, V]
            # d log p(target) / d logits = 1{target} - p
            d_logits = p.mul_(-d_logp[rows, None])  # [b, V]
            d_logits.scatter_add_(1, targets[rows, None], d_logp[rows, None])
            d_logits = (d_logits / ctx.temperature).to(weight.dtype)  # [b, V]
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.T @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None
