"""The files of a model's folder: what they declare, and what is wrong with them."""

import contextlib
import json
import re
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file, is_protobuf_available, is_sentencepiece_available

from common.cli import blame, say


def fault_of(folder: Path) -> str:
    """Return what is wrong with the files of a folder, or "". Libraries would ignore it, or fail in
    words of their own."""
    files = {path.name for path in folder.iterdir() if path.is_file()}
    small = [name for name in files if (folder / name).stat().st_size < 1000]
    lfs = b"version https://git-lfs"  # how the texts begin that a clone without git-lfs has
    git_lfs = [name for name in small if (folder / name).read_bytes().startswith(lfs)]
    adapter = [name for name in files if name.startswith("adapter_")]
    both = {"model.safetensors", "model.safetensors.index.json"}
    lacks = not (is_sentencepiece_available() and is_protobuf_available())
    sentencepiece = "tokenizer.model" in files and "tokenizer.json" not in files
    faults = {
        "the folder holds no *.safetensors weights": not any(folder.glob("*.safetensors")),
        f"holds {' and '.join(sorted(both))}: remove the older weights": both <= files,
        f"a Git LFS pointer instead of the file, {git_lfs}: git lfs pull": git_lfs,
        f"holds an adapter, {adapter}: merge it into its model, or remove it": adapter,
        "its tokenizer.model needs sentencepiece and protobuf": sentencepiece and lacks,
    }
    return next((fault for fault, holds in faults.items() if holds), "")


def read_json(source: str, name: str) -> dict:
    """Read a model's JSON file unchanged; return {} if it is missing."""
    try:
        path = cached_file(source, name)
    except OSError:
        return {}
    with blame(f"{name} is damaged, it holds no JSON object", ValueError):
        return dict(json.loads(Path(path).read_bytes()))


def after_training(config: dict, lm: PreTrainedModel, tied: bool) -> dict:
    """Return the entries of config.json as they are after training: float32, with the head that it
    really has, and without layers that predict further tokens (MTP)."""
    config = config | {"architectures": [type(lm).__name__], "tie_word_embeddings": tied}
    for name, value in config.items():
        if name in ("dtype", "torch_dtype"):
            config[name] = "float32"
        if re.search("mtp|nextn", name) and isinstance(value, int) and value:
            say(f"{name} is {value} in config.json, but such layers are not loaded or saved")
            config[name] = type(value)(0)  # 0, or False
    return config


def check_rope(config: dict) -> None:
    """Refuse a config.json whose kind of RoPE is unknown, or depends on the longest row of a
    micro-batch (dynamic, longrope), on which a row's log-probs would then depend, too."""
    entries = str([config.get(name) for name in ("rope_parameters", "rope_scaling")])
    kinds = set(re.findall(r"'(?:rope_)?type': '(\w+)'", entries))  # maybe nested by layer
    known = {"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"}
    if odd := kinds - known:
        raise ValueError(f"RoPE of type {min(odd)} cannot be trained: use another model")


def eos_ids(declared: object, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the token ids that end a response: those that a model declares, the tokenizer's EOS, and
    the chat template's end of a turn, which base models do not declare."""
    ids = declared if isinstance(declared, list) else [declared]
    ids = [one for one in [*ids, tokenizer.eos_token_id] if one is not None]
    if not ids or not all(isinstance(one, int) for one in ids):
        raise ValueError(f"tokenizer and generation config name no EOS tokens by number: {ids}")
    ids = list(dict.fromkeys(ids))
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
