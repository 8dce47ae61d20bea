"""The page of a run's samples: its weights are the gradients of the files' own losses, the text of
models and prompts stays text, and nothing is fetched. (In a browser: test_browser.py.)"""

import base64
import json
import math
import re

import pytest
import torch
import checks
from checks.files import ALGORITHMS, NINE
from common.cli import BadInput
from tools import look, page

from tests.helpers import MORE, ROOT, SMALL, module_of, run_here
from tests.tools.made import a_group, metrics_of, read_lines, row_of, with_samples, write_lines

HOSTILE = [
    "</script><script>problems.push('run')</script>",
    "<img src=x onerror=problems.push('run')>",
    "<!-- <b>&amp;&lt; \u2028 {{data}} {{shared}}",
    "\u202egnp.exe\u202c\0\x1b[31m",
    "\"'`${problems.push('run')}`\\u003c",
    "\n\t  \u200b",
    "",
]


def unpacked(text: str) -> list[float]:
    """As the page reads a column: 24 bits a number."""
    raw, found = base64.b64decode(text), []
    for i in range(0, len(raw), 3):
        power, behind = raw[i] & 127, raw[i + 1] * 256 + raw[i + 2]
        size = (1 + behind / 2**16) * 2.0 ** (power - 63) if power or behind else 0.0
        if power == 127:
            size = math.nan if behind else math.inf
        found.append(-size if raw[i] & 128 else size)
    return found


def under(data: dict, name: str) -> tuple[list[float], str, dict]:
    """A file's weights of the first row, the reasons that stopped its tokens, and its notes."""
    found = data["runs"][0]["rows"][0]["under"][name]
    return unpacked(data["table"][found["weight"]]), data["table"][found["why"]], found


def words_of(data: dict, name: str) -> str:
    """The notes on a file."""
    said = data["runs"][0]["rows"][0]["under"][name]["said"]
    return " ".join(data["table"][place] for place in said)


def weights(name: str, batch: dict, **flags: object) -> torch.Tensor:
    """The factor on ∇ log π `[n, T]`, the batch being the whole mini-batch: by autograd."""
    module = module_of(name)
    columns = {key: value for key, value in batch.items() if key != "teacher_logp"}
    logp = columns.pop("logp").clone().requires_grad_()
    loss, count, _ = checks.terms(module, module.Args(**flags), logp=logp, **columns)
    return -torch.autograd.grad(loss / count, logp)[0]


@pytest.fixture(scope="module")
def group():
    return a_group()


@pytest.fixture(scope="module")
def data(group, tmp_path_factory):
    """The page of a grpo run with this one group."""
    run = with_samples(tmp_path_factory.mktemp("runs") / "one", [row_of(group)])
    return page.page_data([run], ROOT, variants=True)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "opd"])  # has a teacher
def test_the_weights_under_a_file_are_its_losss_gradient(name, group, data):
    """Columns that no group stores are made of its rows; then the page says so."""
    assert words_of(data, name) or not hasattr(module_of(name), "choose_tokens")
    batch = dict(group)
    if "each token has its response's" in words_of(data, name):
        batch["advantages"] = group["advantages"][:, None] * group["mask"]
    due = weights(name, batch)[group["mask"] > 0]
    found, why, _ = under(data, name)
    assert due.abs().max() > 0 and "!" not in why  # every stop has a line
    assert found == pytest.approx(due.tolist(), rel=1e-5, abs=1e-7 * due.abs().max().item())


def test_what_stopped_a_token_is_read_off_the_file(group, data):
    """GRPO's clip by its own variable, at its line; a KL term alone is no push of the reward's."""
    weight, why, _ = under(data, "grpo")
    ratio, A = (group["logp"] - group["old_logp"]).exp(), group["advantages"][:, None]
    cut = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    expected = cut[group["mask"] > 0].tolist()
    assert [letter != "." for letter in why] == expected and any(expected)
    assert all(w != 0 for w in weight)  # β pulls on them all


@pytest.mark.parametrize(("name", "own"), [("grpo", "justrl"), ("dapo", "gspo")])
def test_another_files_divisor_is_the_mini_batchs(name, own, group, tmp_path):
    """Of two groups of unlike lengths one is stored, by a run that counts the other unit: its
    weights under grpo (rows) and dapo (tokens) are the gradient on both groups."""
    whole = {}
    for key, column in group.items():
        longer = torch.cat([column] * 3, dim=1) if column.dim() == 2 else column
        shorter = torch.nn.functional.pad(column, (0, 14)) if column.dim() == 2 else column
        whole[key] = torch.cat([shorter, longer])
    sizes = {"rows": len(whole["mask"]), "tokens": int(whole["mask"].sum())}
    counted = "rows" if name == "grpo" else "tokens"
    row = row_of(group, **sizes)
    found, _, told = under(
        page.page_data([with_samples(tmp_path, [row], own)], ROOT, variants=True), name
    )
    due = weights(name, whole)[:4, :7][group["mask"] > 0]
    assert told["count"] == sizes[counted]
    assert found == pytest.approx(due.tolist(), rel=1e-5, abs=1e-9)


