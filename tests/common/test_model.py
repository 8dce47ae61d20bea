"""Log-probabilities: value, gradient and memory against the plain formula; loading."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpo
import pytest
import torch
from common import logprobs as model_module
from common.data import encode
from common.distributed import BadInput, shard
from common.logprobs import Policy, token_logprobs
from common.plumbing.model import EMBEDDED, config_of, eos_ids, load_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from tests.helpers import ROOT, SMALL, run_here


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_the_plain_formula(monkeypatch, temperature):
    """Value, entropy and both gradients, over several blocks with a ragged last one."""
    monkeypatch.setattr(model_module, "BLOCK_ELEMENTS", 7 * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (40, 50))
    targets = torch.randint(50, (40,), generator=generator)
    upstream = torch.randn(40, generator=generator)

    logp, entropy = token_logprobs(hidden, weight, targets, temperature)
    gradients = torch.autograd.grad((logp * upstream).sum(), (hidden, weight))
    full = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    plain = full.gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((plain * upstream).sum(), (hidden, weight))

    assert torch.allclose(logp, plain, atol=1e-5) and not entropy.requires_grad
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-5)
    for ours, theirs in zip(gradients, expected):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("rows", [400, 7])
def test_a_bfloat16_heads_gradient_does_not_lose_over_blocks(monkeypatch, rows):
    """58 blocks or one: the gradient's error against float32 is that of bfloat16's own rounding,
    0.3%."""
    monkeypatch.setattr(model_module, "BLOCK_ELEMENTS", rows * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (400, 50)
    )
    targets = torch.randint(50, (400,), generator=generator)
    token_logprobs(hidden, weight, targets, 1.0)[0].sum().backward()
    exact_hidden = hidden.detach().float().requires_grad_()
    exact = weight.detach().float().requires_grad_()
    token_logprobs(exact_hidden, exact, targets, 1.0)[0].sum().backward()
    for ours, theirs in ((weight.grad, exact.grad), (hidden.grad, exact_hidden.grad)):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).norm() / theirs.norm() < 4e-3


MEMORY = """
import resource, sys
import common, torch
from common import logprobs
from common.logprobs import token_logprobs
torch.set_num_threads(1)
logprobs.BLOCK_ELEMENTS = 2**24
hidden, weight = (torch.randn(n, 16, requires_grad=True) for n in (800, 150_000))
targets = torch.arange(800)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "lean":
    logp, _ = token_logprobs(hidden, weight, targets, 1.0)
else:
    logp = torch.log_softmax((hidden @ weight.T).float(), dim=-1).gather(1, targets[:, None])
logp.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_token_logprobs_are_lean():
    """At V = 150k the peak is below half of the plain formula's, and below one full float32 [M,
    V]."""
    megabytes = {}
    for kind in ("lean", "plain"):
        # Through a small process: on Linux a child's peak begins at that of the one that started
        # it, pytest's.
        between = [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)",
        ]
        words = [*between, sys.executable, "-c", MEMORY, kind]
        run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        megabytes[kind] = int(run.stdout)
    assert megabytes["lean"] < 0.5 * megabytes["plain"], megabytes
    assert megabytes["lean"] < 800 * 150_000 * 4 / 2**20, megabytes


def test_policy_matches_the_model_and_ignores_padding(world, tiny):
    """Policy's log-probs and entropies are those of the transformers model's logits; pads change
    nothing."""
    lm, tokenizer = tiny
    rows = [tokenizer(text)["input_ids"] for text in ("7*8-9=7*8=56;56-9=47#47", "1+2=#3")]
    sequences = torch.full((2, 30), 1)
    predicts = torch.zeros(2, 30, dtype=torch.bool)
    for i, row in enumerate(rows):
        sequences[i, : len(row)] = torch.tensor(row)
        predicts[i, 3 : len(row) - 1] = True
    with torch.no_grad():
        logp, entropy = Policy(lm)(sequences, predicts, 0.8)
        expected = [torch.log_softmax(lm(torch.tensor([row])).logits[0] / 0.8, -1) for row in rows]
    want = torch.cat(
        [
            full[3:-1].gather(1, torch.tensor(row[4:])[:, None])[:, 0]
            for full, row in zip(expected, rows)
        ]
    )
    uncertain = torch.cat([-(full[3:-1].exp() * full[3:-1]).sum(-1) for full in expected])
    assert torch.allclose(logp, want, atol=1e-5) and torch.allclose(entropy, uncertain, atol=1e-5)


