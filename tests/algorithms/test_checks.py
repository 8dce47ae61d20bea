"""Every check of every algorithm file; every mutant, a damaged file that some check must see."""

import inspect

import pytest

import checks
from checks.files import ALGORITHMS as FILES
from tests.helpers import module_of

EVERY = [(name, check) for name in FILES for check in checks.of(name)[0]]
DAMAGED = [(name, mutant) for name in FILES for mutant in checks.of(name)[1]]


def named(value: object) -> str:
    return value if isinstance(value, str) else value.__name__.removeprefix("check_")


@pytest.mark.parametrize(("name", "check"), EVERY, ids=named)
def test_check(name, check):
    check(module_of(name))


@pytest.mark.parametrize(("name", "mutant"), DAMAGED, ids=named)
def test_mutant_is_caught(name, mutant):
    every, mutants = checks.of(name)
    old, new, *by = mutants[mutant]
    damaged = checks.mutate(module_of(name), old, new)
    assert next(checks.red(damaged, by or every), None), "no check sees it"


@pytest.mark.parametrize("name", FILES)
def test_an_unchanged_copy_passes(name):
    """The machinery of the mutants itself turns no check red."""
    every, mutants = checks.of(name)
    old, *_ = next(iter(mutants.values()))
    copy = checks.mutate(module_of(name), old, old)
    assert not list(checks.red(copy, every))


@pytest.mark.parametrize("name", FILES)
def test_every_check_says_what_it_holds(name):
    """The grader prints the docstring of a check that is red."""
    every, mutants = checks.of(name)
    assert len(every) >= 4 and len(mutants) >= 9
    assert all(inspect.getdoc(check) for check in every)
    assert len({check.__name__ for check in every}) == len(every)
