"""The grader and what it grades: blanks, true files, damages, whatever else a student hands in."""

import importlib
import re
import sys
from itertools import islice
from pathlib import Path

import pytest
from labs import blank, bug, exercise_checks, exercises, grade
from tools.marks import algorithms

from tests import checks
from tests.adapters import ALGORITHMS, MODULES
from tests.helpers import ROOT
from tests.test_docs import refused

FILES = {path.stem: path for path in algorithms()}


def solution(name: str) -> str:
    """exercises.py with the functions of one exercise, filled in."""
    empty, source = blank.blank(name), blank.EXERCISES.read_text()
    lines = source.splitlines()
    node = next(n for n in blank.ast.parse(source).body if getattr(n, "name", "") == name)
    body = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
    return empty.replace(blank.TODO.format(name=name), body)


def graded(name: str, source: str, most: int | None = None) -> list[tuple]:
    """The grader's verdicts, or the first ones."""
    return list(islice(grade.verdicts(Path(f"/handed/in/{name}.py"), source), most))


def test_every_exercise_has_a_blank_checks_and_hints():
    assert list(exercise_checks.CHECKS) == blank.single() and len(blank.single()) == 6
    for name, every in exercise_checks.CHECKS.items():
        assert hasattr(exercises, name) and all(
            check.__doc__ and hint for check, hint in every.items()
        )


@pytest.mark.parametrize("name", [*ALGORITHMS, *blank.single()])
def test_the_true_file_passes_and_its_blank_says_what_is_to_do(name):
    """The blank keeps signature and promise, compiles, and says TODO in words; so does the hint."""
    true = FILES[name].read_text() if name in FILES else solution(name)
    assert graded(name, true) == []
    empty = blank.blank(name)
    found = graded(name, empty, 1)
    assert found and all("TODO: " in reason for _, reason in found)
    assert "TODO" in grade.report(found, 9) and grade.hint(name, found)
    if name in FILES:
        assert (
            "raise NotImplementedError" in empty and "torch.minimum(" not in empty.split('"""')[-1]
        )
        kept = set(empty.splitlines()) - set(true.splitlines())
        kept = {line for line in kept if not line.startswith(blank.INDENT)}
        assert kept == {blank.TODO.format(name=taken) for taken in blank.TAKEN}


NOT_SEEN: dict[tuple[str, str], str] = {}  # damages that pass, and why


@pytest.mark.parametrize("name", ALGORITHMS)
def test_damages_fail(name):
    """At least 95% of the named mutants; those that pass are listed above."""
    mutants = checks.of(name)[1]
    passed = {
        damage
        for damage, (old, new, *_) in mutants.items()
        if not graded(name, checks.replaced(FILES[name], old, new), 1)
    }
    assert passed == {damage for file, damage in NOT_SEEN if file == name}
    assert len(passed) <= 0.05 * len(mutants)


