"""Models of real shapes with random weights, for machines without a hub."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def qwen3(hidden: int, intermediate: int, toy: bool = False) -> Qwen3ForCausalLM:
    """A tied model of Qwen3's kind (0.6B has 1024 and 3072, 1.7B 2048 and 6144). A toy always has
    width 32 and vocabulary 300."""
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 28}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    shape |= {"vocab_size": 151_936, "tie_word_embeddings": True, "rope_theta": 1_000_000.0}
    shape |= {"max_position_embeddings": 32_768, "pad_token_id": 0, "eos_token_id": 1}
    if toy:
        shape |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        shape |= {"vocab_size": 300}
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def byte_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A token for each byte, and dummy tokens up to a vocabulary of `size`. It reads any text and
    any token id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", *alphabet]
    words += [f"{alphabet[i % 200]}{i}" for i in range(size - len(words))]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
