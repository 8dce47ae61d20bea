"""Loading a model and its tokenizer. Models that would be computed wrongly are refused here."""

import contextlib
import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from common.cli import BadInput, blame, say
from common.distributed import ALONE, World, from_rank_0
from common.scale.head import head_of, head_product

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
    """Return the folder or hub name of a model; raise BadInput if it can be neither."""
    source = str(EMBEDDED.get(name, name))
    if name and Path(source).is_dir():
        if not any(Path(source).glob("*.safetensors")):
            raise BadInput(f"{flag} {name}: the folder holds no *.safetensors weights")
        both = ("model.safetensors", "model.safetensors.index.json")
        if all(Path(source, file).exists() for file in both):
            raise BadInput(f"{flag} {name}: holds {' and '.join(both)}: remove the older weights")
    elif name.count("/") != 1:  # not a hub name
        known = f"use a folder, a hub name (owner/name), {' or '.join(EMBEDDED)}"
        raise BadInput(f"{flag} {name!r}: no such folder; {known}")
    return source


def config_of(source: str) -> PreTrainedConfig:
    """Read a model's config.json with our attention: sdpa, or eager if the family has no sdpa.

    The file may name another attention, even a kernel that transformers would download and run, and
    that would win over the argument of `from_pretrained`.
    """
    config = AutoConfig.from_pretrained(source, **SAFE)
    # Refuse it here, before transformers asks for the package of its quantisation method.
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantised: use a checkpoint that is not")
    config._attn_implementation = None
    return config


def parameters_of(name: str) -> int:
    """Count a model's parameters, from its config.json alone."""
    source = source_of(name)
    with blame(f"--model {name}: cannot be loaded"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(source), **SAFE).num_parameters()


