"""Two files side by side: the page has them whole, and draws both as they are, without marks."""

import json
import re
import shutil
from dataclasses import fields

import pytest
from checks.files import NINE, PATHS, VARIANTS
from common.cli import Flags
from tools import side

from tests.helpers import ROOT, module_of
from tests.tools.test_browser import BROWSER, drawn

PAGE = ROOT / "docs" / "side.html"


def plain(name: str) -> dict[int, str]:
    """Return a file's lines without marks, by their numbers."""
    lines = enumerate(PATHS[name].read_text("utf-8").splitlines(), 1)
    return {i: re.sub("  # <own>$", "", x) for i, x in lines if not re.match(" *# </?own>$", x)}


def test_the_built_page_has_the_files_of_today():
    """Build it again after a change: python -m tools.side --out docs/side.html"""
    data = json.loads(re.search(r'id="data">(.*?)</script>', PAGE.read_text("utf-8"), re.S)[1])
    assert data == json.loads(json.dumps(side.data())) | {"overview": "index.html"}
    for name, file in data["files"].items():
        lines = {}
        for part, indices in file["parts"].items():
            source = plain(file["taken"].get(part, name))
            for number, i in enumerate(indices, file["first"][part]):
                if file["first"][part] and i >= 0:
                    assert data["lines"][i] == source[number]
                    lines[number] = i
        if name in NINE:
            assert list(lines) == list(plain(name))
            assert list(file["parts"]) == list(data["names"])  # every part was found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_each_flag_once(name):
    of_all, args = ({f.name for f in fields(c)} for c in (Flags, module_of(name).Args))
    flags = re.findall(r"^    (\w+): .* = ", side.shown(name)["flags"], re.MULTILINE)
    assert len(flags) == len({*flags}) and args - of_all <= {*flags}


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
def test_both_columns_are_the_files(tmp_path):
    shown = shutil.copy(PAGE, tmp_path / "side.html")
    for pair in (("grpo", "stapo"), ("deep_grpo", "vcpo")):
        for place, name in zip("ab", pair):
            line = rf'<div class="{place}(?! none).*?</div>'
            assert drawn(shown, f"#{','.join(pair)},policy_loss", line) == [*plain(name).values()]
