"""Loading a model and its tokenizer, and refusing what is not whole."""

import difflib
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from common.distributed import BadInput, Refused, World, from_environment, together

logging.disable_progress_bar()  # the run has its own
TINY = Path(__file__).parent / "tiny"
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
ALONE = World(0, 1, torch.device("cpu"))
EMBEDDED = {"tiny": TINY / "model", "tiny-moe": TINY / "model-moe"}
EMBEDDED |= {f"tiny-{size}": TINY / f"model-{size}" for size in ("30k", "500k")}


def load_model(name: str, world: World = ALONE, flag: str = "--model") -> Loaded:
    """Model and tokenizer, by hub name, folder or `tiny`; `flag` is named if they are wrong.

    Rank 0 alone holds the weights, or a node would need its number of ranks times their memory. The
    others know their shapes (meta device), until `distributed.receive` hands them out. All refuse
    what one refuses.
    """
    for first_on_node in (True, False):  # it downloads, the others find the hub's cache
        with together(world, Refused, f"{flag} {name}: cannot be read"):
            if first_on_node == (from_environment("LOCAL_RANK", 0) == 0):
                lm, tokenizer = read_model(name, flag, whole=world.rank == 0)
    eos = [lm.generation_config.eos_token_id]
    if world.size > 1:
        dist.broadcast_object_list(eos)
    lm.generation_config.eos_token_id = eos[0]
    return lm, tokenizer


def read_model(name: str, flag: str, whole: bool) -> Loaded:
    """Model (float32, on the CPU or, if not `whole`, on meta; attention by sdpa) and tokenizer.

    Weights are loaded in float32 because they are the optimiser's master copy: at lr 1e-6 an update
    is smaller than the spacing of bfloat16 numbers and would round to nothing. The forward pass
    casts down (see `distributed.shard`).
    """
    source = Path(EMBEDDED.get(name, name))
    local = bool(name) and source.is_dir()
    if not local and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):  # no hub name: do not ask there
        close = difflib.get_close_matches(name, EMBEDDED, 1)
        known = f"use a folder, a hub name (owner/name), {' or '.join(EMBEDDED)}"
        advice = f"did you mean {close[0]}?" if close else known
        raise BadInput(f"{flag} {name!r}: no such folder; {advice}")
    if local and not (any(source.glob("*.safetensors")) and (source / "config.json").is_file()):
        raise BadInput(f"{flag} {name}: the folder holds no config.json with *.safetensors weights")
    logging.set_verbosity_error()  # what transformers only warns about is refused by check_weights
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        # Where there is none, transformers makes up one with special tokens alone.
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")
        if whole:
            lm, found = AutoModelForCausalLM.from_pretrained(source, **options, **report)
            check_weights(lm, found)
        else:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(source)
                lm = AutoModelForCausalLM.from_config(config, **options).eval()
    except Exception as error:  # transformers, safetensors, tokenizers, the hub's client: any kind
        where = "cannot be loaded" if local else "not a folder, and not loadable from the hub"
        reason = " ".join(str(error).split())[:240] or type(error).__name__
        raise BadInput(f"{flag} {name}: {where} ({reason})") from error
    if whole:
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
    mismatched = sorted(report["mismatched_keys"])
    wrong = [f"{key} is {tuple(found)}, not {tuple(own)}" for key, found, own in mismatched]
    wrong += [f"{key} is missing" for key in sorted(report["missing_keys"])]
    # A vision tower's weights may be left over, but no layer of the language model, no classifier.
    parts = ("model.layers.", "score.", "classifier.")
    extra = sorted(key for key in report["unexpected_keys"] if key.startswith(parts))
    wrong += [f"{key} has no place" for key in extra]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config.json, first: {wrong[0]}")
    head = getattr(lm, "lm_head", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:  # Policy uses its weight alone
        raise ValueError(f"{type(lm).__name__} has no output head lm_head without a bias")


def eos_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token id that ends a response: the tokenizer's, and a chat model's config has more."""
    declared = lm.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    if not all(isinstance(one, int | None) for one in ids):
        wrong = f"names an EOS token that is no number ({declared})"
        raise BadInput(f"--model: generation_config.json {wrong}")
    if ids == [None] * len(ids):
        raise BadInput("--model: neither tokenizer nor generation config names an EOS token")
    return set(ids) - {None}


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
