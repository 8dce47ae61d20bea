"""One training run from another warm start (for the lab trials).

    python -m labs.trials.start GUESS SLIP FILE FLAGS...

The model is `tiny` after 300 more steps of imitation. GUESS is the share of demonstrations that
guess the answer without working, SLIP the share of worked steps that are wrong (of `tiny`: 0.55 and
0.03). It is made once and kept in runs/labs/trials.
"""

import sys
from pathlib import Path

from checks.files import ROOT
from common.launch import launch
from common.model import load_model
import torch
from filelock import FileLock
from tools.maintain.make_tiny import imitate

from labs.race.stresses import load


def warm_start(guess: str, slip: str) -> Path:
    """The folder of the model, made if it is not there."""
    folder = ROOT / f"runs/labs/trials/guess-{guess}-slip-{slip}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            torch.manual_seed(0)
            lm, tokenizer = load_model("tiny")
            imitate(lm.train(), tokenizer, 300, 1e-3, float(guess), float(slip))
            lm.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    guess, slip, file, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    sys.argv = [Path(file).name, "--model", str(warm_start(guess, slip)), *flags]
    module = load(Path(file))
    launch(module.main, module.Args)
