"""tests/gpu/check.py on the CPU: it must run on the day when there is a GPU."""

import pytest

from tests.gpu import check


@pytest.mark.slow
def test_the_gpus_checks_run(capsys):
    assert check.main(["gradients", "resume", "memory", "offload", "nothing"]) == 1
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert said == ["ok", "ok", "ok", "ok", "wrong"]
