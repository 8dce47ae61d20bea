"""What an algorithm file must do, without pytest: for tests, the labs' grader and the bug hunt.

`checks/NAME.py` states the loss of NAME.py a second time, from the paper's formula, in float64:

- `objective(b)` returns J of a `Batch`, which is a mean, and the number of things it averages;
- `statistics(b)` returns what `measures` returns, as pairs (sum, count);
- `CASES` are the flags under which `agree` compares the file with both;
- `FIXTURES` are cases of losses.json, numbers of other people's code, and the flags of each. If
  `PER_TOKEN` is set, that code divides by all tokens, but the file by something else;
- `check_...` and `SHARED` are further functions of a module (the file, a damaged copy, or a
  student's file). They raise AssertionError if the module is wrong, and their docstring states the
  rule. Most of them compare with sums over all outcomes;
- `RUN` says how tests run the file (see `Run`);
- `MUTANTS`, which some files have, are damages: name -> (text that is in the file once, its
  replacement). At least one check must fail on each. The grader names them as possible mistakes.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from .harness import agree, matches


@functools.cache  # so that a check is the same function every time
def of(algorithm: str) -> tuple[list[Callable], dict[str, tuple]]:
    """Return all checks and the mutants of an algorithm, by its file's stem."""
    if not Path(__file__).with_name(f"{algorithm}.py").exists():
        states = f"objective, statistics and CASES of {algorithm}.py"
        raise LookupError(f"write checks/{algorithm}.py: {states} (checks/sapo.py is a short one)")
    module = importlib.import_module(f"checks.{algorithm}")
    own = [f for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    own = [f for f in own if f.__name__.startswith("check_")]
    own += [matches(module)] if hasattr(module, "FIXTURES") else []
    return [*getattr(module, "SHARED", []), *own, *agree(module)], getattr(module, "MUTANTS", {})


@dataclass(frozen=True)
class Run:
    """What a test of whole runs needs to know of a file; the defaults fit a file whose loss alone
    is new."""

    # Flags under which every mechanism acts on the answers of tests/loop/answers.py, and some
    # gradients but not all are above grad_clip. tests/loop/test_loop.py leaves out files without
    stored: dict = field(default_factory=dict)
    # Whether it can train on these answers at all
    fits_stored: bool = True
    # The same within six small steps
    small: str = ""
    # Flags for another model, MODEL, whose texts are no sums
    of_words: str = ""
    # For a flag of which half the usual value does nothing: the flags it needs, or where to start
    needs: dict[str, dict] = field(default_factory=dict)
    # The first step in which it trains with all that it has
    first: int = 1
    # Steps in which a run learns from its defaults
    learns_in: int = 10
    # Wrong flags, and the words of their error
    refuses: tuple[tuple[str, str], ...] = ()
    # Flags that change metrics only, which compare with another method
    measured: tuple[str, ...] = ()


def run_of(algorithm: str) -> Run:
    """Return how tests run an algorithm, by its file's stem."""
    return getattr(importlib.import_module(f"checks.{algorithm}"), "RUN", Run())


def replaced(path: Path, old: str, new: str) -> str:
    """Return a file's text with `old` replaced, which must occur once (else LookupError)."""
    source = path.read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise LookupError(f"{path.name} has {source.count(old)} times {old!r}")
    return source.replace(old, new)


def mutate(module: ModuleType, old: str, new: str) -> ModuleType:
    """Return the module with one piece of its source replaced."""
    return module_from(replaced(Path(module.__file__), old, new), module)


def module_from(source: str, module: ModuleType) -> ModuleType:
    """Return a module of this source that stands in for another."""
    mutant = ModuleType(f"{module.__name__}_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look their module up
    mutant.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), vars(mutant))
    return mutant


def failing(module: ModuleType, checks: list[Callable]) -> Iterator[Callable]:
    """Yield the checks that fail on the module, one by one."""
    for check in checks:
        try:
            check(module)
        except (AssertionError, RuntimeError):  # RuntimeError: backward finds no gradient
            yield check
