"""The run folder: one that the run made itself, and files that are whole or not there."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from common.plumbing.errors import BadInput, blame


# What may change on resume: how long, where, how often, and what trades memory for time
FREE_ON_RESUME = set(
    """acted steps run_dir resume save_every save_hf eval_every eval_samples sample_every
    wandb
    ranks shard_ranks micro_tokens rollout_rows sampler_tolerance gradient_checkpointing
    offload offload_reference vllm_memory vllm_sleep""".split()
)


def new_folder(name: Path) -> Path:
    """A folder that nobody else has: `name`, or where something is in it name.2, name.3, ...

    An error where the name is a file's, or a link's to nowhere.
    """
    for number in count(1):
        folder = name if number == 1 else name.with_name(f"{name.name}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            if not any(folder.iterdir()):
                (folder / "metrics.jsonl").touch(exist_ok=False)  # of two runs at once one makes it
                return folder


def runs_called(name: Path) -> list[Path]:
    """The runs name, name.2, name.3, ..., newest first."""
    numbered = {1: name}
    for path in name.parent.glob("*"):
        if found := re.fullmatch(re.escape(name.name) + r"\.([0-9]+)", path.name):
            numbered[int(found[1])] = path
    return [numbered[i] for i in sorted(numbered)[::-1] if saved_config(numbered[i])]


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first; what has another name is none of ours."""
    found = (folder / "checkpoints").glob("step_*")
    found = [path for path in found if re.fullmatch("step_[0-9]{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def way_on(folder: Path) -> str:
    """What to do about a run in `folder` that had to stop."""
    return "go on with --resume" if checkpoints(folder) else "nothing is saved yet: start again"


def lock(folder: Path) -> int:
    """Keep other runs out of `folder` until the descriptor returned is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"--resume: a run is under way in {folder}") from None
    except OSError:
        pass  # some network file systems have no locks
    return descriptor


def saved_config(folder: Path) -> dict:
    """config.json of the run in `folder`; empty where there is none, or another program's."""
    path = folder / "config.json"
    with blame(f"{path}: damaged, no JSON"):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        return config if {"algorithm", "acted", "task", "seed"} <= config.keys() else {}


def other_flags(folder: Path, config: dict) -> str:
    """What makes the run in `folder` another one than that of `config`; "" if nothing does."""
    saved = saved_config(folder)
    names = [name for name in config.keys() - FREE_ON_RESUME if saved.get(name) != config[name]]
    if names == ["data"]:
        return "other problems, or another reward: a file has changed, or depends on chance"
    first = sorted(name for name in names if name != "data")[:1]
    return "".join(f"{name} {saved.get(name)!r}, not {config[name]!r}" for name in first)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all is written, and is gone if that fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def as_lines(rows: list[dict]) -> str:
    """Rows as JSON lines. JSON has no NaN and no infinities: they become null."""
    plain = (json.loads(json.dumps(row), parse_constant=lambda name: None) for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in plain)


def read_lines(path: Path) -> list[dict]:
    """The rows of a run's JSON-lines file, but for a last one cut short by a kill."""
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        damaged = blame(f"{path}:{number}: damaged, repair or remove the line")
        with damaged if number < len(lines) else contextlib.suppress(Exception):
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
    return rows


def checksum(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
