"""The page that shows two files side by side: its data are the files' lines, marks and gradients;
in a browser every pair aligns, the keys work, nothing is fetched and no error is said."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common.distributed import BadInput
from tools import look, reader
from checks.files import ALGORITHMS, PATHS, trunk_of
from tools.marks import changes, marked_lines

import checks
from tests.helpers import ROOT, module_of

BROWSERS = "chromium chromium-browser google-chrome google-chrome-stable chrome".split()
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def data():
    return reader.page_data(ROOT)


@pytest.fixture(scope="module")
def files(data):
    return {file["name"]: file for file in data["files"]}


def text(line: list[str]) -> str:
    return "".join(line[1::2])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_lines_are_the_files(name, data, files):
    """Each line once and in order, without its mark; what is nothing but a mark stays one."""
    source, file = PATHS[name].read_text(), files[name]
    lines = [data["lines"][number] for number in file["lines"]]
    written = source.splitlines()
    assert len(lines) == len(written)
    for line, whole in zip(lines, written):
        left = re.sub(r"\s*# </?own>$", "", whole)
        assert text(line) == (left or whole.strip()), whole
        assert ("o" in line[::2]) == bool(whole and not left)
    assert set(file["own"]) == marked_lines(source)


def test_colours_are_of_the_token(data, files):
    """A keyword, a function's name, a comment, a flag's explanation, a number."""
    lines = [data["lines"][number] for number in files["grpo"]["lines"]]
    pieces = {(c, t.strip()) for line in lines for c, t in zip(line[::2], line[1::2])}
    assert {("k", "def"), ("f", "policy_loss"), ("m", "3e-4"), ("c", "# [n, T]: M = 0")} <= pieces
    assert ("d", '"""ε above 1 (ours; DAPO and STAPO widen it to 0.28)."""') in pieces


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_parts_of_a_file(name, files):
    """In the order of the page, none empty; the loss begins where `policy_loss` does."""
    lines, starts = PATHS[name].read_text().splitlines(), files[name]["sections"]
    assert list(starts.values()) == sorted(set(starts.values())) and starts["formula"] == 1
    assert starts["notes"] == 18  # the headers are in step
    assert lines[starts["loss"] - 1].startswith("def policy_loss(")
    assert lines[starts["loop"] - 1].startswith("def main(")
    assert lines[starts["flags"] - 1 : starts["flags"] + 1] == ["@dataclass", "class Args(Flags):"]
    assert files[name]["formula"][0] == lines[14].strip()  # the first line of the gradient weight


def interpolated(file: dict, kind: int, sign: int, ratio: float) -> float:
    """As the page does it: linear in log r between the two points around it."""
    given = file["weights"]
    curve = given["of"].get(kind, given["of"][0])[sign]
    above = next(i for i, r in enumerate(given["ratios"]) if r > ratio)
    low, high = given["ratios"][above - 1 : above + 1]
    share = math.log(ratio / low) / math.log(high / low)
    return curve[above - 1] + share * (curve[above] - curve[above - 1])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_curves_are_the_gradient_of_policy_loss(name, files):
    """For every kind of token and either sign, at ratios between the points of the grid."""
    file, module = files[name], module_of(name)
    tokens = [(k, s) for k in range(len(reader.KINDS)) for s in (1.0, -1.0)]
    kinds = list(reader.KINDS.values())
    old = torch.tensor([[kinds[k][0]] for k, _ in tokens], dtype=torch.float64)
    batch = {
        "mask": torch.ones_like(old),
        "entropy": torch.tensor([[kinds[k][1]] for k, _ in tokens], dtype=torch.float64),
        "advantages": torch.tensor([s for _, s in tokens], dtype=torch.float64),
    }
    for ratio in (0.11, 0.77, 0.99993, 1.00087, 1.023, 1.33, 7.7):
        logp = (old * ratio).clamp(max=1).log().requires_grad_()
        terms = checks.terms(
            module, module.Args(), logp=logp, old_logp=old.log(), ref_logp=logp.detach(), **batch
        )
        terms[0].backward()
        for (kind, sign), gradient in zip(tokens, -logp.grad[:, 0] / file["weights"]["scale"]):
            if ratio * kinds[kind][0] < 1:
                told = interpolated(file, kind, int(sign < 0), ratio)
                assert told == pytest.approx(gradient.item(), rel=6e-3, abs=6e-3), (kind, sign)


def test_the_curves_against_closed_forms(files):
    """Weights as the headers have them, at the edges of the clips too."""
    clipped = {0.79: (0.79, 0), 0.81: (0.81, -0.81), 1.19: (1.19, -1.19), 1.21: (0, -1.21)}
    tau = (1.0, 1.05)
    for ratio in (0.3, *clipped, 2.0, 4.0):
        for sign in (0, 1):
            gate = 1 / math.cosh(tau[sign] * (ratio - 1) / 2) ** 2
            soft = (1, -1)[sign] * ratio * gate
            assert interpolated(files["sapo"], 0, sign, ratio) == pytest.approx(soft, rel=5e-3)
            if ratio in clipped:
                hard = pytest.approx(clipped[ratio][sign], abs=1e-3)
                for name in ("grpo", "goldilocks", "deep_grpo", "dr_grpo"):
                    assert interpolated(files[name], 0, sign, ratio) == hard
    assert [interpolated(files["gspo"], 0, 0, r) for r in (1.00039, 1.00041)] == [
        pytest.approx(1, abs=1e-3),
        0,
    ]
    assert interpolated(files["minirl"], 0, 1, 9.0) == pytest.approx(-5)
    assert files["dr_grpo"]["weights"]["scale"] == 1 / 64
    # A rare token, where the model was sure of another: STAPO takes a good one's away
    assert interpolated(files["stapo"], 3, 0, 1.1) == 0 != interpolated(files["stapo"], 3, 1, 1.1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_checks_and_mutants_are_all_named(name, files):
    """And a mutant's line is where the file has what it damages."""
    every, mutants = checks.of(name)
    file, lines = files[name], PATHS[name].read_text().splitlines()
    assert len(file["checks"]) == len(every) and all(held for _, held in file["checks"])
    assert [mutant[0] for mutant in file["mutants"]] == list(mutants)
    for _, old, _, line in file["mutants"]:
        near = "".join(lines[line - 1 : line + 12])
        assert line and re.findall(r"\w+", old)[-1] in near, (old, line)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_links_lead_to_the_files_from_where_the_page_is(name, tmp_path):
    for folder in (ROOT, tmp_path):
        found = reader.links(PATHS[name], folder)
        assert [Path(path).stem for path in found] == [name, name]
        for path, link in found.items():
            assert (folder / link).resolve() == ROOT / path and (ROOT / path).is_file()


