"""The page of a run in Chromium shows every token once and in order, without an error."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import page

from tests.tools.made import HOSTILE, group_of, with_samples

BROWSERS = "chromium chromium-browser google-chrome google-chrome-stable chrome".split()
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium"),
]


def drawn(shown: Path, address: str, element: str) -> list[str]:
    """Return the texts of these elements (a pattern) of a page, as the browser has made them."""
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    options += f" --virtual-time-budget=5000 --user-data-dir={shown.parent}/profile"
    command = [BROWSER, *options.split(), shown.as_uri() + address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    matches = re.findall(element, done.stdout.partition("<main")[2])
    return [html.unescape(re.sub("<.*?>", "", text)) for text in matches]


def test_a_runs_page(tmp_path):
    """In both runs, everything that anyone else writes is an attack."""
    run = with_samples(tmp_path / "<b>run", [group_of(1), group_of(3, HOSTILE[::-1])])
    shown = tmp_path / "page.html"
    page.main([run, run], shown)
    for address, texts in (("", HOSTILE), ("#3", HOSTILE[::-1])):
        tokens = drawn(shown, address, r"<span data-i=.*?</span>")
        assert tokens == [text for text in texts for _ in range(2)] * 2
