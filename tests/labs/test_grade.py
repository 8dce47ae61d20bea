"""The grader, its exercises and the bug hunt: right answers pass, wrong ones fail with a name and a
hint, and no file ends or blocks the grader."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks.files import MODULES, PATHS
from labs import blank, bug, exercise_checks, grade

import checks
from tests.helpers import ROOT, refused

QUICK = ("grpo", "pass_at_k")
BY_TIME = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in [*blank.files_of_exercises(), *blank.single()]
]


def solution(name: str) -> str:
    """Return the true file, or the blank of one function of exercises.py, filled in."""
    if name in PATHS:
        return PATHS[name].read_text()
    lines, node = blank.EXERCISES.read_text().splitlines(), blank.single()[name]
    body = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
    return blank.blank(name).replace(blank.TODO.format(name=name), body)


def graded(name: str, source: str) -> tuple[dict, int]:
    return grade.grade(name, Path("/handed/in/any.py"), source)


@pytest.mark.parametrize("name", BY_TIME)
def test_the_true_file_passes_and_its_blank_does_not(name):
    assert graded(name, solution(name)) == ({}, len(grade.checks_of(name)))
    failed, _ = graded(name, blank.blank(name))
    assert failed and grade.hint(name, failed)
    assert any("TODO: " in reason for reason in failed.values())


def wrong(*pairs: tuple[str, str]) -> str:
    """Return grpo.py with these pieces of its text replaced."""
    source = PATHS["grpo"].read_text()
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


CENTRE = "    rewards = rewards - rewards[:, :1]  # [P, G]\n"
ZSCORE = "    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)"
RATIO = "    if args.kl_ratio:\n        kl = (logp - batch.old_logp).exp() * kl"
NO_RATIO = "    if False:\n        kl = kl"
MEAN = " / mask.sum(dim=1).clamp(min=1)"
RETURN = "-per_response.sum(), mask.new_tensor(len(mask))"
STD = "rewards.std(dim=1, keepdim=True)"
SURROGATE = "torch.minimum(ratio * A, clipped * A)"
NO_MIN, MAX = (SURROGATE, "clipped * A"), (SURROGATE, SURROGATE.replace("minimum", "maximum"))
TOKENS = [(MEAN, ""), (RETURN, "-per_response.sum(), mask.sum()")]
TEXTBOOK = [(CENTRE, ""), (RATIO, NO_RATIO)]
ALWAYS = ("    if args.beta > 0:\n        objective =", "    if True:\n        objective =")
# Answers that students give, and what the hint says, in this order
ANSWERS = {
    "own wording": (
        [
            (CENTRE, "    same = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)\n"),
            (ZSCORE, f"    z = centred / ({STD} + 1e-6)\n    return torch.where(same, 0.0, z)"),
        ],
        [],
    ),
    "textbook": (TEXTBOOK, ["'equal rewards not made 0' has just"]),
    "token mean": (TOKENS, ["'token-mean' has just"]),
    "no min, no kl_ratio": ([NO_MIN, (RATIO, NO_RATIO)], ["'clip without min' has just"]),
    "max, no kl_ratio": ([MAX, (RATIO, NO_RATIO)], ["'max for min' has just"]),
    "three": (
        [*TEXTBOOK, *TOKENS, NO_MIN],
        ["'clip without min' would", "'token-mean'", "'equal rewards not made 0' would"],
    ),
    "KL without a reference": (
        [*TEXTBOOK, ALWAYS],
        ["batch.ref_logp is None", "'equal rewards not made 0' would"],
    ),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_that_students_give(answer):
    pairs, told = ANSWERS[answer]
    failed, held = graded("grpo", wrong(*pairs))
    assert held + len(failed) == len(grade.checks_of("grpo"))
    assert bool(failed) == bool(told)
    if failed:
        hint = grade.hint("grpo", failed)
        places = [hint.find(words) for words in told]
        assert -1 not in places and places == sorted(places), hint


@pytest.mark.parametrize("page", ["docs/questions.md", "docs/zh/questions.md"])
def test_the_whiteboards_answer_passes(page):
    """The answer to question 28, typed into the blank file, passes."""
    _, _, question = (ROOT / page).read_text("utf-8").partition("### 28. ")
    code = question.partition("```python\n")[2].partition("```")[0]
    source = f"{blank.blank('grpo')}\n\n{code}"  # later definitions win
    failed, _ = graded("grpo", source)
    assert [*failed.values()] == [checks.NO_MEASURES]


def test_the_core_is_the_formula():
    """Its six checks hold without metrics and without the flag kl_ratio. As long as one of them
    fails, nothing else is told."""
    plain = [(RATIO, NO_RATIO), ("    return stats\n", "    return {}\n")]
    every = grade.checks_of("grpo")
    core = [check for check in every if not grade.comes_later(check)]
    failed, held = graded("grpo", wrong(*plain))
    assert set(failed) == set(every) - set(core) and held == len(core) == 6
    assert "statistics" in grade.report(failed, held, every)
    worse = graded("grpo", wrong(*plain, (CENTRE, "")))
    report = grade.report(*worse, every)
    assert "equal rewards" in report and "statistics" not in report and "5 of 6" in report


@pytest.mark.slow
@pytest.mark.parametrize("name", blank.single())
def test_every_damaged_exercise_fails_and_the_hint_names_the_damage(name):
    for damage, (old, new) in exercise_checks.MUTANTS[name].items():
        failed, _ = graded(name, checks.replaced(blank.EXERCISES, old, new))
        assert f"'{damage}' has just this effect" in grade.hint(name, failed), damage


DEF = "def pass_at_k(n, c, k):\n"
ACCIDENTS = {
    "a syntax error": (DEF + "    return (", "not Python"),
    "an end": (DEF + "    import os; os._exit(3)\n", "it ended its process"),
    "no end": (DEF + "    while True: pass\n", "endless loop"),
    "too much memory": (DEF + "    return bytearray(1 << 50)[0]\n", "MemoryError at line 2"),
    "another function": ("def passes(n, c, k): pass\n", "no function pass_at_k"),
}


@pytest.mark.parametrize("case", ACCIDENTS)
def test_an_accident_is_told_in_words(case, tmp_path, monkeypatch, capsys):
    """The exit code is 1, there is no traceback, and what the file prints is not in the verdict."""
    source, words = ACCIDENTS[case]
    monkeypatch.setattr(grade, "SECONDS", 2)
    path = tmp_path / "pass_at_k.py"
    path.write_text(source + "\nprint('noise')\n")
    monkeypatch.setattr(sys, "argv", ["grade", str(path), "--hint"])
    assert grade.main() == 1
    said = capsys.readouterr()
    assert words in " ".join(said.out.split()), said.out
    assert "Traceback" not in said.out and "noise" not in said.out and not said.err


def test_what_is_no_exercise_is_refused(tmp_path, monkeypatch, capsys):
    """A pipe would be read for ever, and a name that is no exercise's needs --exercise."""
    os.mkfifo(tmp_path / "grpo.py")
    (tmp_path / "nope.py").write_text("x = 1\n")
    for name, words in (("grpo", "not a file"), ("nope", "Give --exercise NAME, one of grpo")):
        assert words in refused(monkeypatch, capsys, "labs.grade", tmp_path / f"{name}.py")


def test_the_reference_is_the_repositorys(tmp_path):
    """This holds even if the current folder, where Python looks first, has a file of that name."""
    (tmp_path / "grpo.py").write_text("while True: pass\n")
    code = "import labs, importlib.util; print(importlib.util.find_spec('grpo').origin)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    origin = subprocess.check_output(words, cwd=tmp_path, env=environment, text=True)
    assert origin.strip() == str(ROOT / "grpo.py")


@pytest.mark.parametrize("number", range(1, len(bug.BUGS) + 1))
def test_every_bug_is_one_place_and_seen(number):
    """The damaged text occurs once, and the named check turns red."""
    one = bug.BUGS[number - 1]
    compile(bug.damaged(one), "damaged", "exec")
    assert f"{one.file}.py:" in bug.reveal(number) and one.seen_by in bug.reveal(number)
    module = importlib.import_module(MODULES[one.file])
    if one.seen_by != bug.LOOP:
        named = [check for check in checks.of(one.file)[0] if check.__name__ == one.seen_by]
        assert list(checks.red(checks.mutate(module, *one.damage()), named))