def test_which_files_it_opens_with():
    """Two names, or a name and its trunk, or the first trunk and what is nearest to it."""
    assert reader.chosen(["stapo", "variants/dr_grpo.py"]) == ("stapo", "dr_grpo")
    assert reader.chosen(["sapo"]) == ("grpo", "sapo") and reader.chosen(["grpo"])[1] == "grpo"
    trunk, near = reader.chosen([])
    assert trunk == trunk_of(PATHS[near]).stem
    distance = {n: changes(p, trunk_of(p))[1] for n, p in PATHS.items() if trunk_of(p)}
    assert distance[near] == min(distance.values())
    with pytest.raises(BadInput, match="choose among grpo, "):
        reader.chosen(["grpo", "nope"])


def test_what_is_not_a_page_of_ours_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "page", lambda start, folder: look.opening(reader.TEMPLATE))
    mine = tmp_path / "reader.html"
    mine.write_text("notes")
    for out in (mine, tmp_path, tmp_path / "none" / "reader.html"):
        with pytest.raises(BadInput):
            reader.main(["grpo"], out)
    assert mine.read_text() == "notes"
    mine.unlink()
    reader.main(["grpo"], mine)
    reader.main(["grpo"], mine)  # over its own


def test_no_text_of_a_file_can_end_the_data(monkeypatch):
    """Whatever stands in a source is read back as it was."""
    odd = {"lines": [["", "</script><!-- <b>&amp; \u2028 {{data}}"]]}
    monkeypatch.setattr(reader, "page_data", lambda folder: odd)
    page = reader.page(("a", "b"), ROOT)
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(inside) == {"start": ["a", "b"]} | odd
    assert len(re.findall("</script", page)) == len(re.findall("</script", shown())) == 3


def shown() -> str:
    return look.form(reader.TEMPLATE)


