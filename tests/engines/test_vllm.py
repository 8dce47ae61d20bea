"""The vllm engine against the real vLLM on a CPU (see CONTRIBUTING.md). Skipped without the
package."""

from pathlib import Path
from types import SimpleNamespace

import grpo
import pytest
import torch
from common.cli import RunStopped
from common.data import load_task
from common.distributed import setup
from common.logprobs import Policy, all_logprobs
from common.model import load_model
from common.rollout import make_engine
from common.run import Run
from common.scale import vllm as vllm_module
from common.scale.vllm import VLLMEngine
from transformers import AutoConfig, AutoModelForCausalLM
from variants import tool

from tests.engines.cpu_vllm import use_cpu_build
from tests.helpers import SMALL, metrics, started

pytest.importorskip("vllm", reason="needs vLLM (CONTRIBUTING.md#tests)")
RUN = ("-m", "tests.engines.cpu_vllm")  # before a module's name: its program on vLLM's CPU build
PROMPTS = ["7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9="]


def args_of(**changes: object) -> object:
    return grpo.Args(rollout="vllm", dtype="float32", **changes)


def moved(name: str) -> tuple[Policy, object]:
    """Return a policy in which every parameter has left the checkpoint's value."""
    lm, tokenizer = load_model(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Policy(lm), tokenizer


def random(tmp_path: Path, family: str) -> Path:
    """Return a small model of a family, with random weights."""
    _, tokenizer = load_model("tiny")
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    lm.generation_config.eos_token_id = [tokenizer.eos_token_id]
    lm.save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    return tmp_path / family


def gap(
    engine: VLLMEngine, policy: Policy, tokenizer: object, args: object, world: object
) -> float:
    """Check a rollout as in a third such step, and return its largest |log π_old - log μ|."""
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    rollout = engine.generate(prompts, 4, 32, args.temperature)
    rollout.old_logp = all_logprobs(policy, rollout, args, world).logp
    Run.check_sampler(SimpleNamespace(args=args, gaps_in_a_row=2, world=world), [rollout])
    return ((rollout.old_logp - rollout.rollout_logp) * rollout.mask).abs().max().item()


@pytest.fixture(scope="module")
def world(finished):
    """Make one process group for all tests of this file, because engines hold on to it. `finished`,
    a run in this process with a group of its own, has to come before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_module, "vllm_options", vllm_module.vllm_options)
        patch.setattr(VLLMEngine, "sync", VLLMEngine.sync)
        use_cpu_build()
        world = setup()
        yield world
        world.closing.close()


@pytest.fixture(scope="module")
def engine_of(world, tmp_path_factory):
    """Return a model's engine, built once, with the checkpoint's weights."""
    built = {}

    def build(name: str) -> tuple[VLLMEngine, str]:
        if name not in built:
            path, folder = name, tmp_path_factory.mktemp("model")
            if not name.startswith("tiny"):
                path = str(random(folder, name))
            built[name] = make_engine(args_of(model=path), load_model(path)[0], world), path
        engine, path = built[name]
        engine.sync(Policy(load_model(path)[0]))
        return engine, path

    # First: vLLM makes its group of experts with the first engine of a process, or never
    build("tiny-moe")
    return build


@pytest.mark.parametrize(
    ("model", "temperature"), [("tiny", 0.7), ("tiny-moe", 0.7), ("qwen2", 1.0), ("llama", 1.0)]
)
def test_log_probs_are_the_trainers(engine_of, world, model, temperature):
    """They are at the sampling temperature, and a push changes them along. Qwen2 has biases and an
    untied head."""
    engine, path = engine_of(model)
    args = args_of(model=path, temperature=temperature)
    lm, tokenizer = load_model(path)
    assert gap(engine, Policy(lm), tokenizer, args, world) < 1e-4
    policy, _ = moved(path)
    engine.sync(policy)
    assert gap(engine, policy, tokenizer, args, world) < 1e-4


@pytest.fixture
def incomplete(monkeypatch):
    """Let pushes leave out the tensors with a text in their names."""
    whole = vllm_module.checkpoint_tensors

    def leave_out(text: str) -> None:
        def rest(*arguments: object) -> list:
            return [pair for pair in whole(*arguments) if text not in pair[0]]

        monkeypatch.setattr(vllm_module, "checkpoint_tensors", rest)

    return leave_out


def test_a_weight_that_stops_arriving_stops_the_run(engine_of, incomplete):
    """At lr 1e-6 no log-prob would show that a norm is some updates old."""
    engine, _ = engine_of("tiny")
    policy, _ = moved("tiny")
    incomplete("layers.1.input_layernorm")
    with pytest.raises(RunStopped, match="model.layers.1.input_layernorm.weight did not arrive"):
        engine.sync(policy)


def test_a_part_of_a_weight_that_never_arrives_stops_the_run(engine_of, world, incomplete):
    """vLLM fuses two matrices. The half that gets no values keeps what was in memory."""
    lm, tokenizer = load_model("tiny")
    policy, args = Policy(lm), args_of()
    engine_of("tiny")
    engine = make_engine(args, lm, world)
    incomplete("layers.1.mlp.up_proj")
    engine.sync(policy)
    with pytest.raises(RunStopped, match="sampler and trainer disagree"):
        gap(engine, policy, tokenizer, args, world)


def test_prefixes_lengths_and_stops(engine_of):
    """A response goes on from its prefix within the limit. Greedy responses agree with hf."""
    engine, _ = engine_of("tiny")
    lm, tokenizer = load_model("tiny")
    prompt, prefix = tokenizer("7*8-9+6=")["input_ids"], tokenizer("7*8=56;")["input_ids"]
    rollout = engine.generate([prompt, prompt], 8, 20, 1.0, [prefix, []])
    assert rollout.prefix_len.tolist() == [7] * 8 + [0] * 8 and len(rollout) == 16
    assert all(ids[:7] == prefix for ids in rollout.response_ids()[:8])
    assert all(len(ids) <= 20 for ids in rollout.response_ids())
    for row, length in enumerate(rollout.mask.sum(1).int().tolist()):
        assert rollout.finished[row] == (rollout.tokens[row, length - 1] == tokenizer.eos_token_id)
    assert len({tuple(ids) for ids in rollout.response_ids()}) > 2
    greedy = engine.generate([prompt], 1, 40, 0.0).response_ids()
    hf = make_engine(grpo.Args(rollout="hf", dtype="float32"), lm, engine.world)
    assert greedy == hf.generate([prompt], 1, 40, 0.0).response_ids()
    assert len(engine.generate([], 4, 20, 1.0)) == 0


def forced(texts: list[str], answers: list) -> list[tuple[str | None, str]]:
    """Make a response go on after it has ended."""
    return [(None if "+0" in text else ";7*8=56;56+0=", "") for text in texts]


def test_turns_around_a_tool_are_those_of_hf(engine_of, world):
    """Greedily, and with forced tokens, the rows and their holes are the same."""
    engine_of("tiny-moe")
    lm, tokenizer = load_model("tiny")
    rollouts = {}
    for engine in ("vllm", "hf"):
        args = tool.Args(rollout=engine, dtype="float32", eval_problems=24)
        turns = tool.Turns(args, lm, load_task(args, tokenizer), world)
        turns.sync(Policy(lm))
        prompts = [problem.prompt_ids for problem in turns.task.held_out]
        made = turns.generate(prompts, 8, 64, 1.0)
        logp = all_logprobs(Policy(lm), made, args, world).logp
        assert torch.allclose(logp, made.rollout_logp, atol=1e-4) and made.calls.sum() > 100
        turns.reply = forced
        rollouts[engine] = turns.generate(prompts, 1, 64, 0.0)
    rollout, other = rollouts["vllm"], rollouts["hf"]
    assert rollout.response_ids() == other.response_ids() and (rollout.calls == 1).all()
    assert torch.equal(rollout.mask, other.mask) and torch.equal(rollout.finished, other.finished)


def test_samples_repeat_with_the_state_and_not_without(engine_of):
    """Resume needs this: the same state draws the same samples, and the next call others."""
    engine, _ = engine_of("tiny")
    prompts = [load_model("tiny")[1](prompt)["input_ids"] for prompt in PROMPTS]
    state = engine.state_dict()
    first, second = (engine.generate(prompts, 4, 32, 1.0).response_ids() for _ in range(2))
    engine.load_state_dict(state)
    assert engine.generate(prompts, 4, 32, 1.0).response_ids() == first != second


def test_a_run_learns_and_resumes(tmp_path):
    """Greedy accuracy rises as with hf, the sampler agrees at every step, and resume goes on."""
    flags = ["--rollout", "vllm", "--eval_every", 25, "--save_every", 10]
    flags += ["--run_dir", tmp_path / "run"]
    run = started(*RUN, "grpo", *flags, "--steps", 25)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr[-3000:]
    lines = metrics(tmp_path / "run")
    assert lines[-1]["greedy"] > 0.8 > 0.5 > lines[0]["greedy"]
    assert all(line["sampler_gap"] < 1e-4 for line in lines[1:])
    assert started(*RUN, "grpo", *flags, "--steps", 26, "--resume").returncode == 0


def test_two_ranks(tmp_path):
    """Under torchrun each rank has an engine; then both share one."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ranks += [*RUN, "grpo", *SMALL]
    for extra in ([], ["--tensor_parallel", 2]):
        folder = tmp_path / f"run{len(extra)}"
        run = started(*ranks, "--steps", 3, "--rollout", "vllm", *extra, "--run_dir", folder)
        assert run.returncode == 0, run.stderr[-3000:]
        assert all(line["sampler_gap"] < 1e-4 for line in metrics(folder)[1:])
