"""tools.evaluate: estimators against brute force, models and runs measured, results kept, bad input
refused."""

import itertools
import json
import os
import random
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import goldilocks
import grpo
import pytest
import torch
from common.batch import Rollout
from common.data import Problem, load_task
from common.distributed import BadInput, World
from common.plumbing.folder import lock
from common.plumbing.launch import launch, parse
from common.plumbing.model import load_model
from common.plumbing.tracking import Run
from tools import evaluate
from tools.evaluate import SETTINGS, Args, bootstrap, head, line_of, pass_at_k
from tqdm import tqdm

from tests.helpers import MORE, SMALL, forked, metrics, run_here

pytestmark = pytest.mark.runs


def call(*words: object) -> None:
    """`python -m tools.evaluate WORDS`."""
    sys.argv = ["evaluate.py", *map(str, words)]
    launch(evaluate.main, Args, evaluate.prepare)


@pytest.fixture
def measured(monkeypatch, capsys):
    """Calls it in this process; returns exit code, standard output and error."""

    def measured(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [])
        capsys.readouterr()
        try:
            call(*words)
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return measured


def rows(folder: Path) -> list[dict]:
    """The rows of the one file of responses in a folder."""
    (path,) = folder.glob("evaluation-*")
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy(folder: Path) -> list[tuple]:
    """Problem, greedy response and score of each row."""
    found = [row for row in rows(folder) if not row["temperature"]]
    return [(row["problem"], row["responses"], row["scores"]) for row in found]


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Everything below a folder, with the files' bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def table(printed: str) -> list[list[str]]:
    """The cells of the printed table's lines, without its head."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# Estimators


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    """Unbiased: over every choice of k of the n responses, how often one is right. Not 1 - (1 -
    c/n)^k."""
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert abs(pass_at_k(torch.tensor([right]), n, k).item() - expected) < 1e-12


def test_bootstrap_interval_is_that_of_the_mean():
    """For 400 coin flips about ± 1.96 · sqrt(p (1-p) / 400); a constant has no interval; the same
    numbers each time."""
    rng = random.Random(0)
    values = torch.tensor([float(rng.random() < 0.3) for _ in range(400)], dtype=torch.float64)
    low, high = bootstrap(values)
    p = values.mean().item()
    half = 1.96 * (p * (1 - p) / 400) ** 0.5
    assert abs(low - (p - half)) < 0.01 and abs(high - (p + half)) < 0.01
    assert bootstrap(values) == (low, high)
    assert bootstrap(torch.ones(5, dtype=torch.float64)) == (1.0, 1.0)


def test_a_line_of_the_table_by_hand():
    """Two problems, four responses: avg 3/8, pass@2 (1/2 + 5/6)/2, pass@4 1; length and cut over
    all responses. The greedy line has no pass@k."""
    found = {"set": "s", "temperature": 1.0, "top_p": 1.0, "lengths": [2, 4, 6, 8]}
    found = [
        found | {"scores": [1, 0, 0, 0], "finished": [True] * 4},
        found | {"scores": [0, 1, 0, 1], "finished": [True, True, False, True]},
    ]
    names, cells = table("\n".join([head(4)[0], head(4)[0], line_of(found, 4)]))
    assert names[4:8] == ["n", "avg@n [95%]", "pass@2 [95%]", "pass@4 [95%]"]
    assert len(names) == len(cells) == head(4)[1].count("---") == 10
    assert cells[:5] == ["s", "1.0", "1.0", "2", "4"] and cells[8:] == ["5", "0.125"]
    assert [cell.split()[0] for cell in cells[5:8]] == ["0.375", "0.667", "1.000"]
    first = {"scores": [0], "lengths": [3], "finished": [True], "temperature": 0.0}
    one, other = found[0] | first, found[1] | first | {"scores": [1]}
    (cells,) = table("| \n" + line_of([one, other], 4))
    assert cells[4:] == ["1", cells[5], "", "", "3", "0.000"] and cells[5].startswith("0.500 [")


def test_part_marks_count_for_the_average_alone():
    row = {"set": "s", "temperature": 1.0, "top_p": 1.0, "lengths": [1, 1]}
    row |= {"scores": [0.5, 0.5], "finished": [True] * 2}
    (cells,) = table("| \n" + line_of([row], 2))
    assert cells[5].startswith("0.500") and cells[6].startswith("0.000")


# What is asked of the engine


class Scripted:
    """An engine that writes down what it is asked and answers each prompt with its own tokens."""

    def __init__(self):
        self.calls = []

    def generate(
        self, prompts: list, n: int, limit: int, temperature: float, top_p: float
    ) -> Rollout:
        self.calls.append((prompts, n, limit, temperature, top_p))
        answers = [prompt for prompt in prompts for _ in range(n)]
        how = {"prompts": prompts, "tokens": answers, "logps": [[0.0] * len(a) for a in answers]}
        return Rollout.pack(**how, eos=[1], device="cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_problem_is_asked_once_in_turns(rank, tiny, monkeypatch):
    """Turns of at most --rollout_rows responses, shared by the ranks; a rank without a problem left
    takes part all the same."""
    monkeypatch.setattr(Run, "bar", tqdm(disable=True))

    def gathered(parts: list, own: list) -> None:
        parts[:] = [own, []]

    def judge(texts: list[str], answers: list[str]) -> list[float]:
        return [float(text[0] == answer) for text, answer in zip(texts, answers)]

    monkeypatch.setattr("torch.distributed.all_gather_object", gathered)
    found = [Problem(f"{i}+0=", f"{i}", tiny[1](f"{i}+0=")["input_ids"]) for i in range(5)]
    one, mine = evaluate.Set("sums", found, judge), range(rank, 5, 2)
    args, world = Args(rollout_rows=4, eval_samples=2, max_new_tokens=9), World(rank, 2, "cpu")
    for temperature, top_p in SETTINGS:
        engine = Scripted()
        given = evaluate.measure(engine, one, temperature, top_p, tiny[1], args, world)
        n, turns = (2, [2, 1 - rank]) if temperature else (1, [3 - rank])
        assert [len(call[0]) for call in engine.calls] == turns
        asked = [prompt for call in engine.calls for prompt in call[0]]
        assert asked == [found[i].prompt_ids for i in mine]
        assert {call[1:] for call in engine.calls} == {(n, 9, temperature, top_p)}
        assert [row["problem"] for row in given] == [*mine]
        assert all(row["scores"] == [1.0] * n for row in given)
        assert all(row["answer"] == row["prompt"][0] for row in given)


# A model


def test_greedy_accuracy_is_that_of_transformers_generate(measured, tmp_path, tiny):
    """The embedded model on held-out problems: every response is the one of `generate`, every score
    what follows the last `#`, the printed mean theirs."""
    lm, tokenizer = tiny
    flags = ["--eval_problems", 12, "--eval_samples", 2, "--run_dir", tmp_path / "out"]
    code, printed, said = measured("tiny", *flags)
    assert code == 0 and "12/36" in said
    (path,) = (tmp_path / "out").iterdir()
    found, settings = rows(tmp_path / "out"), [how for how in SETTINGS for _ in range(12)]
    assert path.name == "evaluation-tiny-arithmetic.jsonl"
    assert [(row["temperature"], row["top_p"]) for row in found] == settings
    for column in ("responses", "lengths", "scores", "finished"):
        assert [len(row[column]) for row in found] == [1] * 12 + [2] * 24
    problems = load_task(grpo.Args(eval_problems=12), tokenizer).held_out
    for row, problem in zip(found, problems):
        ids = torch.tensor([problem.prompt_ids])
        text = lm.generate(ids, do_sample=False, max_new_tokens=64)[0, ids.shape[1] :]
        text = tokenizer.decode(text, skip_special_tokens=True)
        assert row["prompt"] == problem.prompt and row["responses"] == [text]
        assert row["scores"] == [float("#" in text and text.split("#")[-1] == problem.answer)]
    for how, cells in zip(SETTINGS, table(printed)):
        scores = [s for r in found if (r["temperature"], r["top_p"]) == how for s in r["scores"]]
        assert cells[:4] == ["arithmetic", *map(str, how), "12"]
        assert cells[5].startswith(f"{sum(scores) / len(scores):.3f} [")


def test_sets_from_local_files_beside_the_embedded_one(measured, tmp_path, words):
    """`aime24:file,math500:file` with the hub sets' own columns, judged by math-verify; what was
    dropped, and repeats, are said."""
    (tmp_path / "aime.jsonl").write_text('{"problem": "One plus two?", "answer": "003"}\n' * 2)
    pairs = [("1 plus 2?", "3"), ("2 plus 2?", "4"), ("long " * 100, "7")]
    lines = [json.dumps({"problem": prompt, "answer": answer}) for prompt, answer in pairs]
    (tmp_path / "math.jsonl").write_text("\n".join(lines))
    sets = f"aime24:{tmp_path}/aime.jsonl,arithmetic,math500:{tmp_path}/math.jsonl"
    flags = ["--eval_task", sets, "--eval_samples", 2, "--max_new_tokens", 4, "--eval_problems", 3]
    flags += ["--max_prompt_tokens", 150, "--run_dir", tmp_path / "out"]
    code, printed, said = measured(words, *flags)
    assert code == 0, said
    assert "1 of 2 rows repeat a prompt" in printed and "1 of 3 prompts too long" in printed
    sizes = {cells[0].split(":")[0]: cells[3] for cells in table(printed)}
    assert sizes == {"aime24": "2", "arithmetic": "3", "math500": "2"}
    found = rows(tmp_path / "out")
    assert {row["answer"] for row in found if "aime" in row["set"]} == {"3"}


def test_two_ranks_measure_what_one_does(measured, tmp_path, moved):
    """Greedily the same responses, though each rank has half of the problems; every problem once;
    one table. The checkpoint is one rank's."""
    flags = [moved, "--eval_problems", 7, "--run_dir"]
    done = forked(call, *flags, tmp_path / "both", ranks=2)
    assert done.codes == [0, 0] and len(table(done.stdout)) == 3, done.stderr
    assert measured(*flags, tmp_path / "alone")[0] == 0
    assert greedy(tmp_path / "both") == greedy(tmp_path / "alone")
    assert [row["problem"] for row in rows(tmp_path / "both")] == [*range(7)] * 3


