"""Both pages in Chromium, which run their own checks there (`#check`): every token once and in
order, colours, keys, alignment, nothing fetched, nothing wider than the window."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from checks.files import ALGORITHMS, NINE
from tools import page, reader

from tests.tools.made import a_group, row_of, with_samples
from tests.tools.test_page import HOSTILE

BROWSERS = "chromium chromium-browser google-chrome google-chrome-stable chrome".split()
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium"),
]
# Pages in one window: each sends its findings to the page around it
AROUND = """<!doctype html><body><script>
addEventListener("message", event => {
  const pre = document.createElement("pre");
  pre.textContent = event.data;
  document.body.append(pre);
});
</script>"""
FRAME = '<iframe src="{page}#check" style="width: {width}px; height: 800px"></iframe>'


def reports(folder: Path, *pages: tuple[Path, int]) -> list[dict]:
    """The findings of pages that check themselves, each in a window of that width."""
    around = folder / "around.html"
    frames = [FRAME.format(page=page.as_uri(), width=width) for page, width in pages]
    around.write_text("\n".join([AROUND, *frames]))
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    options += " --window-size=1500,900 --virtual-time-budget=5000"
    command = [BROWSER, *options.split(), f"--user-data-dir={folder}/profile", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)
    assert len(found) == len(pages), done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return [json.loads(html.unescape(text)) for text in found]


def test_a_runs_page(tmp_path):
    """Of a run in which everything that anyone else writes is an attack."""
    rows = []
    for step, text in enumerate(HOSTILE[:3], 1):
        row = row_of(a_group(), step=step, prompt=text, answer=HOSTILE[1])
        for one in row["responses"]:
            one["text"] = one["given"] = text
            one["tokens"] = [HOSTILE[i % len(HOSTILE)] for i in range(len(one["ids"]))]
        rows.append(row)
    flags = {"task": HOSTILE[1], "instruction": HOSTILE[0], "model": HOSTILE[4]}
    shown = tmp_path / "page.html"
    page.main([with_samples(tmp_path / "<b>&lt;run", rows, **flags)], shown)
    for report in reports(tmp_path, (shown, 1400), (shown, 390)):
        assert report["problems"] == [] and report["fetched"] == [], report
        assert report["drawn"] > 20 and report["files"] == len(NINE)


def test_the_readers_page(tmp_path):
    """In every pair equal lines face each other, and unmarked code never differs, except that
    recipe.py imports the `advantages` that the other files define."""
    shown = tmp_path / "reader.html"
    reader.main([], shown)
    for report in reports(tmp_path, (shown, 1400), (shown, 390)):
        for problem in report["problems"]:
            assert "recipe" in problem and "def advantages(" in problem, problem
        assert report["fetched"] == []
        assert report["pairs"] == len(ALGORITHMS) ** 2
