"""Loading a model and its tokenizer. Models that would be computed wrongly are refused here."""

import hashlib
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from common.cli import blame, say
from common.distributed import ALONE, World, from_rank_0
from common.model_files import config_to_save, eos_ids, read_json, source_of

logging.disable_progress_bar()  # the run has its own
# Families that `Policy` and the engines compute rightly: causal sdpa attention, and logits that are
# the head's plain product. To add one, add it here and in tests/common/test_model.py.
FAMILIES = (
    "llama mistral qwen2 qwen3 qwen3_moe qwen3_5_text gemma3_text olmo2 olmo3 smollm3".split()
)
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
SAFE = {"trust_remote_code": False}  # a model folder's own code never runs


def config_of(source: str) -> PreTrainedConfig:
    """Read a model's config.json with our attention, sdpa.

    The file may name another attention, even a kernel that transformers would download and run, and
    that would win over the argument of `from_pretrained`.
    """
    config = AutoConfig.from_pretrained(source, **SAFE)
    # Refuse it here, before transformers asks for the package of its quantisation method.
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantised: use a checkpoint that is not")
    if config.model_type not in FAMILIES:
        raise ValueError(f"{config.model_type} is not supported: use {', '.join(FAMILIES)}")
    config._attn_implementation = None
    config.return_dict = True
    if (getattr(config, "pad_token_id", None) or 0) < 0:
        config.pad_token_id = None  # -1 would freeze the embedding of the last token
    return config


def parameters_of(name: str) -> int:
    """Count a model's parameters, from its config.json alone."""
    source = source_of(name)
    with blame(f"--model {name}: cannot be loaded"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(source), **SAFE).num_parameters()


def load_model(name: str, world: World = ALONE, flag: str = "--model") -> Loaded:
    """Load a model (float32, sdpa attention) and its tokenizer, by hub name, folder or
    `tiny`. Errors name `flag`.

    Only rank 0 holds the weights, on the CPU: a copy on each rank of a node would multiply the
    memory. The others know the shapes (meta device) until `broadcast_module` sends the weights.
    Weights are float32 because they are the optimiser's master copy: at lr 1e-6 an update is
    smaller than the spacing of bfloat16 numbers and would round to nothing. The forward pass casts
    them down (see `distributed.shard`).
    """
    source = source_of(name, flag)
    logging.set_verbosity_error()  # check_weights refuses what transformers only warns about
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    # transformers refuses to load some models' own generation configs: see read_json.
    report["generation_config"] = GenerationConfig()
    of_rank_0 = None  # EOS, and whether the head is tied
    with blame(f"{flag} {name}: cannot be loaded"):
        config = config_of(source)  # before the tokenizer, which reads it, too
        start = Path(cached_file(source, "config.json")).parent
        tokenizer = AutoTokenizer.from_pretrained(source, **SAFE)
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")  # transformers has made up an empty one
        options = SAFE | {"config": config, "dtype": torch.float32}
        if world.rank == 0:
            lm, loaded = AutoModelForCausalLM.from_pretrained(source, **options, **report)
            check_weights(loaded)
            if left := sorted(loaded["unexpected_keys"]):
                say(f"{name}: {len(left)} weights are not loaded or saved, first: {left[0]}")
            own = read_json(source, "config.json")
            generation = read_json(source, "generation_config.json")
            if generation.get("stop_strings"):
                say(f"{name}: responses end at EOS tokens alone, not at its stop_strings")
            eos = eos_ids((generation or own).get("eos_token_id"), tokenizer)
            # Look at the weights, because a file may have a head although config.json says tied.
            tied = lm.lm_head.weight is lm.get_input_embeddings().weight
            of_rank_0 = eos, tied
            # A hash for config.json, because a resumed run must have begun from the same weights.
            firsts = torch.cat([weight.detach().flatten()[:64] for weight in lm.parameters()])
            tokenizer.weights = hashlib.sha256(firsts.numpy().tobytes()).hexdigest()[:16]
            own = config_to_save(own, lm, tied)
            generation["eos_token_id"] = eos if len(eos) > 1 else eos[0]
            lm.own = {"config.json": own, "generation_config.json": generation}  # to be saved
    if world.size > 1:
        of_rank_0 = from_rank_0(of_rank_0)
    eos, config.tie_word_embeddings = of_rank_0
    if world.rank > 0:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(**options).eval()
    lm.config.tie_word_embeddings = config.tie_word_embeddings
    lm.generation_config.eos_token_id = eos
    # The tokenizer's own limit is often missing, or another model's.
    positions = getattr(lm.config, "max_position_embeddings", None)
    tokenizer.model_max_length = positions or tokenizer.model_max_length
    tokenizer.embeddings = len(lm.get_input_embeddings().weight)  # see `as_problem`
    tokenizer.start = start  # the folder of the model, whose files `save_model` copies
    return lm, tokenizer


def check_weights(loaded: dict) -> None:
    """Refuse weights that do not fit `config.json`; transformers would fill in random numbers."""
    wrong = sorted(loaded["missing_keys"])
    wrong += [key for key, _, _ in loaded["mismatched_keys"]]
    # A vision tower's weights may be left over, but no layer and no classifier.
    parts = ("model.layers.", "score.", "classifier.")
    wrong += [key for key in loaded["unexpected_keys"] if key.startswith(parts)]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config.json, first: {wrong[0]}")
