"""Runs an algorithm file's own command line, with something that happens at a chosen moment:
`driver.py ALGORITHM MOMENT STEP [flags]`.

MOMENT `log` kills right after step STEP's metrics were written; `save` between the writing of the
STEPth checkpoint and its renaming; `term`, `int`, `hup` send that signal to the last rank at step
STEP, `twice` two SIGINT; `lost` kills rank 1 alone in the middle of update STEP, but for a rank
that torchrun has restarted. An Event in its place is set at step STEP, and the process then waits,
alive, to be killed.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import common.plumbing.checkpoint
from common.plumbing.launch import launch
from common.plumbing.tracking import Run

from checks.files import MODULES

SIGNALS = {"term": [signal.SIGTERM], "int": [signal.SIGINT], "hup": [signal.SIGHUP]}
SIGNALS["twice"] = [signal.SIGINT] * 2


def drive(algorithm: str, flags: Sequence, moment: object = "", step: int = 0) -> None:
    """Patch `common` for the moment, and launch the algorithm."""
    log, healthy, dcp_save = Run.log, Run.healthy, common.plumbing.checkpoint.dcp.save
    saving, updates = [], []

    def log_and_end(self: Run, done: int, metrics: dict) -> None:
        last = self.world.rank == self.world.size - 1
        for number in SIGNALS.get(moment, ()) if done == step and last else ():
            signal.raise_signal(number)
        log(self, done, metrics)
        if done == step and moment == "log":
            os.kill(os.getpid(), signal.SIGKILL)
        if done == step and hasattr(moment, "set"):
            moment.set()
            signal.pause()

    def save_and_kill(*arguments: object, **keywords: object) -> None:
        saving.append(keywords)
        dcp_save(*arguments, **keywords)
        if moment == "save" and len(saving) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def lose(self: Run, norm: float, batch: object) -> bool:
        updates.append(norm)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if moment == "lost" and first and len(updates) == step and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return healthy(self, norm, batch)

    Run.log, Run.healthy, common.plumbing.checkpoint.dcp.save = log_and_end, lose, save_and_kill
    module = importlib.import_module(MODULES[algorithm])
    sys.argv = [f"{algorithm}.py", *map(str, flags)]
    launch(module.main, module.Args)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is inherited as ignored
    drive(sys.argv[1], sys.argv[4:], sys.argv[2], int(sys.argv[3]))
