"""Log-probabilities: value and gradient against the plain formula; loading."""

import json
import shutil
from pathlib import Path

import grpo
import pytest
import torch
from common.cli import BadInput
from common.data import encode
from common.distributed import shard, whole_tensor
from common.logprobs import Policy, entropies, response_logprobs
from common.model import FAMILIES, config_of, load_model
from common.model_files import EMBEDDED
from common.records.checkpoint import save_model
from common.rollout import HFEngine
from common.scale.head import TokenLogprobs
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import SMALL, run_here


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_the_plain_formula(monkeypatch, temperature):
    """Value, entropy and both gradients are equal, over several blocks with a ragged last one."""
    monkeypatch.setattr("common.scale.head.BLOCK_ELEMENTS", 7 * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (40, 50))
    targets = torch.randint(50, (40,), generator=generator)
    upstream = torch.randn(40, generator=generator)

    logp, entropy = TokenLogprobs.apply(hidden, weight, targets, temperature, entropies)
    gradients = torch.autograd.grad((logp * upstream).sum(), (hidden, weight))
    full = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    plain = full.gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((plain * upstream).sum(), (hidden, weight))

    assert torch.allclose(logp, plain, atol=1e-5) and not entropy.requires_grad
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-5)
    for ours, theirs in zip(gradients, expected):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_bfloat16_heads_gradient_does_not_lose_over_blocks(monkeypatch):
    """With 58 blocks the gradient's error against float32 is bfloat16's own rounding, 0.3%."""
    monkeypatch.setattr("common.scale.head.BLOCK_ELEMENTS", 7 * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (400, 50)
    )
    exact_hidden, exact_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    targets = torch.randint(50, (400,), generator=generator)
    TokenLogprobs.apply(hidden, weight, targets, 1.0, None)[0].sum().backward()
    TokenLogprobs.apply(exact_hidden, exact_weight, targets, 1.0, None)[0].sum().backward()
    for ours, theirs in ((weight.grad, exact_weight.grad), (hidden.grad, exact_hidden.grad)):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).norm() / theirs.norm() < 4e-3


