"""One training run in which a flag changes (for the lab trials).

    python -m labs.trials.turn STEP FLAG FACTOR FILE FLAGS...

After step STEP the flag has FACTOR times its value. A resumed run is bit-exact, so this is the same
as a return to the checkpoint of step STEP with another value.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from common.launch import launch
from common.run import Run

from labs.race.stresses import load

if __name__ == "__main__":
    last, flag, factor, file, *flags = sys.argv[1:]
    unchanged = Run.steps

    def steps(run: Run) -> Iterator[int]:
        for step in unchanged(run):
            if step == int(last) + 1:
                setattr(run.args, flag, float(factor) * getattr(run.args, flag))
            yield step

    Run.steps = steps
    sys.argv = [Path(file).name, *flags]
    module = load(Path(file))
    launch(module.main, module.Args)
