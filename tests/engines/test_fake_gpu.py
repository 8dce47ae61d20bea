"""Every command for several GPUs that a header prints, and the one of docs/gpu.md with --offload,
on GPUs that are not there. It must start, train, save and resume, and all ranks must enter the same
collectives."""

import ast
import json
import os
import shutil
import sys

import pytest
import torch
from checks.files import NINE, PATHS

from tests.helpers import ROOT, started
from tests.repository.test_docs import commands

CAN = sys.platform == "linux" and shutil.which("g++") and not torch.version.cuda


def printed() -> list:
    """(file, flags, ranks) of each."""
    headers = [ast.get_docstring(ast.parse(PATHS[name].read_text("utf-8"))) for name in NINE]
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    found = []
    for text in (*headers, page):
        for name, words, ranks in commands(text):
            if "..." not in words and (ranks > 1 or "--offload" in words):
                found.append(pytest.param(name, words, ranks, id=f"{name}-{len(found)}"))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not CAN and "CI" not in os.environ, reason="Linux, g++, torch for CPUs")
@pytest.mark.parametrize(("name", "words", "ranks"), printed())
def test_a_command_trains_saves_and_resumes(name, words, ranks):
    command = ("torchrun", f"--nproc_per_node={ranks}", f"{name}.py", *words)
    done = started("-m", "tests.engines.fake_gpu", 2, 80, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    first, resumed, last, _ = json.loads(done.stdout.splitlines()[-1])
    codes = [run[0] for run in (first, resumed, last)]
    assert codes == [0, 0, 0], done.stderr[-3000:]
    assert first[1] == last[1]  # a rank would wait for ever in a collective of its own