def test_a_teacher_is_no_reference(group, data, tmp_path):
    """Neither replaces the other."""
    taught = dict(group)
    taught["teacher_logp"] = taught.pop("ref_logp")
    distilled = page.page_data([with_samples(tmp_path, [row_of(taught)], "opd")], ROOT)
    assert any(under(distilled, "opd")[0])
    assert "without its KL term" in words_of(distilled, "grpo")
    assert "KL" not in words_of(data, "grpo")
    taught_here = data["runs"][0]["rows"][0]["under"]["opd"]
    assert "weight" not in taught_here and "needs a teacher" in words_of(data, "opd")


def test_every_chooses_steps_and_variants_chooses_files(group, tmp_path):
    """The first and the last stored step are always shown; the run's own file always is, too."""
    rows = [row_of(group, step=step) for step in (1, 10, 20, 25, 30, 33)]
    run = with_samples(tmp_path, rows, "dapo")
    (shown,) = page.page_data([run], ROOT, every=10)["runs"]
    assert [row["step"] for row in shown["rows"]] == [1, 10, 20, 30, 33] and shown["stored"] == 6
    assert shown["rows"][0]["under"].keys() == {*NINE, "dapo"}


@pytest.mark.parametrize("gap, drawn", [(1e-12, False), (1e-3, True)])
def test_a_curve_of_rounding_is_not_drawn(gap, drawn, group, tmp_path):
    """Its own scale would make it a climb, which troubleshooting teaches as a cause of collapse."""
    run = with_samples(tmp_path, [row_of(group)])
    lines = [line | {"sampler_kl": gap * line["step"] / 20} for line in metrics_of(20)]
    write_lines(run / "metrics.jsonl", lines)
    (shown,) = page.page_data([run], ROOT)["runs"]
    assert ("sampler_kl" in shown["curves"]) == drawn


def test_hostile_text_stays_text_and_nothing_is_fetched(group, tmp_path):
    row = row_of(group, prompt=HOSTILE[0], answer=HOSTILE[1])
    for i, one in enumerate(row["responses"]):
        one["text"] = one["given"] = HOSTILE[i]
        one["tokens"] = [HOSTILE[i]] * len(one["ids"])
    run = with_samples(tmp_path / "run", [row], task=HOSTILE[1], model=HOSTILE[4])
    page.main([run], tmp_path / "page.html")
    text, form = (tmp_path / "page.html").read_text("utf-8"), look.form(page.TEMPLATE)
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    (shown,) = json.loads(inside)["runs"][0]["rows"]
    assert shown["prompt"] == HOSTILE[0]
    assert [one["text"] for one in shown["responses"]] == HOSTILE[:4]
    assert text.count("</script") == form.count("</script")
    assert "default-src 'none'" in form
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|\bsrc=|@import|url\(|<link", form)


DAMAGED = [  # file, line, the value's place in it, and its new value (None: deleted)
    ("metrics.jsonl", 3, ["reward"], "0.5"),
    ("samples.jsonl", 1, ["prompt"], None),
    ("samples.jsonl", 1, ["responses", 1, "logp"], [0.0]),
    ("samples.jsonl", 1, ["responses", 1, "logp", 0], 10**400),
    ("samples.jsonl", 1, ["responses", 1, "text"], "\ud800"),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: f"{damage[0]} {damage[2]}")
def test_a_damaged_file_is_one_line(damage, group, tmp_path):
    """It names the file and, of several, the line; nothing is written."""
    name, line, (*way, last), value = damage
    path = with_samples(tmp_path / "run", [row_of(group)]) / name
    rows = read_lines(path)
    place = rows[line - 1]
    for step in way:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    write_lines(path, rows)
    with pytest.raises(BadInput) as told:
        page.main([path.parent], tmp_path / "page.html")
    assert f"{path}:{line}: " in str(told.value)
    assert "\n" not in str(told.value) and not (tmp_path / "page.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "vcpo", "opd"])
def test_a_runs_own_weights_come_out_of_its_own_columns(name, tmp_path):
    """With one group to a mini-batch, though clip and KL are alive in the second one."""
    flags = [*SMALL, *MORE.get(name, ()), *"--prompts_per_step 2 --steps 3".split()]
    flags += "--sample_every 1 --lr 3e-3 --warmup 0".split()
    assert run_here(module_of(name).main, *flags, "--run_dir", tmp_path / "run") == 0
    rows = page.page_data([tmp_path / "run"], tmp_path)["runs"][0]["rows"]
    # Six digits of a log-prob are stored: at -9 they leave 1e-5 of a ratio
    assert len(rows) > 1 and max(row["apart"] for row in rows) < 5e-5
