#!/usr/bin/env python3
"""Makes fixtures/: a Llama of random weights as save_pretrained writes it, and as a GGUF file by PyPI's gguf.

    pip install torch transformers gguf
    python tests/io/gguf/make_fixtures.py

The GGUF file has q and k as llama.cpp's converter orders their rows; matrices in q8_0, f16 and bf16 by turns, the rest in f32.
"""
import pathlib
import shutil

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent / "fixtures"


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=50000.0,
                                      bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(FOLDER / "llama")
    (FOLDER / "llama/generation_config.json").unlink()

    writer = gguf.GGUFWriter(FOLDER / "llama.gguf", "llama")
    writer.add_type("model")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(32)
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab"] + [f"[PAD{i}]" for i in range(8, 32)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0, 0.0, 0.0, -1e4, -1e4, -1e4, -2.0, -1.0] + [-1e4] * 24)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1] + [5] * 24)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16]
    stored = {}
    for i, (name, tensor) in enumerate(model.state_dict().items()):
        array = tensor.numpy()
        new = names.get_name(name, (".weight",))
        heads = 4 if ".attn_q." in new else 2 if ".attn_k." in new else 0
        if heads:
            array = np.ascontiguousarray(array.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(array.shape))
        kind = kinds[i % 3] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(array, kind)
        back = gguf.quants.dequantize(data, kind)
        if heads:
            back = back.reshape(heads, 4, 2, 32).swapaxes(1, 2).reshape(back.shape)
        writer.add_tensor(new, data, raw_dtype=kind)
        stored[name] = torch.tensor(back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(stored, FOLDER / "dequantized.safetensors.golden")


if __name__ == "__main__":
    main()
