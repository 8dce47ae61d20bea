"""The course's notebook works from the first cell to the last."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from labs import notebook

from tests.helpers import ROOT


@pytest.mark.slow
def test_every_cell_works_in_its_order(tmp_path, monkeypatch):
    """With the first cell's short runs; the exercise is solved once its file is there."""
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs/course.md").touch()  # by which the first cell knows the folder
    (tmp_path / "runs/labs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs/labs")
    made = notebook.notebook(notebook.PAGE.read_text("utf-8"), tmp_path / "runs/labs")
    first, *cells = ["".join(c["source"]) for c in made["cells"] if c["cell_type"] == "code"]
    shown, names, commands = [], {}, 0
    display = ModuleType("IPython.display")
    display.Image = lambda path: shown.append(Path(path).stat().st_size)
    with monkeypatch.context() as only_now:  # matplotlib asks the real one for more
        only_now.setitem(sys.modules, "IPython", ModuleType("IPython"))
        only_now.setitem(sys.modules, "IPython.display", display)
        exec(first.replace("# SMOKE, STEPS", "SMOKE, STEPS"), names)
    for path in ROOT.glob("*.py"):
        (tmp_path / path.name).symlink_to(path)
    for line in "\n".join(cells).splitlines():
        if not line.startswith("!"):
            exec(line, names)
            continue
        line = line[1:].replace("--seeds 5", "--seeds 1")  # the time; toys are never shortened
        line = line.replace("{SMOKE}", names["SMOKE"]).replace("{STEPS}", names["STEPS"])
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(line.format(sys=sys), shell=True, env=environment)
        assert done.returncode == 0, line
        commands += 1
        exercise = Path("mine/grpo.py")
        if exercise.exists() and "NotImplementedError" in exercise.read_text():
            exercise.write_text((ROOT / "grpo.py").read_text())
    assert commands >= 10 and len(shown) >= 5 and min(shown) > 10_000
