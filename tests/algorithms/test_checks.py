"""Every check of every algorithm file; and every mutant, a damaged file that some check must see."""

import pytest

import checks
from checks.files import ALGORITHMS, NINE, VARIANTS
from tests.helpers import module_of


def names(check: object) -> str:
    return getattr(check, "__name__", str(check)).removeprefix("check_")


HELD = [(name, check) for name in NINE for check in checks.of(name)[0]]
HELD += [
    pytest.param(name, check, marks=pytest.mark.slow)
    for name in VARIANTS
    for check in checks.of(name)[0]
]


@pytest.mark.parametrize(("name", "check"), HELD, ids=names)
def test_check(name, check):
    check(module_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_mutants_are_caught(name):
    every, mutants = checks.of(name)
    unseen = []
    for damage, (old, new, *by) in mutants.items():
        damaged = checks.mutate(module_of(name), old, new)
        if not any(checks.red(damaged, by or every)):
            unseen.append(damage)
    assert not unseen


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_unchanged_copy_passes(name):
    """The machinery of the mutants itself turns no check red."""
    every, mutants = checks.of(name)
    old, *_ = next(iter(mutants.values()))
    copy = checks.mutate(module_of(name), old, old)
    assert not list(checks.red(copy, every))