# A run


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A run whose weights have left the embedded model's, with the final model saved."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    flags = [*SMALL, "--steps", 2, "--lr", 0.01, "--max_new_tokens", 40, "--save_hf"]
    assert run_here(grpo.main, *flags, "--run_dir", folder) == 0
    return folder


def test_a_run_is_its_newest_checkpoint(measured, tmp_path, moved):
    """The same responses as the model that --save_hf wrote, others than the start's; the accuracy
    that the run measured itself; the run's own files stay, and it goes on."""
    run = Path(shutil.copytree(moved, tmp_path / "run"))
    before = tree(run)
    code, printed, _ = measured(run)
    assert code == 0 and "run after step 2" in printed
    new = tree(run).keys() - before.keys()
    assert [path.name for path in new] == ["evaluation-run-step2-arithmetic.jsonl"]
    assert before.items() <= tree(run).items()
    assert table(printed)[0][5].startswith(f"{metrics(run)[-1]['greedy']:.3f} [")
    flags = ["--eval_problems", 8, "--eval_samples", 1, "--max_new_tokens", 40, "--run_dir"]
    for model in (run / "model", "tiny"):
        assert measured(model, *flags, tmp_path / Path(model).name)[0] == 0
    assert greedy(run) == greedy(tmp_path / "model") != greedy(tmp_path / "tiny")
    flags = [*SMALL, "--steps", 3, "--lr", 0.01, "--max_new_tokens", 40, "--save_hf", "--resume"]
    assert run_here(grpo.main, *flags, "--run_dir", run) == 0


