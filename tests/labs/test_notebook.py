"""The cells of class.ipynb run in their order. Plain Python stands in for IPython."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT

IPYTHON = """
import os, sys, types
sys.modules["IPython"] = sys.modules["IPython.display"] = types.SimpleNamespace(HTML=print)
"""


@pytest.mark.slow
def test_the_cells_run(tmp_path):
    """A copy replaces the clone and its packages, and one training step is enough."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "mine", "venv")
    copy = shutil.copytree(ROOT, tmp_path / "rl", ignore=left_out)
    cells = json.loads((copy / "labs" / "class.ipynb").read_text("utf-8"))["cells"]
    program = IPYTHON + "\n".join(cell["source"] for cell in cells[3:])
    program = program.replace("--steps 40", "--steps 1").replace("python ", f"{sys.executable} ")
    program = re.sub("(?m)^!(.*)$", r'os.system("""\1""")', program)
    done = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "<iframe srcdoc=" in done.stdout  # cell 4: the page of cell 3's run
    assert "TODO: advantages" in done.stdout  # cell 5: the grader has read the blank
