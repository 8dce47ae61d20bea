"""The run folder: whose it is, one run at a time in it, files that are whole or not there."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from common.distributed import BadInput, RunStopped, blame, first_line

LOCK = "run.lock"
ROWS = ("metrics.jsonl", "silenced.jsonl")  # written line by line, and cut back on resume
OURS = set("algorithm acted ranks model task seed lr".split())  # what every run's config.json has


def spelled_out(path: str) -> Path:
    """`path` with `~`, `.`, `..` and a link at its end followed: a folder that can be moved."""
    folder = Path(os.path.expanduser(path))
    if str(folder).startswith("~"):
        raise BadInput(f"--run_dir {path}: no such user")
    nameless = os.path.islink(folder) or folder.name in ("", "..")
    return Path(os.path.realpath(folder)) if nameless else folder


def saved_config(folder: Path) -> dict:
    """config.json of the run in `folder`; empty where there is none, or another program's."""
    path = folder / "config.json"
    text = path.read_bytes() if path.is_file() else b"{}"
    with blame(f"{path}: damaged, no JSON"):
        config = json.loads(text)
    return config if isinstance(config, dict) and config.keys() >= OURS else {}


def inside_a_run(folder: Path) -> Path | None:
    """The run that `folder` would lie in, and be moved or deleted with."""
    for parent in folder.absolute().parents:
        # A damaged file, or one that is not for us to read, makes no run.
        with contextlib.suppress(BadInput, OSError):
            if saved_config(parent):
                return parent


def holds_a_run(folder: Path) -> bool:
    """Whether there is a run in `folder`, to be moved aside; the user's own files are refused."""
    if outer := inside_a_run(folder):
        raise BadInput(f"--run_dir {folder}: lies inside the run {outer}, give a folder beside it")
    names = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    strange = [name for name in sorted(names) if not name.startswith("evaluation-")]
    strange = [name for name in strange if not name.endswith(".partial")]
    if strange and not saved_config(folder):
        raise BadInput(f"--run_dir {folder}: holds {strange[0]} and no run, give an empty folder")
    return bool(names)


class Claim:
    """The right to write to a folder, which is made if need be, and unmade if it stays empty.

    One process at a time has it: the kernel gives the lock back when its holder ends, however.
    """

    def __init__(self, folder: Path):
        self.folder, self.lock = folder, None
        self.made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except (BadInput, OSError):
            self.release()
            raise

    def _take(self) -> None:
        while not self._holds():  # the last holder may have removed the file in between
            self._close()
            # Python hands no file on: no child keeps the lock.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self.lock = os.open(self.folder / LOCK, flags, 0o666)
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self.lock, 300).decode(errors="replace") or "just starting"
                self._close()  # the file stays: it is not ours
                wrong = f"--run_dir {self.folder}: another run writes there ({holder})"
                raise BadInput(wrong) from None
            except OSError as error:  # some network file systems
                print(f"{self.folder}: no lock ({first_line(error)}), keep other runs out of it")
        os.ftruncate(self.lock, 0)
        os.write(self.lock, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _holds(self) -> bool:
        """Whether the lock file in the folder is the one that is open here."""
        with contextlib.suppress(OSError):
            there = os.stat(self.folder / LOCK)
            return self.lock is not None and os.path.samestat(os.fstat(self.lock), there)
        return False

    def _close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
        self.lock = None

    def hold(self) -> None:
        """Stop if the folder was swapped: what is written now would be in another's."""
        if not self._holds():
            raise RunStopped(f"{self.folder} was moved or replaced under this run: it stops")

    def renew(self, fill: Callable[[Path], None]) -> Path:
        """Move the folder aside, to NAME.1 or the next number; a `fill`ed one takes its place."""
        here, name = self.folder, self.folder.name
        if Path.cwd().is_relative_to(here.resolve()):
            raise BadInput(f"--run_dir {here}: its run is not moved from under the shell")
        new = Claim(here.with_name(f".{name}.{os.getpid()}"))
        try:
            fill(new.folder)
            numbered = (here.with_name(f"{name}.{i}") for i in itertools.count(1))
            aside = here.rename(next(path for path in numbered if not path.exists()))
            new.folder.rename(here)
        except OSError:
            shutil.rmtree(new.folder)
            raise
        self.lock, new.lock, new.folder = new.lock, self.lock, aside
        new.release()
        return aside

    def release(self) -> None:
        """Let others in; of the folders made here, those that are empty go."""
        with contextlib.suppress(OSError):
            if self._holds():  # not if someone moved the folder away
                (self.folder / LOCK).unlink()
        self._close()
        for path in self.made:
            with contextlib.suppress(OSError):
                path.rmdir()
        self.made = []


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


def append(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file, all of them or, on a full disk, none."""
    data = as_lines(rows).encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):  # what still fitted
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