def test_sharding_and_checkpointing_change_nothing(world):
    """FSDP2 and gradient checkpointing give the plain model's gradient (with `offload` even one
    rank is sharded)."""
    gradients = []
    for sharded, recompute in ((False, False), (True, False), (True, True)):
        lm, tokenizer = load_model("tiny")
        policy = shard(Policy(lm), grpo.Args(dtype="float32"), world, offload=sharded)
        assert all(isinstance(parameter, DTensor) == sharded for parameter in policy.parameters())
        if recompute:
            policy.train().lm.gradient_checkpointing_enable({"use_reentrant": False})
        sequences = torch.tensor([tokenizer("7*8-9=7*8=56;56-9=47#47")["input_ids"]])
        policy(
            sequences,
            torch.ones_like(sequences, dtype=torch.bool).index_fill(1, torch.tensor([22]), False),
            1.0,
        )[0].sum().backward()
        gradients.append(
            [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in policy.parameters()]
        )
    for other in gradients[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients[0], other))


def test_bfloat16_passes_on_float32_master_weights(world):
    """Weights and gradients stay float32, log-probs move by bfloat16's rounding, the gradient keeps
    its direction.

    And after a pass without gradient every weight is a shard again, or a reference model would stay
    gathered for good.
    """
    gradients, logps = [], []
    for dtype, recompute in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        lm, tokenizer = load_model("tiny")
        # Sharded also in float32; on a CPU nothing moves
        policy = shard(Policy(lm), grpo.Args(dtype=dtype), world, offload=True)
        if recompute:
            policy.train().lm.gradient_checkpointing_enable({"use_reentrant": False})
        sequences = torch.tensor([tokenizer("7*8-9=7*8=56;56-9=47#47")["input_ids"]])
        predicts = torch.arange(23)[None] < 22
        with torch.no_grad():
            policy(sequences, predicts, 1.0)
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        logp, entropy = policy(sequences, predicts, 1.0)
        logp.sum().backward()
        assert (
            {t.dtype for p in policy.parameters() for t in (p, p.grad)}
            == {torch.float32}
            == {logp.dtype}
        )
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in policy.parameters()]))
        logps.append(logp.detach())
    for logp, gradient in zip(logps[1:], gradients[1:]):
        assert 0 < (logp - logps[0]).abs().mean() < 0.02
        assert torch.cosine_similarity(gradient, gradients[0], dim=0) > 0.995
    assert torch.allclose(gradients[1], gradients[2], rtol=1e-3, atol=1e-5)