def test_the_page_refers_to_nothing_outside(monkeypatch):
    """Its form has no address, and forbids the browser to load any."""
    assert not re.search(r"https?:|\bsrc=|@import|url\(|<link|fetch\(|XMLHttp", shown())
    assert "default-src 'none'" in shown()


@pytest.fixture(scope="module")
def page(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "reader.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "page_data", lambda folder: data)
        reader.main([], path)
    return path


def test_the_page_stays_small(page):
    assert page.stat().st_size < 2e6


# Pages in one window: each says what it found to the page around it
AROUND = """<!doctype html><body><script>
addEventListener("message", event => {
  const pre = document.createElement("pre");
  pre.textContent = event.data;
  document.body.append(pre);
});
</script>"""
FRAME = '<iframe src="{page}#check" style="width: {width}px; height: 800px"></iframe>'


def reports(folder: Path, *pages: tuple[Path, int]) -> tuple[list[dict], str]:
    """What pages find that check themselves, each in a window of that width; and what the browser
    says beside."""
    around = folder / "around.html"
    frames = [FRAME.format(page=page.as_uri(), width=width) for page, width in pages]
    around.write_text("\n".join([AROUND, *frames]))
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    options += " --window-size=1500,900 --virtual-time-budget=5000"
    command = [BROWSER, *options.split(), f"--user-data-dir={folder}/profile", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)
    assert len(found) == len(pages), done.stderr[-2000:]
    return [json.loads(html.unescape(text)) for text in found], done.stderr


@needs_browser
def test_in_a_browser_every_pair_aligns(page, tmp_path):
    """Wide and on a phone: no line is lost, equal lines face each other, two lines of a row stand
    at one height, unmarked code never differs; keys and the slider do what they say; nothing is
    fetched; the console is silent."""
    found, said = reports(tmp_path, (page, 1400), (page, 390))
    for report in found:
        assert report["problems"] == [] and report["fetched"] == []
        assert report["pairs"] == len(ALGORITHMS) ** 2
        assert all(n > 0 for pair, n in report["own"].items() if len(set(pair.split("+"))) == 2)
    assert {(report["width"], report["one"]) for report in found} == {(390, True), (1400, False)}
    assert not [line for line in said.splitlines() if "CONSOLE" in line]


# Damages to the page, and what its check says of them
DAMAGES = [
    ("if (x < one.length) {", "if (x < one.length && x !== 7) {", "not every line of a"),
    ("return html;\n}", "return html.replace('ratio', 'ration');\n}", ": text of "),
    ('{kind: marked ? "own" : "calm", rows}', '{kind: "calm", rows}', "unmarked code"),
    (".row { display: grid;", ".row {", "at two heights"),
    (
        "white-space: pre-wrap; overflow-wrap: anywhere; min-",
        "white-space: pre; min-",
        "wider than",
    ),
    ("state.at + by;", "state.at + 2 * by;", "n: the first difference"),
    ("setRatio(event.target.value / 1000)", "setRatio(0.5)", "the weight after a drag"),
    ('text.classList.add("flash")', "", "does not flash"),
    ("<main>", '<main><img src="https://example.invalid/a.png">', "blocked https"),
]


@needs_browser
def test_the_browsers_check_can_fail(data, tmp_path, monkeypatch):
    """Each damage is found, and told as what it is (on a page of three files, which is quicker)."""
    monkeypatch.setattr(reader, "page_data", lambda folder: data | {"files": data["files"][:3]})
    source, pages = reader.page(("grpo", data["files"][1]["name"]), tmp_path), []
    for i, (old, new, _) in enumerate(DAMAGES):
        assert source.count(old) == 1, old
        pages.append((tmp_path / f"damaged{i}.html", 390 if "wider" in DAMAGES[i][2] else 1400))
        pages[-1][0].write_text(source.replace(old, new))
    found, _ = reports(tmp_path, *pages)
    problems = ["\n".join(report["problems"]) for report in found]
    for _, _, said in DAMAGES:
        assert any(said in problem for problem in problems), said


def test_without_the_tests_there_are_no_checks_to_show(monkeypatch):
    """Who downloads the repository for its tools may delete them."""
    monkeypatch.setitem(sys.modules, "tests", None)
    found = reader.tests_of(PATHS["grpo"], PATHS["grpo"].read_text())
    assert found == {"checks": [], "mutants": []}
