"""Loading a model and its tokenizer; models whose files do not fit together are refused."""

import contextlib
import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from common.cli import BadInput, blame, say
from common.distributed import ALONE, World

logging.disable_progress_bar()  # the run has its own
TINY = Path(__file__).with_name("tiny")
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
EMBEDDED = {
    "tiny": TINY / "model",
    "tiny-moe": TINY / "model-moe",
    "tiny-teacher": TINY / "model-teacher",
}


SAFE = {"trust_remote_code": False}  # a model folder's own code never runs


def source_of(name: str, flag: str = "--model") -> str:
    """The folder or hub name of a model; BadInput where it can be neither."""
    source = str(EMBEDDED.get(name, name))
    if name and Path(source).is_dir():
        if not any(Path(source).glob("*.safetensors")):
            raise BadInput(f"{flag} {name}: the folder holds no *.safetensors weights")
    elif name.count("/") != 1:  # no hub name
        known = f"use a folder, a hub name (owner/name), {' or '.join(EMBEDDED)}"
        raise BadInput(f"{flag} {name!r}: no such folder; {known}")
    return source


def config_of(source: str) -> PreTrainedConfig:
    """A model's config.json with our attention.

    The file may name another attention, even a kernel that transformers would download and run, and
    that name wins over the argument of `from_pretrained`.
    """
    config = AutoConfig.from_pretrained(source, **SAFE)
    config._attn_implementation = "sdpa"
    return config


def parameters_of(name: str) -> int:
    """The number of a model's parameters, from its config.json alone."""
    source = source_of(name)
    with blame(f"--model {name}: cannot be loaded"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(source), **SAFE).num_parameters()