class Largest(TorchDispatchMode):
    """A context that records in `size` how many elements the largest new tensor has."""

    size = 0

    def __torch_dispatch__(
        self, func: object, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        made = [tensor.numel() for tensor in tree_iter(result) if torch.is_tensor(tensor)]
        self.size = max(self.size, *made, 0)
        return result


def test_log_probs_never_hold_the_logits_of_all_tokens():
    """Nothing is larger than the head's own gradient."""
    V, H, TOKENS = 151_936, 2048, 16_384  # Qwen3-1.7B's, and 8 answers of 2,048 tokens
    with torch.device("meta"):  # shapes without storage
        hidden, weight = (torch.randn(n, H, requires_grad=True) for n in (TOKENS, V))
        targets = torch.zeros(TOKENS, dtype=torch.long)
    with Largest() as largest:
        TokenLogprobs.apply(hidden, weight, targets, 1.0, None)[0].sum().backward()
    assert largest.size == V * H < TOKENS * V


def step_of(policy: Policy, tokenizer: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of a text, and the gradient of their sum."""
    sequences = torch.tensor([tokenizer("7*8-9=7*8=56;56-9=47#47")["input_ids"]])
    logp, _ = policy(sequences, torch.arange(23)[None] < 22, 1.0)
    logp.sum().backward()
    parts = [whole_tensor(p.grad).flatten() for p in policy.parameters()]
    return logp.detach(), torch.cat(parts)


def test_sharding_and_recomputing_change_nothing_and_casting_little(world, tiny):
    """FSDP2 (with `offload` even one rank is sharded) and gradient checkpointing give the plain
    model's gradient; in bfloat16 it keeps its direction. Weights and gradients stay float32. After
    a pass without gradient every weight is a shard again: a reference model does not stay whole."""
    exact_logp, exact = step_of(Policy(load_model("tiny")[0]), tiny[1])
    text, every = torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.bool)
    for dtype in ("float32", "bfloat16"):
        for recompute in (False, True):
            args = grpo.Args(dtype=dtype, gradient_checkpointing=recompute)
            policy = shard(Policy(load_model("tiny")[0]), args, world, offload=True)
            with torch.no_grad():
                policy(text, every, 1.0)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
            logp, gradient = step_of(policy, tiny[1])
            for parameter in policy.parameters():
                assert parameter.dtype == parameter.grad.dtype == logp.dtype == torch.float32
            if dtype == "float32":
                assert torch.allclose(gradient, exact, atol=1e-5)
            else:
                assert 0 < (logp - exact_logp).abs().mean() < 0.02
                assert torch.cosine_similarity(gradient, exact, dim=0) > 0.995


SHAPE = {"vocab_size": 18, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.3}
WIDE = SHAPE | {"num_key_value_heads": 1, "intermediate_size": 48}
HEADS = WIDE | {"head_dim": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
LINEAR |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHAPES = {
    # A cache of states beside keys and values
    "qwen3_5_text": HEADS | LINEAR,
    "qwen2": WIDE | {"tie_word_embeddings": True},
    # Experts that are one tensor in memory and many in the file
    "qwen3_moe": HEADS | {"num_experts": 8, "moe_intermediate_size": 16},
}


def untrained(family: str, folder: Path, **shape: object) -> None:
    """Put another model into a folder."""
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    lm.save_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_models_own(folder, world, family):
    """Sampler's and sharded trainer's. What is saved is the model, tied or not."""
    untrained(family, folder, **SHAPES.get(family, WIDE))
    lm, tokenizer = load_model(str(folder))
    rollout = HFEngine(lm, world, 0, "float32", 64).generate([[3, 4, 5], [6, 7, 8]], 4, 12, 0.7)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    full = (own(rollout.sequences).logits[:, 2:-1] / 0.7).log_softmax(-1)  # [N, T, V]
    expected = full.gather(-1, rollout.tokens[..., None])[..., 0] * rollout.mask  # [N, T]
    args = grpo.Args(dtype="float32", gradient_checkpointing=True)
    policy = shard(Policy(lm), args, world, offload=True)
    logp, _ = response_logprobs(policy, rollout, 0.7)
    assert torch.allclose(logp, expected, atol=1e-6)
    assert torch.allclose(rollout.rollout_logp, expected, atol=1e-5)
    save_model(policy, tokenizer, folder / "saved", world)
    saved = load_file(folder / "saved/model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], before[name]) for name in saved)


# Folders


@pytest.fixture
def folder(tmp_path):
    """Copy the embedded model's folder."""
    return Path(shutil.copytree(EMBEDDED["tiny"], tmp_path / "model"))


def changed(path: Path, **entries: object) -> None:
    """Replace some entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def add_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write further weights, or other values of them, into a model's file."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | weights, path, {"format": "pt"})


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


DAMAGES = [  # entries of config.json, a file and its text, or a function; what is said
    ({"intermediate_size": 96}, "6 weights do not fit"),
    ({"tie_word_embeddings": False}, "first: lm_head.weight"),
    (lambda folder: add_weights(folder, {"score.weight": torch.zeros(1, 64)}), "first: score.w"),
    (cut_weights, "incomplete metadata"),
    ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
    ({"model_type": "bart"}, "bart is not supported: use llama"),
    (("generation_config.json", "{no json"), "is damaged"),
    (("generation_config.json", "[1]"), "is damaged"),
    (("generation_config.json", '{"eos_token_id": [[1], 2]}'), "no EOS tokens by number"),
    (("model.safetensors", "version https://git-lfs"), "header too large"),
    (("adapter_config.json", "{}"), "holds an adapter"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_broken_model_folder_is_named(folder, damage, message):
    """The run ends with one line, and nothing is filled in with random numbers."""
    if isinstance(damage, dict):
        changed(folder / "config.json", **damage)
    elif isinstance(damage, tuple):
        file, text = damage
        (folder / file).write_text(text)
    else:
        damage(folder)
    with pytest.raises(BadInput, match=f"^--model {folder}: .*{message}") as error:
        load_model(str(folder))
    assert "\n" not in str(error.value) and len(str(error.value)) < 450


@pytest.mark.parametrize("says_tied", [True, False])
def test_a_head_of_its_own_and_left_over_weights_load(folder, world, says_tied):
    """Surplus weights, such as a vision tower's, are not refused. If config.json says that head and
    embedding are tied, the weights decide, and the saved config.json tells the truth."""
    changed(folder / "config.json", tie_word_embeddings=says_tied)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add_weights(folder, {"lm_head.weight": 2 * embedding, "visual.patch": torch.zeros(2)})
    lm, tokenizer = load_model(str(folder))
    assert torch.equal(lm.lm_head.weight, 2 * embedding)
    assert torch.equal(lm.get_input_embeddings().weight, embedding)
    save_model(Policy(lm), tokenizer, folder / "saved", world)
    assert not json.loads((folder / "saved/config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" in load_file(folder / "saved/model.safetensors")


def test_a_folder_chooses_neither_attention_nor_length(folder):
    """A kernel would be code that is run. The tokenizer's length is often another model's."""
    changed(folder / "config.json", _attn_implementation="evil/kernel")
    changed(folder / "tokenizer_config.json", model_max_length=100)
    lm, tokenizer = load_model(str(folder))
    other = AutoModelForCausalLM.from_config(config_of(str(folder)))  # as other ranks make it
    for model in (lm, other):
        assert {part.config._attn_implementation for part in (model, model.model)} == {"sdpa"}
    assert tokenizer.model_max_length == 256


GENERATION = {  # generation_config.json: the EOS ids that a run takes from it
    '{"eos_token_id": 1, "temperature": 0.9, "top_p": 0.6}': [1],  # Vicuna's
    '{"eos_token_id": [2, 1], "temperature": -1, "num_beams": 0}': [2, 1],
    '{"num_return_sequences": 4, "early_stopping": true}': [1],
    '{"eos_token_id": 2, "of a later version": {"a": [null]}}': [2, 1],
}


@pytest.mark.parametrize("text", GENERATION)
def test_no_generation_config_stops_loading_or_saving(folder, text, tmp_path, world):
    """transformers refuses each. What was read is saved, with the run's EOS ids."""
    path = folder / "generation_config.json"
    path.write_text(text)
    lm, tokenizer = load_model(str(folder))
    assert lm.generation_config.eos_token_id == GENERATION[text]
    save_model(Policy(lm), tokenizer, tmp_path / "saved", world)
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    eos = GENERATION[text] if len(GENERATION[text]) > 1 else 1
    assert saved == json.loads(text) | {"eos_token_id": eos}
    assert load_model(str(tmp_path / "saved"))[0].generation_config.eos_token_id == GENERATION[text]


def from_a_hub_cache(folder: Path, home: Path, patch: pytest.MonkeyPatch) -> str:
    """Put a model's folder into a cache of the hub; return the name by which it loads."""
    cached = home / "models--some--model"
    shutil.copytree(folder, cached / "snapshots/0")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0")
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    patch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(home))
    return "some/model"


def test_a_saved_model_has_the_files_of_its_start(folder, tmp_path, monkeypatch):
    """Beside the weights only the dtype changes, also in a run that was resumed."""
    config = json.loads((folder / "config.json").read_text())  # as transformers 4 writes it
    theta = config.pop("rope_parameters")["rope_theta"]
    del config["dtype"]
    config |= {"rope_theta": theta, "rope_scaling": None, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    changed(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", other=[1])
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    start = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = from_a_hub_cache(folder, tmp_path / "hub", monkeypatch)
    flags = [*SMALL, "--model", name, "--lr", 1e-4, "--max_new_tokens", 8, "--save_hf"]
    flags += ["--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 1) == 0
    assert run_here(grpo.main, *flags, "--steps", 2, "--resume") == 0
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run/model").iterdir()}
    assert saved.keys() == start.keys()
    assert json.loads(saved["config.json"]) == config | {"torch_dtype": "float32"}
    for name in saved.keys() - {"config.json", "generation_config.json", "model.safetensors"}:
        assert saved[name] == start[name], name


def test_weights_that_do_not_load_are_named(folder, capsys):
    add_weights(folder, {"mtp.fc.weight": torch.zeros(2)})
    load_model(str(folder))
    assert "1 weights are not loaded or saved, first: mtp.fc.weight" in capsys.readouterr().out


def test_what_a_config_may_not_change(folder):
    """A padding id of -1 would freeze the last embedding, and tuples would have no names."""
    changed(folder / "config.json", pad_token_id=-1, return_dict=False)
    lm, _ = load_model(str(folder))
    assert lm.get_input_embeddings().padding_idx is None
    assert lm(input_ids=torch.tensor([[3, 4]])).logits.shape[:2] == (1, 2)


@pytest.mark.parametrize(("end", "eos"), [("<pad>\n", [1, 0]), ("<eos>", [1]), ("\n\n", [1])])
def test_the_chat_templates_end_of_a_turn_ends_a_response(words, tmp_path, capsys, end, eos):
    folder = Path(shutil.copytree(words, tmp_path / "model"))
    template = "{% for m in messages %}" + "{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    changed(folder / "tokenizer_config.json", chat_template=template)
    assert load_model(str(folder))[0].generation_config.eos_token_id == eos
    assert ("also ends at <pad>" in capsys.readouterr().out) == (len(eos) > 1)


@pytest.mark.parametrize("added", ["<s> $A </s>", "$A </s>", "<s> $A", "$A"])
def test_a_prompt_without_a_template_begins_with_bos_and_never_ends_with_eos(words, added):
    """This holds whatever the tokenizer adds to a text."""
    _, tokenizer = load_model(str(words))
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(added, special_tokens=special)
    ids = encode("2+2", "", tokenizer)
    plain = tokenizer("Question: 2+2\nAnswer:", add_special_tokens=False)["input_ids"]
    assert ids == [0] * ("<s>" in added) + plain


SWALLOWS = {  # a chat template: what is said
    "{# nothing #}": "no token left",
    "{{ messages[0]['content'] }}": "leaves out the user's message",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}": "the system's",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
}


@pytest.mark.parametrize("template", SWALLOWS)
def test_a_template_that_swallows_the_prompt_is_named(words, template):
    _, tokenizer = load_model(str(words))
    tokenizer.chat_template = template
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2+2?\n"}]
    with pytest.raises(BadInput, match=SWALLOWS[template]):
        encode(turns, "", tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    assert tokenizer.decode(encode(turns, "", tokenizer)) == "Be brief.2+2?"


@pytest.mark.slow
def test_damaged_numbers_in_the_weights_stop_the_run(folder, tmp_path, capsys):
    """As after a far too large step, the run ends with one line and exit code 1."""
    add_weights(folder, {"model.norm.weight": torch.full((64,), float("nan"))})
    flags = [*SMALL, "--model", folder, "--run_dir", tmp_path / "run"]
    assert run_here(grpo.main, *flags, "--steps", 1) == 1
    assert "the model's logits are NaN or infinite" in capsys.readouterr().err.splitlines()[-1]
