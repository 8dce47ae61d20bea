"""The grader and what it grades: blanks, true files, damages, whatever else a student hands in."""

import ast
import importlib
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from labs import blank, bug, exercise_checks, exercises, grade
from checks.files import ALGORITHMS, MODULES, algorithms

import checks
from tests.helpers import ROOT
from tests.repository.test_docs import refused

FILES = {path.stem: path for path in algorithms()}


def solution(name: str) -> str:
    """exercises.py with the functions of one exercise, filled in."""
    empty, source = blank.blank(name), blank.EXERCISES.read_text()
    lines = source.splitlines()
    node = next(n for n in blank.ast.parse(source).body if getattr(n, "name", "") == name)
    body = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
    return empty.replace(blank.TODO.format(name=name), body)


def graded(name: str, source: str, most: int | None = None) -> list[tuple]:
    """What the grader finds wrong, or the first of it; in this process."""
    every = grade.verdicts(name, Path("/handed/in/any.py"), source)
    return list(islice((verdict for verdict in every if verdict[1]), most))


def test_every_exercise_has_a_blank_checks_and_hints():
    assert list(exercise_checks.CHECKS) == blank.single() and len(blank.single()) == 6
    for name, every in exercise_checks.CHECKS.items():
        assert hasattr(exercises, name) and all(
            check.__doc__ and hint for check, hint in every.items()
        )
        assert len(exercise_checks.MUTANTS[name]) >= 7


def loss_in(source: str) -> ast.FunctionDef:
    return next(n for n in ast.parse(source).body if getattr(n, "name", "") == "policy_loss")


def test_the_list_has_a_line_and_a_difficulty_for_each():
    rows = blank.listed().splitlines()
    assert [row.split()[0] for row in rows] == [*FILES, *blank.single()]
    assert all(
        re.match(r"\w+ +(\*|\*\*|\*\*\*) +\S.{20,}", row) and len(row) <= 100 for row in rows
    )
    assert set(f"{blank.EASY} {blank.HARD}".split()) <= {*FILES, *blank.single()}


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
        alone = [line.strip() for line in empty.splitlines()]
        assert alone.count("# <own>") == alone.count("# </own>")
        for stat in blank.statistics(loss_in(true)):
            assert f"{blank.INDENT}  {stat}: " in empty
            assert stat in blank.STATISTICS or (name, stat) in blank.OWN
        kept = set(empty.splitlines()[1:]) - set(true.splitlines())
        kept = {line for line in kept if not line.startswith(blank.INDENT)}
        assert kept == {blank.TODO.format(name=taken) for taken in blank.TAKEN}


NOT_SEEN: dict[tuple[str, str], str] = {}  # damages that pass, and why


# All of them are held by tests/algorithms/test_checks.py; here they pass the grader, too
LONG = [pytest.param(n, marks=pytest.mark.variants) for n in ALGORITHMS if n != "grpo"]


@pytest.mark.parametrize("name", ["grpo", *LONG])
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


@pytest.mark.parametrize(
    "name, damage",
    [(name, damage) for name, every in exercise_checks.MUTANTS.items() for damage in every],
)
def test_damaged_exercises_fail_and_the_hint_names_the_damage(name, damage):
    old, new = exercise_checks.MUTANTS[name][damage]
    whole = checks.replaced(blank.EXERCISES, old, new)
    found = graded(name, whole)
    assert found and f"'{damage}' has just this effect" in re.sub(
        r"\s+", " ", grade.hint(name, found)
    )