def load_model(name: str, world: World = ALONE, flag: str = "--model") -> Loaded:
    """Model (float32; attention by sdpa) and tokenizer, by hub name, folder or `tiny`; `flag` is
    named if they are wrong.

    Only rank 0 holds the weights, on the CPU; the other ranks of a node would need the same memory
    again. They know the shapes (meta device) until `broadcast_module` sends the weights.
    Weights are float32 because they are the optimiser's master copy: at lr 1e-6 an update is
    smaller than the spacing of bfloat16 numbers and would round to nothing. The forward pass casts
    down (see `distributed.shard`).
    """
    source = source_of(name, flag)
    logging.set_verbosity_error()  # check_weights refuses what transformers only warns about
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    # Of the folder's own, transformers refuses some to load and more to save: see `read_json`.
    report["generation_config"] = GenerationConfig()
    with blame(f"{flag} {name}: cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source, **SAFE)
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")  # transformers makes one up
        options = SAFE | {"config": config_of(source), "dtype": torch.float32}
        if world.rank == 0:
            lm, loaded = AutoModelForCausalLM.from_pretrained(source, **options, **report)
            check_structure(lm)
            check_weights(loaded)
            read = read_json(source, "generation_config.json")
            declared = read or read_json(source, "config.json")
            eos = eos_ids(declared.get("eos_token_id"), tokenizer)
            lm.generation_config.eos_token_id = eos
            # For config.json: a resumed run must begin from the same weights.
            firsts = torch.cat([weight.detach().flatten()[:64] for weight in lm.parameters()])
            tokenizer.weights = hashlib.sha256(firsts.numpy().tobytes()).hexdigest()[:16]
            lm.generation = read | {"eos_token_id": eos if len(eos) > 1 else eos[0]}
        else:
            with torch.device("meta"):
                lm = AutoModelForCausalLM.from_config(**options).eval()
    if world.size > 1:
        eos = [lm.generation_config.eos_token_id]
        dist.broadcast_object_list(eos)
        lm.generation_config.eos_token_id = eos[0]
    # The tokenizer's own limit is often another model's or none.
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    tokenizer.model_max_length = positions or tokenizer.model_max_length
    tokenizer.embeddings = len(lm.get_input_embeddings().weight)  # see `as_problem`
    return lm, tokenizer


def check_saving(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model that could be trained but not saved, before it is trained."""
    with blame(f"--save_hf: {name} cannot be saved"), TemporaryDirectory() as folder:
        config_of(source_of(name)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_weights(loaded: dict) -> None:
    """Refuse weights that do not fit `config.json`: transformers would fill in random numbers."""
    wrong = sorted(loaded["missing_keys"])
    wrong += [key for key, _, _ in loaded["mismatched_keys"]]
    # A vision tower's weights may be left over, but no layer of the language model, no classifier.
    parts = ("model.layers.", "score.", "classifier.")
    wrong += [key for key in loaded["unexpected_keys"] if key.startswith(parts)]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config.json, first: {wrong[0]}")


def check_structure(lm: PreTrainedModel) -> None:
    """Refuse models that `Policy` cannot compute, or would compute wrongly."""
    name = type(lm).__name__
    if lm.config.get_text_config() is not lm.config:
        raise ValueError(f"{name} is more than a text model: use the family's text-only checkpoint")
    if hasattr(lm.config, "quantization_config"):
        raise ValueError(f"{name} is quantised: use a checkpoint that is not")
    # These types look at the longest row of a micro-batch: log-probs would depend on other rows.
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in str(getattr(lm.config, "rope_parameters", "")):  # maybe by kind of layer
            raise ValueError(
                f"RoPE type {kind} scales by the batch's longest row: use another model"
            )
    ids = torch.linspace(0, len(lm.lm_head.weight) - 1, 4).long()[None]  # [1, 4]
    with torch.no_grad():
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [1, 4, H]
        product = head_product(hidden, lm.lm_head.weight)  # [1, 4, V]
        ours = head_of(lm).logits(product).log_softmax(-1)  # [1, 4, V]
        theirs = lm(input_ids=ids, use_cache=False).logits.log_softmax(-1)  # [1, 4, V]
    gap = (ours - theirs).abs().max().item()
    if gap > 1e-4:  # rounding: 1e-6
        raise ValueError(f"{name} makes other logits of its head's product: off by {gap:.2g}")


def read_json(source: str, name: str) -> dict:
    """A JSON file of a model as it stands there; {} where there is none, or no JSON object."""
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(Path(cached_file(source, name)).read_bytes())
        return read if isinstance(read, dict) else {}
    return {}


def eos_ids(declared: object, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a response: those that a model declares, the tokenizer's, and the
    chat template's end of a turn, which base models do not declare."""
    ids = declared if isinstance(declared, list) else [declared]
    ids = [one for one in dict.fromkeys([*ids, tokenizer.eos_token_id]) if one is not None]
    if not ids or not all(isinstance(one, int) for one in ids):
        raise ValueError("neither tokenizer nor generation config names EOS tokens by number")
    turn_end = [one for one in turn_end_of(tokenizer) if one not in ids]
    if turn_end:
        token = tokenizer.decode(turn_end)
        say(f"a response also ends at {token}, with which the chat template ends a turn")
    return ids + turn_end


def turn_end_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special token with which the chat template ends the assistant's turn, if it does."""
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "So it is."}]
    with contextlib.suppress(Exception):  # no template, or one for other chats
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        behind = text.partition("So it is.")[2].strip()
        first = tokenizer(behind, add_special_tokens=False)["input_ids"][0]
        return [first] if tokenizer.added_tokens_decoder[first].special else []
    return []


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden `[..., H]` @ weight `[V, H]` transposed: `[..., V]`, float32.

    On a GPU the product of bfloat16 numbers leaves the kernel in float32. Rounded to bfloat16,
    logits of 16 to 32 would be 0.125 apart and log-probs off by 0.01: sampler and trainer would
    disagree, and no ratio would be 1. (CPUs have no such kernel.)
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        flat = hidden.flatten(0, -2)  # [b, H]
        product = torch.mm(flat, weight.T, out_dtype=torch.float32)  # [b, V]
        return product.unflatten(0, hidden.shape[:-1])
    return nn.functional.linear(hidden, weight).float()


class Head(NamedTuple):
    """From a product hidden @ weight.T to logits: cap · tanh(product / cap), where a family caps
    them softly (0: it does not), over a temperature."""

    temperature: float = 1.0
    cap: float = 0.0

    def logits(self, product: Tensor) -> Tensor:
        """`[..., V]` -> `[..., V]`, float32."""
        if self.cap:
            product = self.cap * torch.tanh(product / self.cap)
        return product if self.temperature == 1 else product / self.temperature


def head_of(lm: PreTrainedModel, temperature: float = 1.0) -> Head:
    """A model's head, by what families call their factor and their cap in config.json."""
    factor = getattr(lm.config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(lm.config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(lm.config, "final_logit_softcapping", None) or 0.0  # Gemma
    return Head(temperature * divisor / factor, cap)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total [V, H]`, float32, += `left [V, b]` @ `right [b, H]`.

    On a GPU inside the product's kernel: nothing is rounded to bfloat16, written and read again.
    """
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
