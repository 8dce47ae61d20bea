"""The files of a run folder: the folder's name, atomic writing, JSON lines and config.json."""

import contextlib
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from common.cli import BadInput, RunStopped, blame

# Perhaps the disk is full or read-only, or somebody has moved the folder.
UNWRITTEN = "cannot write {}; go on with --resume once that is fixed"


def numbered(name: Path) -> Iterator[Path]:
    """Yield the folder names name, name.2, name.3, ..."""
    yield name
    for number in count(2):
        yield name.with_name(f"{name.name}.{number}")


def new_folder(name: Path) -> Path:
    """Make the folder `name`, or name.2, name.3, ... if it is not empty."""
    for folder in numbered(name):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            if not any(folder.iterdir()):
                # If two runs start at once, only one of them can make this file.
                (folder / "metrics.jsonl").touch(exist_ok=False)
                return folder


def saved_config(folder: Path) -> dict:
    """Read config.json of the run in `folder`; {} if it is missing or of another program."""
    path = folder / "config.json"
    with blame(f"{path}: damaged, no JSON"):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        return config if {"algorithm", "acted", "task", "seed"} <= config.keys() else {}


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write atomically: yield a path that is renamed to `path` at the end, removed on failure."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        flush_to_disk(partial)  # else a power loss could leave an empty file under the new name
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text atomically."""
    with blame(UNWRITTEN.format(path), RunStopped), atomic_write(path) as partial:
        partial.write_text(text, "utf-8")


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def as_lines(rows: list[dict]) -> str:
    """Write rows as JSON lines. JSON has no NaN and no infinities, so they become null."""
    plain = (json.loads(json.dumps(row), parse_constant=lambda name: None) for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in plain)


def append(path: Path, rows: list[dict]) -> None:
    """Append rows to a JSON-lines file."""
    text = as_lines(rows)
    with blame(UNWRITTEN.format(path), RunStopped):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        flush_to_disk(path)


def read_lines(path: Path) -> list[dict]:
    """Read a run's JSON-lines file, without a last line that a kill has cut short."""
    if not path.is_file():  # reading a pipe could wait for ever
        raise BadInput(f"{path}: no such file")
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise BadInput(f"{path}:{number}: damaged, repair or remove the line") from error
    return rows
