"""The page of a run's samples: its numbers are the run's and the files' own; what a model or a
prompt wrote stays text; in a browser all steps, layers and keys work and nothing is fetched."""

import base64
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.distributed import BadInput
from tools import look, page

from tests.loop import formulas
from checks.files import ALGORITHMS, PATHS
from tests.helpers import MORE, ROOT, RUN, SMALL, module_of, run_here
from tests.loop.oracle import LIMIT, OBJECTIVES, Batch
from tests.tools.test_reader import needs_browser, reports

HOSTILE = [
    "</script><script>problems.push('run')</script>",
    "<img src=x onerror=problems.push('run')>",
    "<!-- <b>&amp;&lt; \u2028 {{data}} {{shared}}",
    "\u202egnp.exe\u202c\0\x1b[31m",
    "\"'`${problems.push('run')}`\\u003c",
    "\n\t  \u200b",
    "",
]


# Runs made by hand


def weights_of(name: str, batch: dict, flags: dict) -> torch.Tensor:
    """The factor on ∇ log π of each token `[n, T]`, the group being the whole mini-batch: from the
    formulas of the loop's oracle, not from the file."""
    logp = batch["logp"].clone().requires_grad_()
    b = Batch(logp=logp, old=batch["old_logp"], ref=batch["ref_logp"], mu=batch["rollout_logp"])
    n = len(logp)
    vars(b).update({key: batch[key] for key in ("entropy", "mask")})
    rows = [SimpleNamespace(tokens=[0] * int(length)) for length in batch["mask"].sum(1)]
    vars(b).update(args=flags, A=batch["advantages"].clone(), rows=rows, count=n)
    vars(b).update(branch=torch.zeros(n, dtype=torch.bool))
    # No working block: every token is of the answer
    none = torch.zeros(n, dtype=torch.float64)
    vars(b).update(working=0 * b.mask, working_A=none, marks=[(0, 0)] * n, alone=[0] * n)
    if name == "vcpo":  # the oracle's takes the norms of gradients, for a baseline outside the loss
        w = ((logp - b.mu) * b.mask).sum(1).detach().exp().clip(max=flags["is_cap"])
        J = (w * b.A * (logp * b.mask).sum(1) / b.mask.sum(1)).mean()
    elif name == "signs":
        u = 1 + (flags["positive_weight"] - 1) * (b.A > 0).double()
        b.A = u * b.A
        J, _ = OBJECTIVES["grpo"](b)
    else:
        J, _ = formulas.of(name, "objective", OBJECTIVES.get(name))(b)
    return torch.autograd.grad(J, logp)[0]


@pytest.fixture(scope="module")
def group():
    """Four responses of unlike length with ratios beyond every clip, a gap and a reference."""
    random = torch.Generator().manual_seed(5)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(4, 7, generator=random, dtype=torch.float64)

    mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [6]])).double()
    old = -noise(1.5).abs() - 0.05
    batch = {
        "logp": (old + noise(0.3)).clamp(max=-1e-3),
        "old_logp": old,
        "rollout_logp": (old + noise(0.02)).clamp(max=-1e-3),
        "ref_logp": (old + noise(0.5)).clamp(max=-1e-3),
        "entropy": noise(1).abs(),
    }
    batch = {name: column * mask for name, column in batch.items()}
    return batch | {"mask": mask, "advantages": torch.tensor([1.5, -0.5, -0.5, -0.5]).double()}


def row_of(batch: dict, weight: torch.Tensor, count: float, **more: object) -> dict:
    """A row of samples.jsonl, of a mini-batch that is this group."""
    responses = []
    for i, length in enumerate(batch["mask"].sum(1).long().tolist()):
        names = [name for name in page.COLUMNS if name in batch]
        columns = {name: batch[name][i, :length].tolist() for name in names}
        answer = {"text": f"response {i}", "given": "", "reward": float(i == 0), "finished": True}
        answer |= {"advantage": batch["advantages"][i].item(), "ids": list(range(length))}
        answer |= {"tokens": [f"t{t}" for t in range(length)]}
        responses.append(answer | columns | {"weight": weight[i, :length].tolist()})
    row = {"step": 1, "minibatch": 1, "minibatches": 1, "count": count, "group": 0}
    row |= {"rows": len(weight), "tokens": int(batch["mask"].sum())}
    return row | {"prompt": "1+1=", "answer": "2", "responses": responses} | more


