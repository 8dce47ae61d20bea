"""The grader, its exercises and the bug hunt: right answers pass, wrong ones fail with a name and a
hint, and no file ends or blocks the grader."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks import harness
from checks.files import MODULES, PATHS
from checks.harness import NO_MEASURES
from labs import blank, bug, grade

import checks
from tests.helpers import ROOT, module_of, refused

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
    assert failed and grade.hint(failed)
    assert any("TODO: " in reason for reason in failed.values())


def wrong(*pairs: tuple[str, str]) -> str:
    """Return grpo.py with these pieces of its text replaced."""
    source = PATHS["grpo"].read_text()
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


ZSCORE = "    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)"
RATIO = "    if args.kl_ratio:\n        kl = (logp - batch.old_logp).exp() * kl"
NO_RATIO = "    if False:\n        kl = kl"
MEAN = " / mask.sum(dim=1).clamp(min=1)"
RETURN = "-per_response.sum(), mask.new_tensor(len(mask))"
STD = "rewards.std(dim=1, keepdim=True)"
K2 = "log_ref_ratio**2 / 2"
K3 = "log_ref_ratio.exp() - log_ref_ratio - 1"
R = "ratio = (logp - batch.old_logp).exp()"
CLIP = "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)"
A = "A = batch.advantages[:, None]"
GATE = "~((A > 0) & (ratio > 1 + args.clip_high) | (A < 0) & (ratio < 1 - args.clip_low))"
SURROGATE = "torch.minimum(ratio * A, clipped * A)"


@pytest.mark.parametrize("page", ["docs/questions.md", "docs/zh/questions.md"])
def test_the_whiteboards_answer_passes(page):
    """The answer to question 28, typed into the blank file, passes."""
    _, _, question = (ROOT / page).read_text("utf-8").partition("### 28. ")
    code = question.partition("```python\n")[2].partition("```")[0]
    source = f"{blank.blank('grpo')}\n\n{code}"  # later definitions win
    failed, _ = graded("grpo", source)
    assert [*failed.values()] == [NO_MEASURES]


# Wrong losses beside the known mistakes in checks/grpo.py, and right ones in other words
WRONG = {
    "the gradient of k2": (K3, f"({K3} - {K2}).detach() + {K2}"),
    "the log of k3 without gradient": (K3, "log_ref_ratio.exp() - log_ref_ratio.detach() - 1"),
    "a bounded k3": (K3, f"({K3}).clamp(max=0.5)"),
    "KL of clipped tokens dropped": ("args.beta * k3(", "args.beta * (ratio == clipped) * k3("),
    "ε below for both": (CLIP, "ratio.clamp(1 - args.clip_low, 1 + args.clip_low)"),
    "ε above at its default": (CLIP, "ratio.clamp(1 - args.clip_low, 1.2)"),
    "log r bounded": (R, "ratio = (logp - batch.old_logp).clamp(-2, 2).exp()"),
    "Â bounded": (A, f"{A}.clamp(-5, 5)"),
    "π_old/μ on top": (SURROGATE, f"{SURROGATE} * (batch.old_logp - batch.rollout_logp).exp()"),
    "log π rewarded": (SURROGATE, f"{SURROGATE} + 0.01 * logp"),
    "mask up to its first gap": ("mask = batch.mask ", "mask = batch.mask.cumprod(1) "),
    "mean over T": (f"mask).sum(dim=1){MEAN}", "mask).mean(dim=1)"),
    "cut off responses dropped": (RETURN, RETURN.replace("e.sum", "e[batch.finished].sum")),
    "std + 0.01": (f"{STD} + 1e-6", f"{STD} + 1e-2"),
}
RIGHT = {
    "std + 1e-8": (f"{STD} + 1e-6", f"{STD} + 1e-8"),
    "std + 1e-4": (f"{STD} + 1e-6", f"{STD} + 1e-4"),
    "0/0 made 0": (ZSCORE, f"    return (centred / {STD}).nan_to_num(0.0)"),
    "advantages in float32": (ZSCORE, ZSCORE.replace("centred", "centred.float()")),
    "loss in float32": ("mask = batch.mask ", "mask, logp = batch.mask, logp.float() "),
    "bounds in float32": (CLIP, CLIP.replace("1 -", "torch.tensor(1.0) -").replace("1 +", "1.0 +")),
    "where": (SURROGATE, f"torch.where({GATE}, ratio * A, clipped * A)"),
    "maximum of negatives": (SURROGATE, "-torch.maximum(-ratio * A, -clipped * A)"),
    "expm1": (K3, "torch.expm1(log_ref_ratio) - log_ref_ratio"),
    "a quotient": (R, "ratio = logp.exp() / batch.old_logp.exp()"),
    "length + 1e-8": (MEAN, " / (mask.sum(dim=1) + 1e-8)"),
    "the count as a Python number": (RETURN, "-per_response.sum(), len(mask)"),
}


@pytest.mark.parametrize("name", ["grpo", "goldilocks"])
def test_wrong_losses_fail_and_right_ones_pass(name, monkeypatch):
    """This is so without the check of the metrics."""
    monkeypatch.setattr(harness, "ROUNDING", 1e-6)  # the grader's
    known = checks.of("grpo")[1]
    of_the_loss = {check.__name__ for check in grade.checks_of("grpo")} - {"check_statistics"}
    every = [check for check in checks.of(name)[0] if check.__name__ in of_the_loss]
    for what, pair in (WRONG | known | RIGHT).items():
        failed = [*checks.failing(checks.mutate(module_of(name), *pair), every)]
        assert bool(failed) == (what not in RIGHT), (what, failed)


def test_a_wrong_part_hides_the_whole():
    """The whole loss fails with any part, but is shown only if all parts hold; then the metrics."""
    every = grade.checks_of("grpo")
    for pair, count, names in (
        ((RATIO, NO_RATIO), 6, ["kl ratio"]),
        ((SURROGATE, f"{GATE} * ratio * A"), 7, ["fixture"]),
        (("return stats\n", 'return stats | {"more": (0, 1)}\n'), 9, ["statistics"]),
    ):
        failed, held = graded("grpo", wrong(pair))
        assert [grade.plain_name(check) for check in grade.shown(failed)] == names and held == count
        assert f"{held} of {len(every)}" in grade.report(failed, held, every)
        assert grade.plain_name(grade.shown(failed)[0]) in grade.hint(failed)


# Mistakes in exercises.py: a text that it has once, and what it becomes
MISTAKES = [
    ("sampler_logprobs", "(wide / temperature)", "wide"),
    ("sampler_logprobs", "logits.float()", "logits"),
    ("rank_advantages", "exact = rewards.double()", "exact = rewards"),
    ("rank_advantages", "centred**2", "(rewards**2 - (mean.float() ** 2)[groups]).double()"),
    ("accumulate", "loss.backward()", "(loss / count).backward()"),
    ("ess_ratio", "2 * log_w.logsumexp(0) -", "log_w.logsumexp(0) -"),
    ("pass_at_k", "n - c + 1, n + 1", "n - c, n"),
    ("shift", "after < ends[:, None]", "after < ends[:, None] - 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, old, new", MISTAKES)
def test_a_mistake_in_an_exercise_fails(name, old, new):
    failed, _ = graded(name, checks.replaced(blank.EXERCISES, old, new))
    assert failed and grade.hint(failed)


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
    monkeypatch.setattr(grade, "CHECK_SECONDS", 2)
    path = tmp_path / "pass_at_k.py"
    path.write_text(source + "\nprint('noise')\n")
    monkeypatch.setattr(sys, "argv", ["grade", str(path), "--hint"])
    assert grade.main() == 1
    output = capsys.readouterr()
    assert words in " ".join(output.out.split()), output.out
    assert "Traceback" not in output.out and "noise" not in output.out and not output.err


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
    fault = bug.BUGS[number - 1]
    compile(bug.damaged(fault), "damaged", "exec")
    assert f"{fault.file}.py:" in bug.reveal(number) and fault.seen_by in bug.reveal(number)
    module = importlib.import_module(MODULES[fault.file])
    if fault.seen_by != bug.LOOP:
        named = [check for check in checks.of(fault.file)[0] if check.__name__ == fault.seen_by]
        assert list(checks.failing(checks.mutate(module, *fault.damage()), named))