def load_model(name: str, world: World = ALONE, flag: str = "--model") -> Loaded:
    """Load a model (float32; sdpa or eager attention) and its tokenizer, by hub name, folder or
    `tiny`. Errors name `flag`.

    Only rank 0 holds the weights, on the CPU: a copy on each rank of a node would multiply the
    memory. The others know the shapes (meta device) until `broadcast_module` sends the weights.
    Weights are float32 because they are the optimiser's master copy: at lr 1e-6 an update is
    smaller than the spacing of bfloat16 numbers and would round to nothing. The forward pass casts
    them down (see `distributed.shard`).
    """
    source = source_of(name, flag)
    logging.set_verbosity_error()  # check_weights refuses what transformers only warns about
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    # transformers refuses to load, or to save, some models' own generation configs: see read_json.
    report["generation_config"] = GenerationConfig()
    known = None  # only rank 0 knows EOS, whether the head is tied, and the attention
    with blame(f"{flag} {name}: cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source, **SAFE)
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")  # transformers has made up an empty one
        config = config_of(source)
        options = SAFE | {"config": config, "dtype": torch.float32}
        if world.rank == 0:
            lm, loaded = AutoModelForCausalLM.from_pretrained(source, **options, **report)
            check_structure(lm)
            check_weights(loaded)
            read = read_json(source, "generation_config.json")
            declared = read or read_json(source, "config.json")
            eos = eos_ids(declared.get("eos_token_id"), tokenizer)
            # Look at the weights, because a file may have a head although config.json says tied.
            tied = lm.lm_head.weight is lm.get_input_embeddings().weight
            known = eos, tied, lm.config._attn_implementation
            # A hash for config.json, because a resumed run must have begun from the same weights.
            firsts = torch.cat([weight.detach().flatten()[:64] for weight in lm.parameters()])
            tokenizer.weights = hashlib.sha256(firsts.numpy().tobytes()).hexdigest()[:16]
            lm.generation = read | {"eos_token_id": eos if len(eos) > 1 else eos[0]}
    if world.size > 1:
        known = from_rank_0(known)
    eos, config.tie_word_embeddings, config._attn_implementation = known
    if world.rank > 0:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(**options).eval()
    lm.config.tie_word_embeddings = config.tie_word_embeddings
    lm.generation_config.eos_token_id = eos
    # The tokenizer's own limit is often missing, or another model's.
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    tokenizer.model_max_length = positions or tokenizer.model_max_length
    tokenizer.embeddings = len(lm.get_input_embeddings().weight)  # see `as_problem`
    return lm, tokenizer


def check_saving(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model that cannot be saved, before it is trained."""
    with blame(f"--save_hf: {name} cannot be saved"), TemporaryDirectory() as folder:
        config_of(source_of(name)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_weights(loaded: dict) -> None:
    """Refuse weights that do not fit `config.json`; transformers would fill in random numbers."""
    wrong = sorted(loaded["missing_keys"])
    wrong += [key for key, _, _ in loaded["mismatched_keys"]]
    # A vision tower's weights may be left over, but no layer and no classifier.
    parts = ("model.layers.", "score.", "classifier.")
    wrong += [key for key in loaded["unexpected_keys"] if key.startswith(parts)]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config.json, first: {wrong[0]}")


def check_structure(lm: PreTrainedModel) -> None:
    """Refuse models that `Policy` cannot compute, or would compute wrongly. Choose eager attention
    if sdpa computes something else than the model's own."""
    name = type(lm).__name__
    if lm.config.get_text_config() is not lm.config:
        raise ValueError(f"{name} is more than a text model: use the family's text-only checkpoint")
    if lm.base_model is lm or not hasattr(getattr(lm, "lm_head", None), "weight"):
        raise ValueError(f"{name} has no lm_head over a base model: not supported")
    # These types depend on the longest row of a micro-batch, and so would a row's log-probs.
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in str(getattr(lm.config, "rope_parameters", "")):  # maybe nested by layer
            raise ValueError(
                f"RoPE type {kind} scales by the batch's longest row: use another model"
            )
    some = torch.linspace(0, len(lm.lm_head.weight) - 1, 12).long()  # [12]
    ids = torch.stack([some[:8], torch.cat([some[:4], some[8:]])])  # [2, 8]: the first 4 are equal

    def gap(ours: Tensor, theirs: Tensor) -> float:
        return (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max().item()

    with torch.no_grad():
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [2, 8, H]
        ours = head_of(lm).logits(head_product(hidden, lm.lm_head.weight))  # [2, 8, V]
        theirs = lm(input_ids=ids, use_cache=False).logits  # [2, 8, V]
        usual = lm.config._attn_implementation  # eager if the family has no sdpa (sinks)
        lm.set_attn_implementation("eager")  # the plain formula, with all that the family adds
        plain = lm(input_ids=ids, use_cache=False).logits  # [2, 8, V]
    off = gap(ours, theirs)
    if off > 1e-4:  # rounding: 1e-6
        raise ValueError(f"{name} makes other logits of its head's product: off by {off:.2g}")
    off = gap(ours[0, :4], ours[1, :4])
    if off > 1e-3:
        raise ValueError(f"{name} is not causal: later tokens change earlier logits by {off:.2g}")
    if usual == "eager" and hasattr(lm.config, "index_topk"):  # DeepSeek-V4, HY-V4
        raise ValueError(f"{name}: its indexer is not causal in long rows: use another model")
    # Gemma 2 caps scores, which sdpa does not. Mamba's layers have no attention at all.
    if gap(theirs, plain) > 1e-3 or (usual == "eager" and not lm._is_stateful):
        say(f"{name}: sdpa is not its attention, so eager is used: slower, and more memory")
    else:
        lm.set_attn_implementation(usual)


def read_json(source: str, name: str) -> dict:
    """Read a model's JSON file unchanged; return {} if it is missing or holds no JSON object."""
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(Path(cached_file(source, name)).read_bytes())
        return read if isinstance(read, dict) else {}
    return {}


def eos_ids(declared: object, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the token ids that end a response: those that a model declares, the tokenizer's EOS, and
    the chat template's end of a turn, which base models do not declare."""
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
    """Return the special token, if any, with which the chat template ends the assistant's turn."""
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "So it is."}]
    with contextlib.suppress(Exception):  # no template, or one that refuses this chat
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        behind = text.partition("So it is.")[2].strip()
        first = tokenizer(behind, add_special_tokens=False)["input_ids"][0]
        return [first] if tokenizer.added_tokens_decoder[first].special else []
    return []
