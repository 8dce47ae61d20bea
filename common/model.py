"""Loading a model and its tokenizer, and refusing what is not whole."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from common.distributed import BadInput, blame

logging.disable_progress_bar()  # the run has its own
TINY = Path(__file__).parent / "tiny"
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
EMBEDDED = {"tiny": TINY / "model", "tiny-moe": TINY / "model-moe"}
EMBEDDED |= {f"tiny-{size}": TINY / f"model-{size}" for size in ("30k", "500k")}


def load_model(name: str, flag: str = "--model") -> Loaded:
    """Model (float32, on the CPU; attention by sdpa) and tokenizer, by hub name, folder or `tiny`;
    `flag` is named if they are wrong.

    Weights are loaded in float32 because they are the optimiser's master copy: at lr 1e-6 an update
    is smaller than the spacing of bfloat16 numbers and would round to nothing. The forward pass
    casts down (see `distributed.shard`).
    """
    source = EMBEDDED.get(name, name)
    if not name or not Path(source).is_dir() and name.count("/") != 1:  # no hub name
        raise BadInput(f"{flag} {name!r}: no folder, no hub name, none of {', '.join(EMBEDDED)}")
    logging.set_verbosity_error()  # what transformers only warns about is refused by check_weights
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with blame(f"{flag} {name}: cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        lm, found = AutoModelForCausalLM.from_pretrained(source, **options, **report)
        check_weights(lm, found)
        # Where there is none, transformers makes up one with special tokens alone.
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")
        lm.generation_config.eos_token_id = sorted(eos_ids(lm, tokenizer))
    # The tokenizer's own limit is often another model's or none.
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    tokenizer.model_max_length = positions or tokenizer.model_max_length
    # Tokens beyond have no meaning to this model.
    tokenizer.embedded = lm.get_input_embeddings().num_embeddings
    # Dropout would make the trainer's log-probs another policy's than the sampler's.
    for module in lm.modules():
        for attribute in ("p", "attention_dropout", "dropout", "hidden_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return lm, tokenizer


def check_weights(lm: PreTrainedModel, report: dict) -> None:
    """Refuse weights that do not fit `config.json`: transformers makes up what is missing."""
    # A vision tower's weights may be left over, but no layer of the language model, no classifier.
    parts = ("model.layers.", "score.", "classifier.")
    extra = [key for key in report["unexpected_keys"] if key.startswith(parts)]
    wrong = [*report["missing_keys"], *map(str, report["mismatched_keys"]), *extra]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config.json, first: {min(wrong)}")
    head = getattr(lm, "lm_head", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:  # Policy uses its weight alone
        raise ValueError(f"{type(lm).__name__} has no output head lm_head without a bias")


def eos_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token id that ends a response: the tokenizer's, and a chat model's config has more."""
    declared = lm.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])}
    if ids == {None}:
        raise ValueError("neither tokenizer nor generation config names an EOS token")
    return ids - {None}


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden `[..., H]` @ weight `[V, H]` transposed: logits `[..., V]`, float32.

    On a GPU the product of bfloat16 numbers leaves the kernel in float32. Rounded to bfloat16,
    logits of 16 to 32 would be 0.125 apart and log-probs off by 0.01: sampler and trainer would
    disagree, and no ratio would be 1. (CPUs have no such kernel.)
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        flat = hidden.flatten(0, -2)  # [b, H]
        logits = torch.mm(flat, weight.T, out_dtype=torch.float32)  # [b, V]
        return logits.unflatten(0, hidden.shape[:-1])
    return nn.functional.linear(hidden, weight).float()
