"""Runs an algorithm file's own command line, but killed at a chosen moment: `driver.py FILE MOMENT
STEP [flags]`.

MOMENT `log` kills right after step STEP's metrics were written; `save` between the writing of
STEP's checkpoint and its renaming; `term`, `int`, `hup` send that signal at step STEP, and `stop`
halts the process there, alive; `lost` kills rank 1 alone in the middle of update STEP.
"""

import importlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import common.checkpoint
from common.launch import launch
from common.tracking import Run

SIGNALS = {
    "log": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
}
SIGNALS["stop"] = signal.SIGSTOP

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is inherited as ignored
name, moment, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.argv[1:] = sys.argv[4:]
module = importlib.import_module(name)

log, healthy, saving, updates = Run.log, Run.healthy, [], []


def log_and_kill(self: Run, done: int, metrics: dict) -> None:
    log(self, done, metrics)
    if done == step and moment in SIGNALS:
        os.kill(os.getpid(), SIGNALS[moment])


def save_and_kill(*arguments: object, **keywords: object) -> None:
    saving.append(keywords)
    dcp_save(*arguments, **keywords)
    if moment == "save" and len(saving) == step:
        os.kill(os.getpid(), signal.SIGKILL)


def lose(self: Run, norm: float, batch: object) -> bool:
    updates.append(norm)
    if moment == "lost" and len(updates) == step and self.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return healthy(self, norm, batch)


Run.log, Run.healthy = log_and_kill, lose
dcp_save = common.checkpoint.dcp.save
common.checkpoint.dcp.save = save_and_kill

if __name__ == "__main__":
    launch(module.main, module.Args)
