"""The alarm of a run: when a rule sounds, and that it does so once."""

import math

import grpo
import pytest
from common.alarm import BLOCK, FIRST, Rule, alarms, alarms_now
from labs.warning.rules import fall

from tests.helpers import SMALL, run_here

NAN, GONE = math.nan, None


def lines_of(blocks: list) -> list[dict]:
    """Metrics of a run in which `x` has one value through each block of steps."""
    values = [value for value in blocks for _ in range(BLOCK)]
    return [{"step": 0}] + [{"step": step, "x": value} for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    "itself, above, limit, blocks, sounding",
    [
        (False, True, 2.0, [1, 3, 4, 5, 9], 4),  # the first mean is 2
        (False, False, 0.5, [1, 3, 1.1, 0.9, 0.8], 4),
        (False, True, 2.0, [0, 0, 9], None),  # nothing is a multiple of 0
        (False, True, 2.0, [NAN, GONE, 9], None),
        (False, False, 0.5, [1, 1, NAN, GONE, 0.4], 5),
        (True, True, 2.0, [2, 3, 1], 2),
        (True, False, 2.0, [GONE, 2, 1], 3),
    ],
)
def test_when_a_rule_sounds(itself, above, limit, blocks, sounding):
    """At the end of the first block beyond the limit, at no other step, and the same where earlier
    lines were read from a file."""
    rule, lines = Rule("x", itself, above, limit), lines_of(blocks)
    steps = [alarm.step for alarm in alarms(lines, [rule])]
    assert steps == ([BLOCK * sounding] if sounding else [])
    heard = [line["step"] for line in lines if alarms_now(lines[: line["step"] + 1], [rule])]
    assert heard == steps
    assert alarms([{"step": step} for step in range(5 * BLOCK * FIRST)], [rule]) == []


def test_a_run_sounds_once_and_not_again_when_resumed(tmp_path, monkeypatch, capsys):
    """It may be switched off or on where it goes on."""
    monkeypatch.setattr("common.alarm.BLOCK", 1)
    rules = [Rule("tokens", True, True, 0.0, 3, 4, 0, 9), Rule("tokens", False, True, 1e9)]
    monkeypatch.setattr("common.run.stored_rules", lambda: rules)
    said = []
    for steps, more in ((1, []), (2, ["--resume", "--no_alarm"]), (3, ["--resume"])):
        words = [*SMALL, "--steps", steps, "--save_every", 1, "--run_dir", tmp_path / "run", *more]
        assert run_here(grpo.main, *words) == 0
        said.append(capsys.readouterr().out.count("3 of 4 falls began so, 0 of 9 healthy runs did"))
    assert said == [1, 0, 0]


@pytest.mark.parametrize(
    "accuracies, step",
    [([0.5, 0.9, 0.7, 0.8], 0), ([0.5, 0.9, 0.7, 0.6], 10), ([0.5, 0.3, 0.5, 0.2], 15)],
)
def test_a_fall_never_comes_back(accuracies, step):
    lines = [{"step": 5 * place, "sampled": value} for place, value in enumerate(accuracies)]
    assert fall(lines) == step