def test_code_of_a_run_folder_is_said_before_it_runs(measured, tmp_path, moved):
    """A task file that config.json names; the checkpoint's pickle."""
    run, task = Path(shutil.copytree(moved, tmp_path / "run")), tmp_path / "task.py"
    task.write_text("print('it runs')\ntrain = lambda i: ('1+1=', '2')\nheld_out = [train(0)]\n")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"task": str(task)}))
    code, printed, _ = measured(run)
    said = [f"running {task}, which {run}/config.json names", "it runs", f"reading {run}", "avg@n"]
    places = [printed.index(words) for words in said]
    assert code == 0 and places == sorted(places)


def test_of_two_models_in_a_checkpoint_the_policy_is_measured(measured, tmp_path):
    """goldilocks saves its teacher, too."""
    flags = [*SMALL, *MORE["goldilocks"], "--steps", 1, "--lr", 0.01, "--save_hf"]
    assert run_here(goldilocks.main, *flags, "--run_dir", tmp_path / "run") == 0
    flags = ["--eval_problems", 8, "--eval_samples", 1, "--run_dir"]
    for model in (tmp_path / "run", tmp_path / "run/model", "tiny"):
        assert measured(model, *flags, tmp_path / f"of-{Path(model).name}")[0] == 0
    one, other, start = (greedy(tmp_path / f"of-{name}") for name in ("run", "model", "tiny"))
    assert one == other != start


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"max_new_tokens": 40, "eval_problems": 8, "eval_samples": 1}),
        ("--max_new_tokens 64 --eval_samples 2", {"max_new_tokens": 64, "eval_samples": 2}),
        ("--task my.jsonl", {"task": "my.jsonl", "max_new_tokens": 40}),
    ],
)
def test_flags_that_are_not_given_are_the_runs(words, expected, moved, monkeypatch, capsys):
    """Also where what is given is the default of a flag."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(moved), *words.split()])
    args = parse(Args)
    evaluate.prepare(args, World(0, 1, torch.device("cpu")))
    assert expected.items() <= vars(args).items() and args.model == str(moved)
    assert not capsys.readouterr().out


def test_the_held_out_problems_are_those_of_the_run(tmp_path, words):
    """Held back from its training file, or drawn from its --eval_task; a file that has changed
    since is said."""
    tokenizer = load_model(str(words))[1]
    for name in ("train", "test"):
        lines = [json.dumps({"prompt": f"{name} {i}?", "answer": str(i)}) for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    for eval_task in ("", str(tmp_path / "test.jsonl")):
        args = Args(task=str(tmp_path / "train.jsonl"), eval_problems=3)
        task = load_task(replace(args, eval_task=eval_task), tokenizer)
        config = {"task": args.task, "eval_task": eval_task, "data": task.fingerprint}
        (found,), remarks = evaluate.load_sets(args, config, tokenizer)
        assert found.problems == task.held_out and len(found.problems) == 3 and not remarks
        _, remarks = evaluate.load_sets(args, config | {"data": "other"}, tokenizer)
        assert "changed since the run" in remarks[-1]


def test_rows_are_judged_by_your_reward_and_named_sets_by_their_own(tmp_path, words):
    tokenizer = load_model(str(words))[1]
    (tmp_path / "reward.py").write_text("def reward(response, reference): return 0.5")
    for name, row in (
        ("mine", {"prompt": "3?", "answer": [3]}),
        ("hub", {"question": "3?", "answer": "#### 3"}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    specs = f"{tmp_path / 'mine.jsonl'},gsm8k:{tmp_path / 'hub.jsonl'}"
    args = Args(eval_task=specs, reward=str(tmp_path / "reward.py"))
    (mine, hub), remarks = evaluate.load_sets(args, {}, tokenizer)
    assert mine.judge(["x"], [mine.problems[0].answer]) == [0.5] and not remarks
    assert hub.judge(["x", "3"], ["3", "3"]) == [0.0, 1.0]
    mine.judge.close()
    with pytest.raises(BadInput, match="--reward nowhere.py: cannot be used .*No such file"):
        evaluate.load_sets(replace(args, reward="nowhere.py"), {}, tokenizer)


def test_a_run_under_way_is_measured_and_not_disturbed(measured, tmp_path, moved):
    """Another process holds the folder's lock."""
    run = Path(shutil.copytree(moved, tmp_path / "run"))
    holder = lock(run)
    try:
        assert measured(run)[0] == 0
    finally:
        os.close(holder)