ALIKE = {
    "sampler_logprobs": [
        ("(wide / temperature)", "wide"),
        ("logits.float()", "logits"),
        ("(wide / temperature).log_softmax(-1)", "(wide / temperature).softmax(-1).log()"),
    ],
    "rank_advantages": [
        ("(size - 1)", "size"),
        ("all_sum(zero.index_add(0, groups, rewards)) / size", "rewards.mean().expand(count)"),
        ("centred**2", "rewards**2 - mean[groups] ** 2"),
        ("    zero = ", "    if not len(rewards):\n        return rewards\n    zero = "),
    ],
    "accumulate": [
        ("parameter.grad /= tokens", "parameter.grad /= len(micros)"),
        ("loss.backward()", "(loss / count).backward()"),
    ],
    "ess_ratio": [
        ("log_w.logsumexp(0) -", "log_w.exp().sum().log() -"),
        (" / len(log_w)", ""),
    ],
    "pass_at_k": [
        ("1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))", "1 - (1 - c / n) ** k"),
        ("n - c + 1, n + 1", "n - c, n"),
    ],
    "shift": [
        ("torch.arange(1, sequences.shape[1] + 1)", "torch.arange(sequences.shape[1])"),
        ("after < ends", "after <= ends"),
        ("after >= prompt_len", "after > prompt_len"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, old, new", [(name, *pair) for name, pairs in ALIKE.items() for pair in pairs]
)
def test_damaged_exercises_fail(name, old, new):
    source = solution(name)
    assert source.count(old) == 1
    assert graded(name, source.replace(old, new)), (name, new)


WRONG = {
    "a syntax error": ("def pass_at_k(n, c, k):\n    return (", "no Python"),
    "no function": ("x = 1\n", "there is no function pass_at_k"),
    "not callable": ("pass_at_k = 0.5\n", "there is no function"),
    "an exception": ("def pass_at_k(n, c, k):\n    return 1 / 0\n", "line 3: return 1 / 0"),
    "recursion": ("def pass_at_k(n, c, k):\n    return pass_at_k(n, c, k)\n", "calls itself"),
    "another signature": ("def pass_at_k(n):\n    return 1\n", "takes 1 positional argument"),
    "None": ("def pass_at_k(n, c, k):\n    pass\n", "NoneType"),
    "exit": ("import sys\ndef pass_at_k(n, c, k):\n    sys.exit(0)\n", "SystemExit"),
    "exit at import": ("raise SystemExit(0)\n", "SystemExit"),
    "a missing import": ("import nowhere\n", "No module named"),
    "its own assertion": ("def pass_at_k(n, c, k):\n    assert n < 0, 'no'\n", "line 3"),
    "a loop without end": ("def pass_at_k(n, c, k):\n    while True: pass\n", "without end"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_told_in_words(case, tmp_path, monkeypatch, capsys):
    """Exit code 1, no traceback, nothing on stderr; what the file prints is not in the verdict."""
    source, words = WRONG[case]
    monkeypatch.setattr(grade, "SECONDS", 1)
    path = tmp_path / "pass_at_k.py"
    path.write_text("print('noise')\n" + source if "no Python" not in words else source)
    monkeypatch.setattr(sys, "argv", ["grade", str(path), "--hint"])
    assert grade.main() == 1
    said = capsys.readouterr()
    assert words in re.sub(r"\s+", " ", said.out), said.out
    assert "Traceback" not in said.out and "noise" not in said.out and not said.err


def test_wrong_shapes_and_dtypes_are_told_in_words():
    """Of a loss: per-token advantages, a mean returned alone, integers."""
    empty = blank.blank("grpo")
    todo = blank.TODO.format(name="policy_loss")
    for body, words in (
        ("    return -(logp * advantages).sum(), mask.sum(), {}", "RuntimeError"),
        ("    return logp.mean()", "TypeError"),
        ("    return logp.sum().int(), 1, {}", ""),
        ("    return None", "TypeError"),
        ("    return 0 * logp.sum(), 1, {}", "is missing from the statistics"),
    ):
        found = graded("grpo", empty.replace(todo, body))
        assert found and any(words in reason for _, reason in found), body


def test_grading_the_true_file_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grade", str(ROOT / "gspo.py")])
    assert grade.main() == 0
    assert capsys.readouterr().out == "6 of 6 checks hold.\n"


def test_a_hint_names_the_damage():
    """What turns the same checks red stands in the hint."""
    old, new, *_ = checks.of("grpo")[1]["KL rewarded"]
    found = graded("grpo", checks.replaced(FILES["grpo"], old, new))
    assert "KL rewarded" in grade.hint("grpo", found)


def test_wrong_calls_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "nope.py").touch()
    assert "one of grpo" in refused(monkeypatch, capsys, "labs.grade", tmp_path / "nope.py")
    refused(monkeypatch, capsys, "labs.grade", tmp_path / "grpo.py")
    refused(monkeypatch, capsys, "labs.blank", "nope")
    refused(monkeypatch, capsys, "labs.bug", 99)


@pytest.mark.parametrize("number", range(1, len(bug.BUGS) + 1))
def test_every_bug_is_one_place_and_seen(number):
    """What is damaged stands once; the check named turns red; --reveal has the line."""
    one = bug.BUGS[number - 1]
    source = bug.damaged(one)
    compile(source, "damaged", "exec")
    told = bug.reveal(number)
    assert f"\n- {one.damage()[0].strip().splitlines()[0][:20]}" in told or "\n- " in told
    assert f"{one.file}.py:" in told and one.seen_by in told
    if one.seen_by != bug.LOOP:
        module = checks.mutate(importlib.import_module(MODULES[one.file]), *one.damage())
        named = [check for check in checks.of(one.file)[0] if check.__name__ == one.seen_by]
        assert list(checks.red(module, named))


def test_there_are_enough_bugs_and_each_run_has_flags_that_exist(monkeypatch):
    from common.plumbing.launch import parse

    assert 8 <= len(bug.BUGS) <= 12 and sum(bool(one.real) for one in bug.BUGS) >= 6
    for one in bug.BUGS:
        words = [*bug.RUN.split(), *one.flags.split()]
        monkeypatch.setattr(sys, "argv", [one.file, *words])
        parse(importlib.import_module(MODULES[one.file]).Args)
