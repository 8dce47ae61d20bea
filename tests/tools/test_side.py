"""Two files side by side: the page has them whole, and draws both as they are, without marks."""

import json
import re
import shutil

import pytest
from checks.files import NINE, PATHS
from tools import side

from tests.helpers import ROOT
from tests.tools.test_browser import BROWSER, drawn

PAGE = ROOT / "docs" / "side.html"


def plain(name: str) -> list[str]:
    """A file's lines without marks."""
    lines = PATHS[name].read_text("utf-8").splitlines()
    return [re.sub("  # <own>$", "", line) for line in lines if not re.match(" *# </?own>$", line)]


def test_the_built_page_has_the_files_of_today():
    """Build it again after a change: python -m tools.side --out docs/side.html"""
    data = json.loads(re.search(r'id="data">(.*?)</script>', PAGE.read_text("utf-8"), re.S)[1])
    assert data == json.loads(json.dumps(side.data())) | {"overview": "index.html"}
    for name in NINE:
        parts = data["files"][name]["parts"]
        assert [data["lines"][i] for part in parts.values() for i in part] == plain(name)
        assert list(parts) == list(data["names"])  # every part of every file was found
    assert PAGE.stat().st_size <= 400_000


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
def test_both_columns_are_the_files(tmp_path):
    shown = shutil.copy(PAGE, tmp_path / "side.html")
    for pair in (("grpo", "stapo"), ("deep_grpo", "vcpo")):
        for place, name in zip("ab", pair):
            line = rf'<div class="{place}(?! none).*?</div>'
            assert drawn(shown, f"#{','.join(pair)},policy_loss", line) == plain(name)
