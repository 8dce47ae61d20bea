"""The run folder: making and locking it, and file writes that survive a kill or a power loss."""

import contextlib
import fcntl
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
    """A new folder `name`, or, where that is not empty, name.2, name.3, ..."""
    for number in count(1):
        folder = name if number == 1 else name.with_name(f"{name.name}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            if not any(folder.iterdir()):
                # Of two runs that start at once only one makes this file.
                (folder / "metrics.jsonl").touch(exist_ok=False)
                return folder


def runs_called(name: Path) -> list[Path]:
    """The runs name, name.2, name.3, ..., newest first."""
    numbered = {1: name}
    for path in name.parent.glob("*"):
        found = re.fullmatch(re.escape(name.name) + r"\.([0-9]+)", path.name)
        if found:
            numbered[int(found[1])] = path
    newest_first = [numbered[number] for number in sorted(numbered, reverse=True)]
    return [folder for folder in newest_first if saved_config(folder)]


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first; other names are ignored."""
    found = (folder / "checkpoints").glob("step_*")
    found = [path for path in found if re.fullmatch("step_[0-9]{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def how_to_continue(folder: Path) -> str:
    """Advice for a run in `folder` that had to stop."""
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
    """config.json of the run in `folder`; empty if there is none or another program wrote it."""
    path = folder / "config.json"
    with blame(f"{path}: damaged, no JSON"):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        return config if {"algorithm", "acted", "task", "seed"} <= config.keys() else {}


def other_flags(folder: Path, config: dict) -> str:
    """The first difference between the run in `folder` and `config` that forbids to resume it; ""
    if there is none."""
    saved = saved_config(folder)
    if not saved:
        return "no config.json of a run"
    fixed = sorted(config.keys() - FREE_ON_RESUME - {"data"})
    for name in fixed:
        if saved.get(name) != config[name]:
            return f"{name} {saved.get(name)!r}, not {config[name]!r}"
    if saved.get("data") != config["data"]:
        return "other problems, or another reward: a file has changed, or depends on chance"
    return ""


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Atomic writing: a path to write to, renamed to `path` at the end and removed on failure."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync(partial)  # else a power loss could leave the new name with nothing in it
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for folders
            raise
    finally:
        os.close(descriptor)


def as_lines(rows: list[dict]) -> str:
    """Rows as JSON lines. JSON has no NaN and no infinities: they become null."""
    plain = (json.loads(json.dumps(row), parse_constant=lambda name: None) for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in plain)


def read_lines(path: Path) -> list[dict]:
    """The rows of a run's JSON-lines file, without a last one that a kill has cut short."""
    if not path.is_file():  # reading a pipe could wait for ever
        raise BadInput(f"{path}: no such file")
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            with blame(f"{path}:{number}: damaged, repair or remove the line"):
                row = json.loads(line)
                rows.append(row | {"step": int(row["step"])})
        except BadInput:
            if number < len(lines):
                raise
    return rows
