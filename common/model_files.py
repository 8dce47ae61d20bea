"""The files of a model's folder: where they are and what they declare."""

import contextlib
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub.constants import ENDPOINT
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from common.cli import BadInput, blame, say

TINY = Path(__file__).with_name("tiny")
EMBEDDED = {
    "tiny": TINY / "model",
    "tiny-moe": TINY / "model-moe",
    "tiny-teacher": TINY / "model-teacher",
}


def source_of(name: str, flag: str = "--model") -> str:
    """Return the folder or hub name of a model; raise BadInput if it can be neither."""
    source = str(EMBEDDED.get(name, name))
    if name and Path(source).is_dir():
        if wrong := why_unusable(Path(source)):
            raise BadInput(f"{flag} {name}: {wrong}")
        return source
    if name.count("/") != 1:  # not a hub name
        known = f"use a folder, a hub name (owner/name), {' or '.join(EMBEDDED)}"
        raise BadInput(f"{flag} {name!r}: no such folder; {known}")
    unknown = "no such folder, and as a hub name neither cached nor within reach"
    with blame(f"{flag} {name}: {unknown}"):
        cached_file(source, "config.json", local_files_only=not hub_in_reach())
    return source


def hub_in_reach() -> bool:
    """Try once to reach the hub, which its library would try for a minute. Behind a proxy, leave it
    to the library."""
    hub = urlsplit(ENDPOINT)
    with contextlib.suppress(OSError):
        if not getproxies():
            socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
        return True
    return False


def why_unusable(folder: Path) -> str:
    """Return what is wrong with the files of a folder, or "". Libraries would say nothing."""
    files = {path.name for path in folder.iterdir()}
    if {"model.safetensors", "model.safetensors.index.json"} <= files:
        return "holds model.safetensors and model.safetensors.index.json: remove the older weights"
    if any(name.startswith("adapter_") for name in files):
        return "holds an adapter: merge it into its model, or remove it"
    if "chat_template.json" in files and "chat_template.jinja" not in files:
        return "holds chat_template.json, which no tokenizer reads: save it as chat_template.jinja"
    return ""


def read_json(source: str, name: str) -> dict:
    """Read a model's JSON file unchanged; return {} if it is missing."""
    try:
        path = cached_file(source, name)
    except OSError:
        return {}
    with blame(f"{name} is damaged, it holds no JSON object", ValueError):
        return dict(json.loads(Path(path).read_bytes()))


def config_to_save(config: dict, lm: PreTrainedModel, tied: bool) -> dict:
    """Return the entries of config.json as they are after training: float32, with the head that it
    really has."""
    config = config | {"architectures": [type(lm).__name__], "tie_word_embeddings": tied}
    for name in config.keys() & {"dtype", "torch_dtype"}:
        config[name] = "float32"
    return config


def eos_ids(declared: object, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the token ids that end a response: those that a model declares, the tokenizer's EOS, and
    the chat template's end of a turn, which base models do not declare."""
    ids = declared if isinstance(declared, list) else [declared]
    ids = [token_id for token_id in [*ids, tokenizer.eos_token_id] if token_id is not None]
    if not ids or not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"tokenizer and generation config name no EOS tokens by number: {ids}")
    ids = list(dict.fromkeys(ids))
    turn_end = [token_id for token_id in turn_end_of(tokenizer) if token_id not in ids]
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
