"""What some variants with lines of their own in `main` should hand on, for the loop's oracle. (The
others have checks/NAME.py alone.) In NAME.py are

- `objective(b)`: J of a tests.loop.oracle.Batch;
- `advantages(R)` of one group's rewards, where it is not grpo's z-score;
- where they are not the verifier's, `rewards(o, step, rows)`, of which advantages are made;
- `rounds(o)`: for each step of a tests.loop.oracle.Oracle the rounds of sampling, slot -> prompt;
- `prepare(o, step, b)`, where `main` does more to a rollout than that: it changes the batch;
- `FLAGS`, under which its mechanism acts on the oracle's stored answers, and `ALSO`, a list of
  others whose gradients are held, too;
- `STORED`, flags for tests/algorithms/stored.py's rollout, and `SMALL`, for small runs;
- `OFF`, flags that switch the mechanism off, which must show on the stored rollout.
"""

import importlib
from pathlib import Path

FORMULAS = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "__init__")


def of(name: str, what: str, otherwise: object) -> object:
    """What a variant's NAME.py says, or the default."""
    if name not in FORMULAS:
        return otherwise
    return getattr(importlib.import_module(f"tests.loop.formulas.{name}"), what, otherwise)