def test_a_damaged_checkpoint_is_named(measured, tmp_path, finished):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    shards = next((run / "checkpoints/step_000004/shards").glob("*.distcp"))
    shards.write_bytes(shards.read_bytes()[:1000])
    before = tree(run)
    code, printed, said = measured(run)
    assert code == 2 and "avg@n" not in printed and said.count("\n") == 1 and tree(run) == before
    assert f"MODEL {run}: {run}/checkpoints/step_000004 is damaged or does not fit" in said


# Results that cannot be written


@pytest.mark.parametrize("spare", [True, False])
def test_what_is_measured_is_kept(spare, measured, tmp_path, monkeypatch):
    """The disk is full from the second setting on: the table is whole, all rows are in a temporary
    folder (or, if that is full too, the table is all), exit code 1."""
    write, out, written = Path.write_text, tmp_path / "out", []

    def full(self: Path, text: str, **how: str) -> int:
        written.append(self)
        if len(written) > 1 and (self.parent == out or not spare):
            raise OSError(28, "No space left on device")
        return write(self, text, **how)

    (tmp_path / "spare").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    monkeypatch.setattr(Path, "write_text", full)
    flags = ["--eval_problems", 4, "--eval_samples", 1, "--run_dir", out]
    code, printed, said = measured("tiny", *flags)
    assert code == 1 and len(table(printed)) == 3 and "Traceback" not in said
    line = said.strip().splitlines()[-1]
    assert line.startswith(f"evaluate.py: error: cannot write to {out} (") and "No space" in line
    assert len(rows(out)) == 4  # the first setting's
    if spare:
        (kept,) = (tmp_path / "spare").glob("evaluation-*.jsonl")
        assert line.endswith(f"the responses are in {kept}") and len(rows(kept.parent)) == 12
    else:
        assert line.endswith("only the table is left")
    assert len([*tmp_path.rglob("evaluation-*")]) == 1 + spare