def written(folder: Path, rows: list[dict], algorithm: str = "grpo", **config: object) -> Path:
    """A run folder with those samples."""
    folder.mkdir(parents=True, exist_ok=True)
    module = module_of(algorithm)
    flags = asdict(module.Args()) | {"algorithm": algorithm, "acted": module.ACTED} | config
    (folder / "config.json").write_text(json.dumps(flags))
    metrics = [
        {"step": s, "reward": s / 9, "greedy": 0.5, "entropy": 1 / (s + 1)} for s in range(9)
    ]
    for name, lines in (("samples.jsonl", rows), ("metrics.jsonl", metrics)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def unpacked(text: str) -> list[float]:
    """As the page reads a column."""
    raw, found = base64.b64decode(text), []
    for i in range(0, len(raw), 3):
        power, behind = raw[i] & 127, raw[i + 1] * 256 + raw[i + 2]
        size = (1 + behind / 2**16) * 2.0 ** (power - 63) if power or behind else 0.0
        if power == 127:
            size = math.nan if behind else math.inf
        found.append(-size if raw[i] & 128 else size)
    return found


def under(data: dict, name: str, row: int = 0) -> tuple[list[float], str, dict]:
    """A file's weights of a row, what stopped its tokens, and what is said."""
    found = data["runs"][0]["rows"][row]["under"][name]
    return unpacked(data["table"][found["weight"]]), data["table"][found["why"]], found


@pytest.fixture(scope="module")
def data(group, tmp_path_factory):
    """A grpo run with this one group, its weights those of the formula."""
    weight = weights_of("grpo", group, asdict(module_of("grpo").Args()))
    rows = [row_of(group, weight, 4.0)]
    return page.page_data([written(tmp_path_factory.mktemp("runs") / "one", rows)], ROOT)


@pytest.fixture(scope="module")
def distilled(group, tmp_path_factory):
    """An opd run with this group: what is π_ref in the other is a teacher here."""
    weight = weights_of("opd", group, asdict(module_of("opd").Args()))
    taught = group | {"teacher_logp": group["ref_logp"]}
    del taught["ref_logp"]
    rows = [row_of(taught, weight, group["mask"].sum().item())]
    return page.page_data([written(tmp_path_factory.mktemp("runs") / "opd", rows, "opd")], ROOT)


# Its numbers


def test_numbers_keep_five_digits():
    """Four letters each; zeros stay zeros, and what is no number stays none."""
    values = [0.0, 1.0, -1 / 3, 3e-18, 6.02e17, 0.9999999, math.inf, -math.inf, math.nan]
    values += torch.logspace(-18, 18, 300, dtype=torch.float64).neg().tolist()
    table = page.Table()
    place = table.numbers(torch.tensor(values, dtype=torch.float64))
    found = unpacked(table.texts()[place])
    for value, read in zip(values, found, strict=True):
        assert read == pytest.approx(value, rel=1e-5, abs=0, nan_ok=True), value
    assert table.numbers(torch.tensor(values, dtype=torch.float64)) == place == 1
    assert len(table.texts()[1]) == 4 * len(values)
    place = table.numbers(torch.tensor([-1e-30]))
    tiny = unpacked(table.texts()[place])
    assert -1e-18 < tiny[0] < 0  # and not 0, which would pass for silenced


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_weight_under_another_files_loss(name, group, data, distilled, monkeypatch):
    """Equal to the oracle's formula of that file on the same group, the whole mini-batch here."""
    if (
        name == "lp_reg"
    ):  # a column that no other run has: π_old stands for it, and the page says so
        monkeypatch.setattr("tests.loop.formulas.lp_reg.proxy", lambda b: b.old.exp())
    flags = asdict(module_of(name).Args())
    flags["max_new_tokens"] = asdict(module_of("grpo").Args())["max_new_tokens"]
    if name == "dr_grpo":
        monkeypatch.setattr("tests.loop.formulas.dr_grpo.LIMIT", flags["max_new_tokens"])
        assert LIMIT != flags["max_new_tokens"]
    if "delta" in flags and not flags["delta"]:  # dppo's default is the file's table
        flags["delta"] = module_of(name).DELTA[flags["trust_region"]]
    try:
        due = weights_of(name, group, flags)[group["mask"] > 0]
    except AttributeError as lacking:
        pytest.skip(f"its formula asks for more than a group: {lacking}")
    found, _, _ = under(distilled if name == "opd" else data, name)
    assert due.abs().max() > 0
    assert found == pytest.approx(due.tolist(), rel=1e-5, abs=1e-7 * due.abs().max().item())


def test_what_stopped_a_token_is_read_off_the_file(group, data):
    """GRPO's clip by its own variable, at its line; a KL term alone is no push of the reward's."""
    weight, why, _ = under(data, "grpo")
    ratio = (group["logp"] - group["old_logp"]).exp()
    A = group["advantages"][:, None]
    cut = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    there = group["mask"] > 0
    assert [letter != "." for letter in why] == cut[there].tolist() and 0 < cut[there].sum()
    assert all(w != 0 for w in weight)  # β pulls on them all
    file = {one["name"]: one for one in data["files"]}["grpo"]
    name, truth, line = file["reasons"][ord(why.strip(".")[0]) - 97]
    source = PATHS["grpo"].read_text().splitlines()
    assert (name, truth) == ("cut", True) and source[line - 1].strip().startswith("cut = ")
    assert "".join(file["code"][line][1::2]) == source[line - 1]
    assert all("objective = " in source[line - 1] for line in file["objective"])
    of = {one["name"]: ["".join(x[1::2]) for x in one["code"].values()] for one in data["files"]}
    assert any("return -(weight * advantages" in line for line in of["vcpo"])
    assert all(lines for lines in of.values())


def test_every_stop_has_a_line(group, data):
    """No file's clip, mask or gate is one that the page only sees the result of."""
    stopped = set()
    for name in set(ALGORITHMS) - {"opd"}:  # it needs a teacher
        weight, why, _ = under(data, name)
        assert "!" not in why, name
        stopped |= {name} if why else set()
        live = [w for w, letter in zip(weight, why) if letter == "."]
        assert all(w != 0 for w in live), name
    assert {"grpo", "gspo", "minirl", "stapo", "dapo", "entropy20", "dppo"} <= stopped
    assert not {"sapo", "maspo", "cispo", "paced", "vespo"} & stopped


def test_its_own_loss_again(data, group, tmp_path):
    """What the run stored is compared with its own file's loss on what it stored: equal here, and
    told where it is not."""
    (row,) = data["runs"][0]["rows"]
    assert row["apart"] < 1e-6
    ratio = (group["logp"] - group["old_logp"]).exp()
    names = {name: place for name, _, place in row["own"]}
    shown = unpacked(data["table"][names["ratio"]])
    assert shown == pytest.approx(ratio[group["mask"] > 0].tolist(), rel=1e-5)
    kept = unpacked(data["table"][row["kept"]])
    want = [0.0 if letter != "." else r for r, letter in zip(shown, under(data, "grpo")[1])]
    assert kept == pytest.approx(want, rel=1e-4)
    weight = weights_of("grpo", group, asdict(module_of("grpo").Args()))
    off = written(tmp_path / "off", [row_of(group, 1.5 * weight, 4.0)])
    assert page.page_data([off], ROOT)["runs"][0]["rows"][0]["apart"] == pytest.approx(1 / 3, 0.02)


def test_a_teacher_is_no_reference(data, distilled):
    """Neither stands for the other. Where no weight asks for an advantage, none was stopped."""
    (row,) = distilled["runs"][0]["rows"]
    assert row["apart"] < 1e-6 and not under(distilled, "opd")[1]
    assert all(math.isnan(part) for part in unpacked(distilled["table"][row["kept"]]))
    for name in ("grpo", "signs", "laconic"):
        assert "without its KL term" in " ".join(under(distilled, name)[2]["said"])
        assert "KL" not in " ".join(under(data, name)[2]["said"])
    taught = data["runs"][0]["rows"][0]["under"]["opd"]
    assert "weight" not in taught and "needs a teacher" in " ".join(taught["said"])


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_another_files_divisor_is_the_mini_batchs(name, group, tmp_path):
    """Of two groups of unlike lengths one is stored, by a run that counts the other unit: its
    weights under grpo and dapo are those of the formulas on both groups."""

    def joined(column: torch.Tensor) -> torch.Tensor:
        longer = column.repeat(1, 3) if column.dim() == 2 else column
        shorter = torch.nn.functional.pad(column, (0, 14)) if column.dim() == 2 else column
        return torch.cat([shorter, longer])

    whole = {key: joined(column) for key, column in group.items()}
    due = weights_of(name, whole, asdict(module_of(name).Args()))[:4, :7][group["mask"] > 0]
    sizes = {"rows": len(whole["mask"]), "tokens": int(whole["mask"].sum())}
    count, own = (sizes["tokens"], "justrl") if name == "grpo" else (sizes["rows"], "gspo")
    row = row_of(group, 0 * group["mask"], float(count), **sizes)
    data = page.page_data([written(tmp_path / "part", [row], own)], ROOT)
    assert under(data, name)[2]["count"] == sizes["rows" if name == "grpo" else "tokens"]
    assert under(data, name)[0] == pytest.approx(due.tolist(), rel=1e-5, abs=1e-9)
    assert under(data, own)[2]["count"] == count
    assert "estimated" in " ".join(under(data, "entropy20")[2]["said"])  # it counts some tokens


def test_what_another_file_lacks_is_said(group, data, tmp_path):
    """A quantile over the batch, a column that is not stored, an advantage of its own."""
    assert "a quantile over the whole mini-batch" in " ".join(under(data, "stapo")[2]["said"])
    assert under(data, "gspo")[2]["said"] == []
    said = " ".join(under(data, "minirl")[2]["said"])
    assert said == "" or "0.75" in said  # the group of four is none of --group_size 8
    weight = 0 * group["mask"]
    row = row_of(group, weight, 4.0)
    for one in row["responses"]:
        del one["ref_logp"]
        one["left_out"] = [2, 100]
    folder = written(tmp_path / "lacking", [row], "dapo", group_size=4)
    found = page.page_data([folder], ROOT)
    every = found["runs"][0]["rows"][0]["under"]
    said = {name: " ".join(every[name]["said"]) for name in ALGORITHMS}
    assert "without its KL term" in said["grpo"] and "0.75, -0.25" in said["minirl"]
    assert all("only what is stored" in said[name] for name in set(said) - {"opd"})


def test_advantages_of_tokens(group, tmp_path):
    """Another file takes their mean over a response."""
    row = row_of(group, 0 * group["mask"], 4.0)
    for one in row["responses"]:
        one["advantage"] = [one["advantage"] + t for t in (-1, *[0] * (len(one["ids"]) - 2), 1)]
    data = page.page_data([written(tmp_path / "tokens", [row], "gspo")], ROOT)
    due = weights_of("dapo", group, asdict(module_of("dapo").Args()))[group["mask"] > 0]
    found, _, told = under(data, "dapo")
    assert "the mean over a response's tokens" in " ".join(told["said"])
    part = found[0] / due[0].item()  # what it divides by is another matter
    assert found == pytest.approx((part * due).tolist(), rel=1e-4, abs=1e-6)


# Whole runs

# Files whose loss is handed what no group has, and so is not the run's on the stored group
MORE_THAN_A_GROUP = {
    "deep_grpo": "which rows are branches, and T_main / T_branch",
    "recipe": "branches and their balance",
    "blockwise": "which tokens are the working, and their advantage",
    "lp_reg": "π_old without its noise",
}


@pytest.mark.runs
@pytest.mark.parametrize("name", RUN)
def test_a_runs_own_weights_from_its_own_columns(name, tmp_path):
    """With one group to a mini-batch every other file's stored weights come out of its stored
    columns, though clip and KL are alive in the second mini-batch."""
    flags = [*SMALL, *MORE.get(name, ()), *formulas.of(name, "SMALL", ())]
    flags += "--prompts_per_step 2 --steps 3 --sample_every 1 --lr 3e-3 --warmup 0".split()
    assert run_here(module_of(name).main, *flags, "--run_dir", tmp_path / "run") == 0
    data = page.page_data([tmp_path / "run"], tmp_path)
    rows = data["runs"][0]["rows"]
    first = 1 + int("--lag" in flags)  # vcpo trains what was sampled a step before
    assert {row["step"] for row in rows} == {*range(first, 4)}
    if name in MORE_THAN_A_GROUP:
        assert rows[0]["under"][name]["said"]  # what is missing
    else:
        # Six digits of a log-prob are stored: at -9 they leave 1e-5 of a ratio
        assert max(row["apart"] for row in rows) < 5e-5


# What cannot be shown


def test_what_is_no_run_with_samples_is_said_in_one_line(group, tmp_path):
    for folder, words in ((tmp_path / "none", "holds no run"), (tmp_path / "old", "no samples")):
        if "old" in folder.name:
            written(folder, [])
            (folder / "samples.jsonl").unlink()
        with pytest.raises(BadInput, match=words):
            page.main([folder], tmp_path / "page.html")
    with pytest.raises(BadInput, match="no group"):
        page.main([written(tmp_path / "bad", [FIRST])], tmp_path / "page.html")
    (mine := tmp_path / "mine.html").write_text("notes")
    with pytest.raises(BadInput, match="not from here"):
        page.main([written(tmp_path / "good", [FIRST])], mine)
    assert mine.read_text() == "notes"
    with pytest.raises(BadInput, match="3 runs"):
        page.main([tmp_path] * 3, tmp_path / "page.html")


FIRST = {"step": 1, "example": {"prompt": "1+1=", "answer": "2", "response": "3", "reward": 0.0}}
DAMAGED = [  # file, line, where in it, and what is put there; None: nothing
    *(("config", 1, ["acted"], value) for value in ([], {"clip_share": 5}, None)),
    *(("config", 1, [name], value) for name, value in (("algorithm", ["grpo"]), ("betas", 5))),
    *(("metrics", 3, ["reward"], value) for value in ("0.5", {}, True)),
    *(("samples", 1, ["example"], value) for value in ([], {"prompt": "1+1="})),
    *(("samples", 2, ["count"], value) for value in (None, "4", math.inf)),
    *(("samples", 2, ["prompt"], value) for value in (None, ["1"])),
    *(("samples", 2, [name], None) for name in ("minibatches", "rows", "tokens")),
    ("samples", 2, ["responses"], []),
    *(("samples", 2, ["responses", 1, "logp"], value) for value in (None, "text", [0.0])),
    *(("samples", 2, ["responses", 1, "logp", 0], value) for value in ("0", 10**400)),
    *(
        ("samples", 2, ["responses", 1, "advantage"], value)
        for value in (None, "1", [1.0, 2.0, 3.0])
    ),
    *(("samples", 2, ["responses", 1, name], None) for name in ("weight", "ref_logp", "given")),
    *(("samples", 2, ["responses", 1, name], "x") for name in ("reward", "finished", "left_out")),
    ("samples", 2, ["responses", 1, "text"], "\ud800"),
    ("samples", 2, ["responses", 1, "tokens"], [5, 6, 7]),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_a_damaged_file_is_one_line(damage, group, tmp_path):
    """It names the file and, of several, the line."""
    file, line, (*way, last), value = damage
    run = written(tmp_path / "run", [FIRST, row_of(group, 0 * group["mask"], 4.0)])
    path = run / (f"{file}.json" if file == "config" else f"{file}.jsonl")
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    place = rows[line - 1]
    for step in way:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput) as told:
        page.main([run], tmp_path / "page.html")
    assert str(path) in str(told.value) or file == "config" and value is None
    assert file == "config" or f"{path}:{line}: " in str(told.value)
    assert ("older run" in str(told.value)) == (last in ("rows", "tokens") and not way)
    assert not (tmp_path / "page.html").exists()


def test_numbers_that_are_none_are_shown_as_none(group, tmp_path):
    """A run that went to NaN: null in its files, NaN in the columns."""
    row = row_of(group, 0 * group["mask"], 4.0)
    row["responses"][0]["logp"][2] = row["responses"][0]["weight"][2] = None
    row["responses"][1]["reward"] = None
    data = page.page_data([written(tmp_path / "nan", [row])], ROOT)
    columns = data["runs"][0]["rows"][0]["columns"]
    assert math.isnan(unpacked(data["table"][columns["logp"]])[2])
    look.filled(page.TEMPLATE, data)  # JSON that a browser reads


def test_the_page_stays_small(group, data, tmp_path, monkeypatch):
    """Steps are left out until it fits, never the first or the last, and the page says how many;
    then other files' weights."""
    weight = weights_of("grpo", group, asdict(module_of("grpo").Args()))
    noise = torch.Generator().manual_seed(1)

    def other(step: int) -> dict:
        moved = group["logp"] - 0.01 * torch.rand(4, 7, generator=noise).double()
        return row_of(group | {"logp": moved}, weight, 4.0, step=step)

    folder = written(tmp_path / "long", [other(step) for step in range(1, 21)])
    base = len(look.form(page.TEMPLATE).encode())
    for room, least in ((120_000, 3), (24_000, 2)):
        monkeypatch.setattr(page, "LARGEST", base + room)
        found = page.page_data([folder], ROOT)
        assert len(look.filled(page.TEMPLATE, found).encode()) <= base + room
        run = found["runs"][0]
        steps = [row["step"] for row in run["rows"]]
        assert steps[0] == 1 and steps[-1] == 20 and len(steps) >= least
        assert run["left_out"] == 20 - len(steps) > 0
    monkeypatch.setattr(page, "LARGEST", base)
    with pytest.raises(BadInput, match="no step of"):
        page.page_data([folder], ROOT)


# In a browser


def test_the_page_refers_to_nothing_outside():
    shown = look.form(page.TEMPLATE)
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|\bsrc=|@import|url\(|<link", shown)
    assert not re.search(r"fetch\(|XMLHttp|innerHTML|insertAdjacent|document\.write", shown[20000:])
    assert "default-src 'none'" in shown


def hostile(group: dict, folder: Path) -> Path:
    """A run in which everything that anyone else writes is an attack."""
    weight = weights_of("grpo", group, asdict(module_of("grpo").Args()))
    rows = [{"step": 0, "example": dict.fromkeys(("prompt", "answer", "response"), HOSTILE[0])}]
    rows[0]["example"]["reward"] = 0.0
    for step, text in enumerate(HOSTILE[:3], 1):
        row = row_of(group, weight, 4.0, step=step, prompt=text, answer=HOSTILE[1])
        for one in row["responses"]:
            one |= {"text": text, "given": text}
            one["tokens"] = [HOSTILE[(step + i) % len(HOSTILE)] for i in range(len(one["ids"]))]
        rows.append(row)
    flags = {"task": HOSTILE[1], "instruction": HOSTILE[0], "model": HOSTILE[4]}
    acted = {HOSTILE[1]: HOSTILE[0], "entropy": "<b>"}
    folder = written(folder / "<b>&lt;run", rows, "grpo", acted=acted, **flags)
    lines = [{"step": s, "entropy": 0.1, HOSTILE[1]: 1.0 * s} for s in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def pages(group, tmp_path_factory):
    """Of one run, of a hostile one, and of both."""
    folder = tmp_path_factory.mktemp("pages")
    weight = weights_of("grpo", group, asdict(module_of("grpo").Args()))
    rows = [row_of(group, weight, 4.0, step=s, minibatch=m) for s in (1, 5, 8) for m in (1, 2)]
    calm, wild = written(folder / "calm", rows), hostile(group, folder)
    for name, runs in (("calm", [calm]), ("wild", [wild]), ("both", [wild, calm])):
        page.main(runs, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in ("calm", "wild", "both")}


@needs_browser
def test_in_a_browser(pages, tmp_path):
    """Wide and as on a phone, light and dark: every token once and in order, its colour that of its
    weight, for every step, layer and file; the keys; nothing fetched, said or wider than the
    window; and no element that the page has not made itself."""
    dark = {}
    for name, path in pages.items():
        dark[name] = path.with_stem(f"{name}-dark")
        text = path.read_text("utf-8").replace(
            '<html lang="en">', '<html lang="en" data-theme="dark">'
        )
        dark[name].write_text(text, encoding="utf-8")
    shown = [(path, width) for path in pages.values() for width in (1400, 390)]
    shown += [(path, width) for path in dark.values() for width in (1400, 390)]
    found, said = reports(tmp_path, *shown)
    for report in found:
        assert report["problems"] == [] and report["fetched"] == [], report
        assert report["drawn"] > 20 and report["files"] == len(ALGORITHMS)
    assert sorted((one["width"], one["one"]) for one in found) == sorted(
        6 * [(390, True), (1400, False)]
    )
    assert not [line for line in said.splitlines() if "CONSOLE" in line]


DAMAGES = [
    (
        "visible(token));\n      paint",
        "visible(token).toUpperCase());\n      paint",
        "not every token",
    ),
    (
        'value > 0 ? "up" : "down";\n  one',
        'value > 0 ? "down" : "up";\n  one',
        "the colour of token",
    ),
    (".strip { grid-template-columns: 1fr 1fr; }", ".strip { width: 60rem; }", "wider than"),
    ("ArrowRight: () => toStep(state.step + 1)", "ArrowRight: () => {}", "→: the next step"),
    ('["weight", shown(of("weight"))],', "", "j: the numbers of a token"),
    (
        'const parts = [made("h3"',
        'const parts = [made("marquee"',
        "an element that the page has not",
    ),
    ("if (own) parts.push(...placeOf(row, own, at));", "", "a token's place"),
    ("<main>", '<main><img src="https://example.invalid/a.png">', "blocked https"),
]


@needs_browser
def test_the_browsers_check_can_fail(pages, tmp_path):
    """Each damage is found, and told as what it is."""
    source, shown = pages["calm"].read_text("utf-8"), []
    for i, (old, new, words) in enumerate(DAMAGES):
        assert source.count(old) == 1, old
        shown.append((tmp_path / f"damaged{i}.html", 390 if "wider" in words else 1400))
        shown[-1][0].write_text(source.replace(old, new), encoding="utf-8")
    found, _ = reports(tmp_path, *shown)
    problems = ["\n".join(report["problems"]) for report in found]  # in the order of their ends
    for _, _, words in DAMAGES:
        assert any(words in problem for problem in problems), (words, problems)
