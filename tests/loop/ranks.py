"""Records of damaged files, and of several ranks."""

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from common.distributed import setup
import torch
import torch.distributed as dist

from checks import mutate
from checks.files import MODULES
from tests.helpers import forked
from tests.loop.record import Record, record


@contextlib.contextmanager
def damaged(algorithm: str, where: str = "", old: str = "", new: str = "") -> ModuleType:
    """Return the algorithm's module with one piece of the source of `where` replaced, which is its
    own or one of common's."""
    own = importlib.import_module(MODULES[algorithm])
    home = own if where in ("", algorithm) else importlib.import_module(where)
    copied = mutate(home, old, new) if old else home
    if home is own:
        yield copied
        return
    users = [module for name, module in list(sys.modules.items()) if name.startswith("common")]
    with pytest.MonkeyPatch.context() as patch:
        for user in (own, *users):  # whoever imported something from there
            for name, value in list(vars(user).items()):
                of_home = getattr(value, "__module__", "") == home.__name__
                if user is not copied and of_home and hasattr(copied, name):
                    patch.setattr(user, name, getattr(copied, name))
        yield own


def trials(jobs: list[tuple], folder: Path) -> None:
    """Record every job (algorithm, damage, flags) in turn, on one of the ranks, in
    `folder/<job>-<rank>.pt`."""
    world = setup()
    for number, (algorithm, damage, flags) in enumerate(jobs):
        with damaged(algorithm, *damage) as module:
            result = record(module, world, folder / f"run-{number}", **flags)
        torch.save(result, folder / f"{number}-{world.rank}.pt")
    dist.barrier()  # leave together: gloo may abort a rank whose peer has gone


def on_ranks(ranks: int, jobs: list[tuple], folder: Path) -> list[list[Record]]:
    """Return the records of all ranks for every job."""
    done, records = forked(trials, jobs, folder, ranks=ranks), []
    assert done.returncode == 0, done.stderr
    for number in range(len(jobs)):
        paths = [folder / f"{number}-{rank}.pt" for rank in range(ranks)]
        records.append([torch.load(path, weights_only=False) for path in paths])
    return records
