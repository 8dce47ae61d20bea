"""Every check runs on every algorithm file. Every mutant, a damage, must be seen by some check."""

import pytest

import checks
from checks.files import ALGORITHMS
from tests.helpers import module_of


@pytest.mark.parametrize("name", ALGORITHMS)
def test_checks(name):
    for check in checks.of(name)[0]:
        check(module_of(name))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if checks.of(name)[1]])
def test_mutants_are_caught(name):
    """An unchanged copy passes, too, so the machinery of the mutants itself turns no check red."""
    every, mutants = checks.of(name)
    old, _ = next(iter(mutants.values()))
    assert not list(checks.failing(checks.mutate(module_of(name), old, old), every))
    unseen = []
    for damage, (old, new) in mutants.items():
        if not any(checks.failing(checks.mutate(module_of(name), old, new), every)):
            unseen.append(damage)
    assert not unseen
