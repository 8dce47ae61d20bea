"""One training run whose sampler is a quantised copy of the policy (for the lab experts).

    python -m labs.experts.sampler LEVELS FILE FLAGS...

Every row of a layer's matrices is rounded to whole numbers from -LEVELS to LEVELS times the row's
own scale; routers stay as they are. LEVELS 0 rounds nothing. The policy itself answers the held-out
problems.
"""

import sys
from pathlib import Path

from common.launch import launch

from labs.race.stresses import Stress, load, put_under

if __name__ == "__main__":
    levels, file, *flags = sys.argv[1:]
    module = load(Path(file))
    put_under(module, Stress(levels=int(levels)))
    sys.argv = [Path(file).name, *flags]
    launch(module.main, module.Args)