def test_embedded_model_is_as_documented(tiny):
    """124k parameters, pad and EOS differ, one token per character, and an unknown character is
    refused."""
    lm, tokenizer = tiny
    assert lm.num_parameters() == 124_480
    assert tokenizer.pad_token_id not in eos_ids(lm, tokenizer)
    text = "7*8=56;56-9=47#47"
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def configured(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def of_class(kind: type, **changes: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        config = Qwen3Config.from_pretrained(ROOT / "common/tiny/model", **changes)
        kind(config).save_pretrained(folder)

    return write


def bert(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shape = {"vocab_size": 18, "hidden_size": 8, "intermediate_size": 8}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=1, **shape)
    BertForMaskedLM(config).save_pretrained(folder)


BROKEN = {
    "cut weights": (cut, "incomplete metadata"),
    "empty weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "header too small",
    ),
    "other width": (configured(intermediate_size=96), r"6 weights do not fit .* is \(64, 192\)"),
    "more layers": (
        configured(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        r"11 weights do not fit .*layers\.2\..* is missing",
    ),
    "fewer layers": (
        configured(num_hidden_layers=1, layer_types=["full_attention"]),
        r"11 weights do not fit .*layers\.1\..* has no place",
    ),
    "no head": (
        configured(tie_word_embeddings=False),
        "1 weights do not fit .*lm_head.weight is missing",
    ),
    "config of nothing": (
        lambda folder: (folder / "config.json").write_text("{oops"),
        "not a valid JSON",
    ),
    "config of a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "must be a mapping",
    ),
    "unknown family": (configured(model_type="nonesuch"), "does not recognize this architecture"),
    "no causal model": (configured(model_type="t5"), "T5Config"),
    "masked model": (bert, "BertLMHeadModel has no output head lm_head"),
    "reward model": (of_class(Qwen3ForSequenceClassification), "score.weight has no place"),
    "no tokenizer": (without_tokenizer, "no tokenizer"),
    "broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{x"),
        "Expecting property name",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_folder_is_named(tmp_path, name):
    """One line, nothing filled in with random numbers."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "common/tiny/model", folder)
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(BadInput, match=f"^--model {folder}: cannot be loaded .*{message}") as error:
        load_model(str(folder))
    assert "\n" not in str(error.value) and len(str(error.value)) < 450


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiney", "no such folder; use a folder, a hub name (owner/name), tiny or"),
        ("", "no such folder; use a folder"),
        ("Qwen3-0.6B", "hub name"),
        ("./tiny/model", "no such folder"),
        ("/no/such/folder", "no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_a_name_that_can_be_nothing_is_refused_without_the_network(monkeypatch, name, message):
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *arguments: pytest.fail("asked the hub")
    )
    with pytest.raises(BadInput, match="^--model ") as error:
        load_model(name)
    assert message in str(error.value)


def test_a_tied_or_own_head_and_left_over_weights_load(tmp_path):
    """What is not missing is not refused: an own head, a tied one, and weights of a vision tower
    beside them."""
    shutil.copytree(ROOT / "common/tiny/model", tmp_path / "model")
    of_class(Qwen3ForCausalLM, tie_word_embeddings=False)(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    save_file(weights | {"visual.patch": torch.zeros(2)}, path, {"format": "pt"})
    lm, _ = load_model(str(tmp_path / "model"))
    assert torch.equal(lm.lm_head.weight, weights["lm_head.weight"])
    assert not torch.equal(lm.lm_head.weight, lm.get_input_embeddings().weight)


def test_the_tokenizer_knows_the_models_positions(tmp_path, tiny):
    """Whatever its own file says: published ones say less than the model has, or 10^30."""
    assert tiny[1].model_max_length == 256
    shutil.copytree(ROOT / "common/tiny/model", tmp_path / "model")
    path = tmp_path / "model/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 100}))
    assert load_model(str(tmp_path / "model"))[1].model_max_length == 256


def test_a_folder_without_weights_is_named(tmp_path, tiny):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=f"--model {tmp_path}: the folder holds no ..safetensors"):
        load_model(str(tmp_path))


def changed(folder: Path, name: str, **entries: object) -> None:
    """A JSON file of a model folder with some entries replaced."""
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | entries))


@pytest.mark.parametrize("theirs", ["eager", "flex_attention", "paged|eager", "evil/kernel"])
def test_a_folder_does_not_choose_the_attention(theirs, words, tmp_path):
    """On the first rank and on the others; a kernel of the hub's would be code that is run."""
    folder = Path(shutil.copytree(words, tmp_path / "model"))
    changed(folder, "config.json", _attn_implementation=theirs)
    lm, _ = load_model(str(folder))
    other = AutoModelForCausalLM.from_config(config_of(str(folder)))
    for model in (lm, other):
        assert {part.config._attn_implementation for part in (model, model.model)} == {"sdpa"}


@pytest.mark.parametrize("eos", ["1", [[1]]])
def test_an_eos_that_is_no_number_is_named(eos, words, tmp_path):
    folder = Path(shutil.copytree(words, tmp_path / "model"))
    changed(folder, "generation_config.json", eos_token_id=eos)
    with pytest.raises(BadInput, match="EOS tokens by number|cannot be loaded"):
        load_model(str(folder))


def test_tokens_without_an_embedding_and_empty_prompts_are_named(words, tmp_path):
    """A tokenizer may be larger than the model as long as no prompt shows it; a template may not
    swallow the prompt."""
    folder = Path(shutil.copytree(words, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["wug"])
    tokenizer.save_pretrained(folder)
    _, tokenizer = load_model(str(folder))
    assert encode("two and two", None, tokenizer)
    with pytest.raises(BadInput, match="without an embedding: 258"):
        encode("two and wug", None, tokenizer)
    tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(BadInput, match="no token left"):
        encode("two and two", "", tokenizer)


def test_damaged_numbers_in_the_weights_stop_the_run(words, tmp_path, capsys):
    """NaN weights, or weights that a far too large step has made so: one line, exit code 1."""
    lm = AutoModelForCausalLM.from_pretrained(EMBEDDED["tiny"])
    lm.model.norm.weight.data.fill_(float("nan"))
    lm.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(EMBEDDED["tiny"]).save_pretrained(tmp_path / "model")
    flags = [*SMALL, "--model", tmp_path / "model", "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 1) == 1
    assert "the model's logits are NaN or infinite" in capsys.readouterr().err.splitlines()[-1]


def test_a_policy_has_no_dropout(words, tmp_path):
    folder = Path(shutil.copytree(words, tmp_path / "model"))
    changed(folder, "config.json", attention_dropout=0.3)
    lm, _ = load_model(str(folder))
    assert all(getattr(module, "attention_dropout", 0.0) == 0.0 for module in lm.modules())
