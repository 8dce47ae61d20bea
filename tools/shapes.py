"""The shapes of published models, for machines without a hub."""

from transformers import AutoConfig, PreTrainedConfig

# From their config.json: type, width, layers, heads, KV heads, MLP width, and whether embedding and
# head share one matrix.
FIELDS = "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
FIELDS += "intermediate_size tie_word_embeddings"
SHAPES = {
    "Qwen/Qwen3-0.6B-Base": ("qwen3", 1024, 28, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B-Base": ("qwen3", 2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-4B-Base": ("qwen3", 2560, 36, 32, 8, 9728, True),
    "Qwen/Qwen3-8B-Base": ("qwen3", 4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen3-14B-Base": ("qwen3", 5120, 40, 40, 8, 17408, False),
    "Qwen/Qwen3-30B-A3B-Base": ("qwen3_moe", 2048, 48, 32, 4, 6144, False),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18944, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, False),
}
OTHERS = {
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32_768},
    "qwen2": {"max_position_embeddings": 131_072},
    "Qwen/Qwen2.5-Math-1.5B": {"max_position_embeddings": 4096},
    "Qwen/Qwen2.5-7B": {"vocab_size": 152_064},
}
OTHERS["qwen3_moe"] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
OTHERS["qwen3_moe"] |= OTHERS["qwen3"]


def config_of(model: str) -> PreTrainedConfig:
    """Make the configuration of a model of SHAPES."""
    fields = dict(zip(FIELDS.split(), SHAPES[model])) | {"vocab_size": 151_936}
    kind = fields.pop("model_type")
    return AutoConfig.for_model(kind, **fields | OTHERS[kind] | OTHERS.get(model, {}))