DEF = "def pass_at_k(n, c, k):\n"
RAISES = f"class Mute(Exception):\n    def __str__(self):\n        raise self\n\n\n{DEF}"
EQUAL = """class Equal(float):
    __sub__ = __rsub__ = __abs__ = lambda self, *other: self
    __eq__ = __lt__ = __le__ = lambda self, other: True
    __hash__ = float.__hash__
"""
WRONG = {
    "a syntax error": ("def pass_at_k(n, c, k):\n    return (", "no Python"),
    "no function": ("x = 1\n", "there is no function pass_at_k"),
    "not callable": ("pass_at_k = 0.5\n", "there is no function"),
    "words that raise": (RAISES + "    raise Mute\n", "Mute at line 8"),
    "words for a terminal": (DEF + "    raise ValueError('\\x1b[2J\\ud800')\n", "ValueError"),
    "an interrupt": (DEF + "    raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    "a crash": (DEF + "    import ctypes; ctypes.string_at(0)\n", "segmentation fault"),
    "an end": (DEF + "    import os; os._exit(0)\n", "it ended the process, with code 0"),
    "an end at import": ("import os; os._exit(0)\n", "it ended the process"),
    "an end at the end": (
        "import atexit, os; atexit.register(os._exit, 0)\n" + DEF + "    return 0.25\n",
        "n = 5, c = 2, k = 3: 0.25, expected 0.9",
    ),
    "closed descriptors": ("import os; os.closerange(0, 99)\n", "ended the process"),
    "a fork": (DEF + "    import os; os.fork(); return 0.25\n", "0.25, expected 0.9"),
    "a thread that sleeps": (
        "import threading, time; threading.Thread(target=time.sleep, args=(999,)).start()\n",
        "there is no function",
    ),
    "no alarm": (
        "import signal; signal.alarm(0)\n" + DEF + "    while True: pass\n",
        "without end",
    ),
    "more memory than there is": (DEF + "    return bytearray(1 << 50)[0]\n", "MemoryError"),
    "a number equal to all": (EQUAL + DEF + "    return Equal(0.25)\n", "0.25, expected 0.9"),
    "an object": (DEF + "    return object()\n", "neither a tensor nor a number"),
    "checks without code": (
        "from labs import exercise_checks\n"
        "exercise_checks.near.__code__ = (lambda *a: None).__code__\n" + DEF + "    return 1\n",
        "changes what it is judged by",
    ),
    "another near": (
        "from labs import exercise_checks\nexercise_checks.near = print\n" + DEF + "    return 1\n",
        "changes what it is judged by",
    ),
    "a verdict of its own": (
        'import os\nfor n in range(3, 99):\n    try: os.write(n, b\'{"reason": ""}\\n\')\n'
        "    except OSError: pass\n" + DEF + "    return 1\n",
        "speaks in the channel",
    ),
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
    assert "\x1b" not in said.out


def test_what_a_file_prints_is_not_in_the_verdict(tmp_path, monkeypatch, capfd):
    path = tmp_path / "pass_at_k.py"
    path.write_text("import os\nprint('noise')\nos.write(1, b'2 of 2')\n" + solution("pass_at_k"))
    monkeypatch.setattr(sys, "argv", ["grade", str(path)])
    assert grade.main() == 0
    assert capfd.readouterr().out == "2 of 2 checks hold.\n"


@pytest.mark.parametrize("coding", ["utf-8-sig", "latin-1", "utf-16"])
def test_files_are_decoded_as_python_decodes_them(coding, tmp_path, monkeypatch, capsys):
    """A byte order mark and a coding line are known; what Python cannot read is refused."""
    path, line = tmp_path / "pass_at_k.py", f"# coding: {coding}\n" if coding == "latin-1" else ""
    path.write_text(f"{line}# é\n{solution('pass_at_k')}", encoding=coding)
    if coding == "utf-16":
        assert "pass_at_k.py: is no text" in refused(monkeypatch, capsys, "labs.grade", path)
        return
    monkeypatch.setattr(sys, "argv", ["grade", str(path)])
    assert grade.main() == 0


def test_what_is_no_file_is_refused(tmp_path, monkeypatch, capsys):
    """A pipe would be read for ever."""
    os.mkfifo(tmp_path / "grpo.py")
    (tmp_path / "gspo.py").mkdir()
    (tmp_path / "sapo.py").write_text("#" * (grade.LARGEST + 1))
    for name, words in (("grpo", "is no file"), ("gspo", "is no file"), ("sapo", "more than")):
        assert words in refused(monkeypatch, capsys, "labs.grade", tmp_path / f"{name}.py")


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
    total = len(checks.of("gspo")[0])
    assert capsys.readouterr().out == f"{total} of {total} checks hold.\n"


def test_a_blank_says_which_exercise_it_is(tmp_path, monkeypatch, capsys):
    """Under any name; and until a check holds, the grader names the checks and no more."""
    file = tmp_path / "ok.py"
    file.write_text(blank.blank("pass_at_k"))
    for more in ([], ["--exercise", "shift"]):
        monkeypatch.setattr(sys, "argv", ["grade", str(file), *more])
        assert grade.main() == 1
    said = capsys.readouterr().out
    assert said.count("NOT YET") == 2 and said.count("Found: TODO: pass_at_k") == 1
    assert "Found: there is no function shift" in said
    file.write_text(blank.blank("pass_at_k").partition("\n")[2])
    said = refused(monkeypatch, capsys, "labs.grade", file)
    assert "ok.py: which exercise is it? Give --exercise NAME, one of grpo" in said


def test_the_blank_names_every_flag_that_the_loss_reads():
    empty = blank.blank("grpo").split("raise NotImplementedError")[1]
    assert "args.beta, args.clip_high, args.clip_low, args.kl_ratio" in empty


def test_the_reference_is_the_repositorys(tmp_path):
    """Also where the current folder, which Python looks in first, has a file of that name."""
    (tmp_path / "grpo.py").write_text("while True: pass\n")
    code = "import labs, importlib.util; print(importlib.util.find_spec('grpo').origin)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    found = subprocess.check_output(words, cwd=tmp_path, env=environment, text=True)
    assert found.strip() == str(ROOT / "grpo.py")


def damaged(*names: str) -> str:
    """grpo.py with these of its named damages."""
    source = FILES["grpo"].read_text()
    for name in names:
        old, new, *_ = checks.of("grpo")[1][name]
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize(
    "name",
    [
        "KL rewarded",
        "KL of π_old",
        "KL times r",
        "clip in log space",
        "clip_high on both sides",
        "clip_share as a mean",
        "divided by the longest response",
        "equal rewards not made 0",
        "epsilon inside the root",
        "sum for mean",
        "clip_above and clip_below swapped",
        "ref_kl times β",
    ],
)
def test_a_hint_names_the_damage_that_was_done(name):
    """And no other."""
    said = re.sub(r"\s+", " ", grade.hint("grpo", graded("grpo", damaged(name))))
    assert said == f"'{name}' has just this effect.", said


def test_a_hint_tells_two_damages_apart():
    found = graded("grpo", damaged("no clip", "equal rewards not made 0"))
    said = grade.hint("grpo", found)
    assert "'no clip' would explain: asymmetric clip" in said
    assert "'equal rewards not made 0' would explain: equal rewards." in said


def test_a_hint_that_knows_nothing_says_so():
    source = damaged().replace("torch.minimum(ratio * A, clipped * A)", "ratio * A * 1.01")
    assert "of no damage that we have a name for" in grade.hint("grpo", graded("grpo", source))


def test_verdicts_have_numbers():
    reasons = dict(
        (grade.plainly(check), reason) for check, reason in graded("grpo", damaged("no clip"))
    )
    assert reasons["coefficients"] == "r = 1.25, Â = +1: weight 1.25, expected 0"
    (found,) = graded("grpo", damaged("equal rewards not made 0"))
    assert "eight rewards of 0.7 give 0.0596, expected 0" in found[1]
    for name in ALGORITHMS:  # a comparison without words of its own has them, too
        source = FILES[name].read_text().replace("return -", "return -1.1 * ")
        assert all(re.search(r"\d", reason) for _, reason in graded(name, source, 3)), name


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
