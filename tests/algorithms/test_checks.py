"""Every check of every algorithm file; and every mutant, a damage that some check must see."""

import pytest

import checks
from checks.files import ALGORITHMS, NINE, VARIANTS
from tests.helpers import module_of


def names(check: object) -> str:
    return getattr(check, "__name__", str(check)).removeprefix("check_")


@pytest.mark.parametrize("name, check", [(n, c) for n in NINE for c in checks.of(n)[0]], ids=names)
def test_check(name, check):
    check(module_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_checks_of_a_variant(name):
    for check in checks.of(name)[0]:
        check(module_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_mutants_are_caught(name):
    """And an unchanged copy passes: the machinery of the mutants itself turns no check red."""
    every, mutants = checks.of(name)
    old, *_ = next(iter(mutants.values()))
    assert not list(checks.red(checks.mutate(module_of(name), old, old), every))
    unseen = []
    for damage, (old, new, *by) in mutants.items():
        damaged = checks.mutate(module_of(name), old, new)
        if not any(checks.red(damaged, by or every)):
            unseen.append(damage)
    assert not unseen
