"""Loading a model and its tokenizer. Models that would be computed wrongly are refused here."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file, logging

from common.cli import BadInput, blame, say
from common.distributed import ALONE, World, from_rank_0
from common.scale.folder import after_training, check_rope, eos_ids, fault_of, read_json
from common.scale.head import head_of, head_product

logging.disable_progress_bar()  # the run has its own
ENCODER_DECODERS = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
TINY = Path(__file__).with_name("tiny")
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
EMBEDDED = {
    "tiny": TINY / "model",
    "tiny-moe": TINY / "model-moe",
    "tiny-teacher": TINY / "model-teacher",
}


SAFE = {"trust_remote_code": False}  # a model folder's own code never runs


def source_of(name: str, flag: str = "--model") -> str:
    """Return the folder or hub name of a model; raise BadInput if it can be neither."""
    source = str(EMBEDDED.get(name, name))
    if name and Path(source).is_dir():
        if wrong := fault_of(Path(source)):
            raise BadInput(f"{flag} {name}: {wrong}")
    elif Path(source).is_file():
        raise BadInput(f"{flag} {name}: is a file; use a folder with config.json and *.safetensors")
    elif name.count("/") != 1:  # not a hub name
        known = f"use a folder, a hub name (owner/name), {' or '.join(EMBEDDED)}"
        raise BadInput(f"{flag} {name!r}: no such folder; {known}")
    else:
        unknown = "no such folder, and as a hub name neither cached nor within reach"
        with blame(f"{flag} {name}: {unknown}"):
            cached_file(source, "config.json")
    return source


def config_of(source: str) -> PreTrainedConfig:
    """Read a model's config.json with our attention: sdpa, or eager if the family has no sdpa.

    The file may name another attention, even a kernel that transformers would download and run, and
    that would win over the argument of `from_pretrained`.
    """
    check_rope(read_json(source, "config.json"))
    config = AutoConfig.from_pretrained(source, **SAFE)
    # Refuse it here, before transformers asks for the package of its quantisation method.
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantised: use a checkpoint that is not")
    # Some decoders are called encoder-decoders, too, but their kind is not.
    if config.is_encoder_decoder and config.model_type in ENCODER_DECODERS:
        raise ValueError(f"{config.model_type} is an encoder-decoder: use a decoder-only model")
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
    """Load a model (float32; sdpa or eager attention) and its tokenizer, by hub name, folder or
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
    known = None  # only rank 0 knows EOS, whether the head is tied, and the attention
    with blame(f"{flag} {name}: cannot be loaded"):
        config = config_of(source)  # before the tokenizer, which reads it, too
        start = Path(cached_file(source, "config.json")).parent
        tokenizer = AutoTokenizer.from_pretrained(source, **SAFE)
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise ValueError("no tokenizer")  # transformers has made up an empty one
        options = SAFE | {"config": config, "dtype": torch.float32}
        if world.rank == 0:
            lm, loaded = AutoModelForCausalLM.from_pretrained(source, **options, **report)
            check_structure(lm)
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
            known = eos, tied, lm.config._attn_implementation
            # A hash for config.json, because a resumed run must have begun from the same weights.
            firsts = torch.cat([weight.detach().flatten()[:64] for weight in lm.parameters()])
            tokenizer.weights = hashlib.sha256(firsts.numpy().tobytes()).hexdigest()[:16]
            own = after_training(own, lm, tied)
            generation["eos_token_id"] = eos if len(eos) > 1 else eos[0]
            lm.own = {"config.json": own, "generation_config.json": generation}  # to be saved
    if world.size > 1:
        known = from_rank_0(known)
    eos, config.tie_word_embeddings, config._attn_implementation = known
    if world.rank > 0:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(**options).eval()
    lm.config.tie_word_embeddings = config.tie_word_embeddings
    lm.generation_config.eos_token_id = eos
    # The tokenizer's own limit is often missing, or another model's.
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
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


def check_structure(lm: PreTrainedModel) -> None:
    """Refuse models that `Policy` cannot compute, or would compute wrongly. Choose eager attention
    if sdpa computes something else than the model's own."""
    name = type(lm).__name__
    if lm.config.get_text_config() is not lm.config:
        raise ValueError(f"{name} is more than a text model: use the family's text-only checkpoint")
    if lm.base_model is lm or not hasattr(getattr(lm, "lm_head", None), "weight"):
        raise ValueError(f"{name} has no lm_head over a base model: not supported")
    some = torch.linspace(0, len(lm.lm_head.weight) - 1, 12).long()  # [12]
    ids = torch.stack([some[:8], torch.cat([some[:4], some[8:]])])  # [2, 8]: the first 4 are equal

    def gap(ours: Tensor, theirs: Tensor) -> float:
        return (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max().item()

    with torch.no_grad():
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [2, 8, H]
        ours = head_of(lm).logits(head_product(hidden, lm.lm_head.weight))  # [2, 8, V]
        theirs = lm(input_ids=ids, use_cache=False).logits  # [2, 8, V]
        usual = lm.config._attn_implementation  # eager if the family has no sdpa (sinks)
        lm.set_attn_implementation("eager")  # the plain formula, with all that the family adds
        plain = lm(input_ids=ids, use_cache=False).logits  # [2, 8, V]
    off = gap(ours, theirs)
    if off > 1e-4:  # rounding: 1e-6
        raise ValueError(f"{name} makes other logits of its head's product: off by {off:.2g}")
    off = gap(ours[0, :4], ours[1, :4])
    if off > 1e-3:
        raise ValueError(f"{name} is not causal: later tokens change earlier logits by {off:.2g}")
    if usual == "eager" and hasattr(lm.config, "index_topk"):  # DeepSeek-V4, HY-V4
        raise ValueError(f"{name}: its indexer is not causal in long rows: use another model")
    # Gemma 2 caps scores, which sdpa does not. Mamba's layers have no attention at all.
    if gap(theirs, plain) > 1e-3 or (usual == "eager" and not lm._is_stateful):
        say(f"{name}: sdpa is not its attention, so eager is used: slower, and more memory")
    else:
        lm.set_attn_implementation(usual)