def interrupted(words: list[str]) -> None:
    """Ctrl-C in the middle of the third setting."""
    measure, settings = evaluate.measure, []

    def interrupt(*arguments: object) -> list[dict]:
        settings.append(1)
        if len(settings) == 3:
            signal.raise_signal(signal.SIGINT)
        return measure(*arguments)

    evaluate.measure = interrupt
    call(*words)


def test_what_was_measured_before_an_interruption_is_kept(tmp_path):
    ended = forked(interrupted, ["tiny", "--eval_problems", 4, "--run_dir", tmp_path / "out"])
    assert ended.returncode == -signal.SIGINT and "Traceback" not in ended.stderr
    assert len(table(ended.stdout)) == 2 and len(rows(tmp_path / "out")) == 8


def test_an_earlier_evaluation_stays(measured, tmp_path):
    """The next one is beside it."""
    for samples in (1, 2):
        flags = ["--eval_problems", 2, "--eval_samples", samples, "--run_dir", tmp_path]
        code, printed, _ = measured("tiny", *flags)
        assert code == 0
    first, second = (tmp_path / f"evaluation-tiny-arithmetic{n}.jsonl" for n in ("", ".2"))
    assert {*tmp_path.iterdir()} == {first, second} and printed.endswith(f"scores: {second}\n")
    ends = (json.loads(path.read_text().splitlines()[-1]) for path in (first, second))
    assert [len(row["scores"]) for row in ends] == [1, 2]


# Bad input


def empty_run(folder: Path) -> Path:
    """A run that has not saved yet."""
    folder.mkdir()
    config = {"algorithm": "grpo", "acted": {}, "ranks": 1, "seed": 1, "lr": 1e-3, "eval_task": ""}
    config |= {"model": "tiny", "task": "arithmetic"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def broken_run(folder: Path) -> Path:
    (empty_run(folder) / "config.json").write_text("{")
    return folder


def other_model(folder: Path) -> Path:
    """A run whose model is not the one that it saved."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model": "tiny-moe"}))
    return folder


def evil_precision(folder: Path) -> Path:
    config = json.loads((empty_run(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rollout_dtype": "evil"}))
    return folder


WRONG = {
    "--nope": "Unrecognized options: --nope",
    "tiny tiny": "Unrecognized options: tiny",
    "nowhere": "MODEL 'nowhere': no such folder",
    "tinny": "MODEL 'tinny': no such folder; use a folder, a hub name",
    "{tmp}": "MODEL {tmp}: the folder holds no",
    "{empty}": "MODEL {tmp}/run: no checkpoint",
    "{broken}": "{tmp}/run/config.json: damaged",
    "{evil}": "{tmp}/run/config.json: rollout_dtype 'evil': must be one of auto, float32",
    "{other}": "step_000002 is damaged or does not fit its model",
    "tiny --eval_samples 0": "--eval_samples 0: must be 1 or more",
    "tiny --eval_task nosuchset": "--eval_task nosuchset: unknown",
    "tiny --eval_task arithmetic,": "--eval_task : unknown",
    "tiny --eval_task nowhere.jsonl": "nowhere.jsonl: no such file",
    "tiny --task nowhere.jsonl": "nowhere.jsonl: no such file",
    "tiny --run_dir /proc/nowhere": "--run_dir /proc/nowhere: cannot be used",
    "tiny --run_dir {tmp}/file": "--run_dir {tmp}/file: cannot be used",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_one_line(words, measured, tmp_path, monkeypatch, moved):
    """Exit code 2, before anything is sampled; nothing is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.rollout.HFEngine.generate", None)
    (tmp_path / "file").touch()
    made = {"tmp": str(tmp_path)}
    for name, make in {"empty": empty_run, "broken": broken_run, "evil": evil_precision}.items():
        if name in words:
            made[name] = str(make(tmp_path / "run"))
    if "other" in words:
        made["other"] = str(other_model(Path(shutil.copytree(moved, tmp_path / "run"))))
    before = tree(tmp_path)
    code, printed, said = measured(*words.format(**made).split())
    assert code == 2 and said.count("\n") == 1 and said.startswith("evaluate.py: error: "), said
    assert WRONG[words].format(**made) in said and tree(tmp_path) == before
