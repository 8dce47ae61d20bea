"""The grader, its exercises and the bug hunt: the true file passes, a blank or a damaged one fails
with a name, and no file ends, blocks or deceives the grader."""

import ast
import importlib
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from checks.files import ALGORITHMS, MODULES, PATHS
from labs import blank, bug, exercise_checks, grade

import checks
from tests.helpers import ROOT, refused

QUICK = ("grpo", "pass_at_k")
BY_TIME = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in [*ALGORITHMS, *blank.single()]
]


def solution(name: str) -> str:
    """The true file; of one function of exercises.py its blank, filled in."""
    if name in PATHS:
        return PATHS[name].read_text()
    lines = blank.EXERCISES.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    (node,) = [node for node in tree.body if getattr(node, "name", "") == name]
    body = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
    return blank.blank(name).replace(blank.TODO.format(name=name), body)


def graded(name: str, source: str, most: int | None = None) -> list[tuple]:
    """What the grader finds wrong, or the first of it; in this process."""
    every = grade.verdicts(name, Path("/handed/in/any.py"), source)
    return list(islice((verdict for verdict in every if verdict[1]), most))


@pytest.mark.parametrize("name", BY_TIME)
def test_the_true_file_passes_and_its_blank_does_not(name):
    assert graded(name, solution(name)) == []
    empty = blank.blank(name)
    found = graded(name, empty, 1)
    assert found and all("TODO: " in reason for _, reason in found)
    assert grade.hint(name, found)


def hint(name: str, source: str) -> str:
    return " ".join(grade.hint(name, graded(name, source)).split())


def test_a_damage_is_found_and_the_hint_names_it():
    old, new, *_ = checks.of("grpo")[1]["KL rewarded"]
    found = hint("grpo", checks.replaced(PATHS["grpo"], old, new))
    assert found == "'KL rewarded' has just this effect."


@pytest.mark.slow
@pytest.mark.parametrize("name", blank.single())
def test_every_damaged_exercise_fails_and_the_hint_names_the_damage(name):
    for damage, (old, new) in exercise_checks.MUTANTS[name].items():
        found = hint(name, checks.replaced(blank.EXERCISES, old, new))
        assert f"'{damage}' has just this effect" in found, damage


DEF = "def pass_at_k(n, c, k):\n"
WRONG = {
    "a syntax error": (DEF + "    return (", "no Python"),
    "an end": (DEF + "    import os; os._exit(0)\n", "it ended the process, with code 0"),
    "no end": ("import signal; signal.alarm(0)\n" + DEF + "    while True: pass\n", "without end"),
    "too much memory": (DEF + "    return bytearray(1 << 50)[0]\n", "MemoryError"),
    "another near": (
        "from labs import exercise_checks\nexercise_checks.near = print\n" + DEF + "    return 1\n",
        "changes what it is judged by",
    ),
    "a verdict of its own": (
        'import os\nfor n in range(3, 99):\n    try: os.write(n, b\'{"reason": ""}\\n\')\n'
        "    except OSError: pass\n" + DEF + "    return 1\n",
        "speaks in the channel",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_told_in_words(case, tmp_path, monkeypatch, capsys):
    """Exit code 1, no traceback; what the file prints is not in the verdict."""
    source, words = WRONG[case]
    monkeypatch.setattr(grade, "SECONDS", 1)
    path = tmp_path / "pass_at_k.py"
    path.write_text(source + "\nprint('noise')\n")
    monkeypatch.setattr(sys, "argv", ["grade", str(path), "--hint"])
    assert grade.main() == 1
    said = capsys.readouterr()
    assert words in " ".join(said.out.split()), said.out
    assert "Traceback" not in said.out and "noise" not in said.out and not said.err


def test_what_is_no_file_is_refused(tmp_path, monkeypatch, capsys):
    """A pipe would be read for ever; a name that is no exercise's needs --exercise."""
    os.mkfifo(tmp_path / "grpo.py")
    (tmp_path / "nope.py").write_text("x = 1\n")
    for name, words in (("grpo", "is no file"), ("nope", "Give --exercise NAME, one of grpo")):
        assert words in refused(monkeypatch, capsys, "labs.grade", tmp_path / f"{name}.py")


def test_the_reference_is_the_repositorys(tmp_path):
    """Also where the current folder, which Python looks in first, has a file of that name."""
    (tmp_path / "grpo.py").write_text("while True: pass\n")
    code = "import labs, importlib.util; print(importlib.util.find_spec('grpo').origin)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    found = subprocess.check_output(words, cwd=tmp_path, env=environment, text=True)
    assert found.strip() == str(ROOT / "grpo.py")


@pytest.mark.parametrize("number", range(1, len(bug.BUGS) + 1))
def test_every_bug_is_one_place_and_seen(number):
    """What is damaged stands once, and the check named turns red."""
    one = bug.BUGS[number - 1]
    compile(bug.damaged(one), "damaged", "exec")
    assert f"{one.file}.py:" in bug.reveal(number) and one.seen_by in bug.reveal(number)
    module = importlib.import_module(MODULES[one.file])
    if one.seen_by != bug.LOOP:
        named = [check for check in checks.of(one.file)[0] if check.__name__ == one.seen_by]
        assert list(checks.red(checks.mutate(module, *one.damage()), named))
