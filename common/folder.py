"""The run folder: whose it is, one run at a time in it, files that are whole or not there."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from common.distributed import BadInput, RunStopped, first_line

LOCK = "run.lock"
# What a run writes line by line, and cuts back on resume
ROWS = ("metrics.jsonl", "silenced.jsonl")
OURS = set("algorithm acted ranks model task seed lr".split())  # what every run's config.json has


def spelled_out(path: str) -> Path:
    """`path` with `~`, `.`, `..` and a link at its end followed: a folder that has a name and can
    be moved."""
    folder = Path(os.path.expanduser(path))
    if str(folder).startswith("~"):
        raise BadInput(f"--run_dir {path}: no such user")
    return (
        Path(os.path.realpath(folder))
        if os.path.islink(folder) or folder.name in ("", "..")
        else folder
    )


def saved_config(folder: Path) -> dict:
    """config.json of the run in `folder`; empty where there is none, or only another program's."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadInput(f"{path}: damaged, no JSON ({first_line(error)})") from error
    return config if isinstance(config, dict) and config.keys() >= OURS else {}


def inside_a_run(folder: Path) -> Path | None:
    """The run that `folder` would lie in, and be moved or deleted with."""
    for parent in folder.absolute().parents:
        # Another's file, or a folder that is not for us to read
        with contextlib.suppress(BadInput, OSError):
            if saved_config(parent):
                return parent


def holds_a_run(folder: Path) -> bool:
    """Whether there is a run in `folder`, to be moved aside; what is neither that nor empty is the
    user's: refused."""
    if outer := inside_a_run(folder):
        raise BadInput(f"--run_dir {folder}: lies inside the run {outer}, give a folder beside it")
    names = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    strange = sorted(
        name
        for name in names
        if not name.startswith("evaluation-") and not name.endswith(".partial")
    )
    if strange and not saved_config(folder):
        raise BadInput(
            f"--run_dir {folder}: holds {strange[0]} and no run, give a new or an empty folder"
        )
    return bool(names)


class Claim:
    """The right to write to a folder, which is made if need be and unmade if nothing comes of it.

    `alone`: one process at a time. The kernel gives the lock back when its holder ends, however it
    ends.
    """

    def __init__(self, folder: Path, alone: bool = True):
        self.folder, self.lock = folder, None
        self.made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if alone:
                self._take()
            else:
                # Fails now, not when there is something to lose
                tempfile.NamedTemporaryFile(dir=folder).close()
        except (BadInput, OSError):
            self.release()
            raise

    def _take(self) -> None:
        path = self.folder / LOCK
        while True:
            lock = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666
            )  # Python hands no file on: no child keeps the lock
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(lock, 300).decode(errors="replace") or "just starting"
                os.close(lock)
                raise BadInput(
                    f"--run_dir {self.folder}: another run writes there ({holder})"
                ) from None
            except OSError as error:  # some network file systems
                print(
                    f"{self.folder} cannot be locked ({first_line(error)}): see that no other run writes there"
                )
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                break
            os.close(lock)  # of a file that its last holder has just removed
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self.lock = lock

    def hold(self) -> None:
        """Stop if the folder is not the one that was claimed any more: what is written now would be
        in another's."""
        with contextlib.suppress(OSError):
            if self.lock is None or os.path.samestat(
                os.fstat(self.lock), (self.folder / LOCK).stat()
            ):
                return
        raise RunStopped(
            f"{self.folder} was moved or replaced under this run: nothing more is written to it"
        )

    def renew(self, fill: Callable[[Path], None]) -> Path:
        """Move the folder aside, to NAME.1 or the next number, and put one in its place that `fill`
        has filled."""
        if Path.cwd().is_relative_to(self.folder.resolve()):
            raise BadInput(
                f"--run_dir {self.folder}: holds an earlier run, which is not moved from under the shell"
            )
        new = Claim(self.folder.with_name(f".{self.folder.name}.{os.getpid()}"))
        try:
            fill(new.folder)
            numbered = (
                self.folder.with_name(f"{self.folder.name}.{i}") for i in itertools.count(1)
            )
            aside = self.folder.rename(next(path for path in numbered if not path.exists()))
            new.folder.rename(self.folder)
        except OSError:
            shutil.rmtree(new.folder)
            raise
        self.lock, new.lock, new.folder = new.lock, self.lock, aside
        new.release()
        return aside

    def release(self) -> None:
        """Let others in; of the folders made here, those that are empty go."""
        with contextlib.suppress(OSError):
            if self.lock is not None and os.path.samestat(
                os.fstat(self.lock), (self.folder / LOCK).stat()
            ):
                (self.folder / LOCK).unlink()  # still ours: not if someone moved the folder away
        if self.lock is not None:
            os.close(self.lock)
        for path in self.made:
            with contextlib.suppress(OSError):
                path.rmdir()
        self.lock, self.made = None, []


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all is written and is gone if anything
    fails."""
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
    """The rows of a JSON-lines file of a run; a last one cut short by a kill, or still being
    written, is dropped."""
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        # No JSON, no object, or one without a step
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise BadInput(
                    f"{path}:{number}: damaged ({first_line(error)}): repair or remove the line"
                ) from error
    return rows
