#!/usr/bin/env python3
"""Checks GGUF files that tessera writes, by PyPI's gguf and by transformers, and tessera's reading of them.

    pip install torch transformers gguf accelerate
    python tools/check_gguf.py BUILD_DIR [--model DIR] [--converter convert_hf_to_gguf.py] [--llama-cpp]

Makes a tiny model of random weights of each family, with a tokenizer of tests/io/tokenizer/fixtures, and exports it in each dtype.
Compares every tensor bit by bit with what the gguf package makes of the weights, logits and token ids through transformers'
from_pretrained(gguf_file=...) with those of the original, and, with llama.cpp's converter, all keys and tensors with those it writes. With --llama-cpp (the package llama-cpp-python), llama.cpp
itself computes logits and token ids.
--model adds a Hugging Face directory such as that of tools/fetch_smollm2.py, with greedy text. Exit code 1 if a check fails.
"""
import argparse
import contextlib
import copy
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
FIXTURES = pathlib.Path(__file__).parent.parent / "tests/io/tokenizer/fixtures"
TEXTS = ["Hello world", "The year 2024, and 3.14159!", "it's  two  spaces\n\nand lines", "caf\u00e9\u4f60\u597d\U0001f600"]
DTYPES = {"f32": 1e-5, "bf16": 1e-5, "f16": 1e-5, "q8_0": 0.1}  # largest difference of logits, of their largest
READ = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2"]  # by transformers from GGUF
Q8 = gguf.GGMLQuantizationType.Q8_0

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256)
GEMMA = dict(SMALL, head_dim=32)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
CASES = {  # name: class, tokenizer, settings, whether transformers reads all settings from GGUF; None: not all weights
    "llama": ("Llama", "llama2", SMALL, True),
    "llama-tied": ("Llama", "smollm", dict(SMALL, tie_word_embeddings=True), True),
    "llama-biased": ("Llama", "llama3", dict(SMALL, attention_bias=True, num_key_value_heads=4), None),
    "llama3": ("Llama", "llama3", dict(SMALL, rope_parameters=LLAMA3), False),
    "mistral-7b": ("Mistral", "mistral", dict(SMALL, sliding_window=None), True),
    "qwen2": ("Qwen2", "qwen", SMALL, True),
    "qwen3": ("Qwen3", "qwen", dict(SMALL, head_dim=128), True),
    "gemma": ("Gemma", "gemma", GEMMA, False),
    "gemma2": ("Gemma2", "gemma", dict(GEMMA, query_pre_attn_scalar=32, num_hidden_layers=3, sliding_window=16), False),
    "gemma3": ("Gemma3", "gemma", dict(GEMMA, query_pre_attn_scalar=32, num_hidden_layers=7, sliding_window=16), False),
    "phi3": ("Phi3", "phi3", dict(SMALL, num_key_value_heads=4, pad_token_id=0), True),
    "phi3-long": ("Phi3", "phi3", dict(SMALL, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0 + i / 8 for i in range(8)],
        long_factor=[2.0 + i for i in range(8)])), False),
    "olmo2": ("Olmo2", "olmo2", SMALL, False),
    "gpt2": ("GPT2", "gpt2", dict(n_embd=64, n_layer=2, n_head=4), True),
}


def make(name, folder):
    kind, tokenizer, settings, _ = CASES[name]
    text = (FIXTURES / f"{tokenizer}.json").read_text()
    root = json.loads(text.replace("\\u0000", "\u2400"))  # no reader of GGUF takes NUL
    (folder / "tokenizer.json").write_text(json.dumps(root))
    tokens = {**root["model"]["vocab"], **{t["content"]: t["id"] for t in root["added_tokens"]}}
    bos = next(t for t in ["<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"] if t in tokens)
    eos = next(t for t in ["</s>", "<eos>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", bos] if t in tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=bos, eos_token=eos, chat_template="{{ messages[0]['content'] }}")))
    settings = dict(settings, vocab_size=max(tokens.values()) + 4, bos_token_id=tokens[bos], eos_token_id=tokens[eos])
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**settings)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if kind == "GPT2":  # the converter reads this old name
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(dict(saved, n_ctx=config.n_positions)))
    return model


def expected(model, arch):
    """Arrays by their names in GGUF, from the weights of a model of transformers."""
    config = model.config
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    state = {k: v for k, v in model.state_dict().items() if not k.endswith((".attn.bias", ".attn.masked_bias"))}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    arrays = {}
    for name, tensor in state.items():
        array = tensor.float().numpy()
        new = names.get_name(name, (".weight", ".bias"))
        if arch == "llama" and (".attn_q." in new or ".attn_k." in new):
            heads = config.num_attention_heads if ".attn_q." in new else config.num_key_value_heads
            array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if arch == "gpt2" and array.ndim == 2 and new.startswith("blk."):
            array = array.T
        if arch.startswith("gemma") and new.endswith("norm.weight"):
            array = array + np.float32(1)
        arrays[new] = np.ascontiguousarray(array)
    return arrays


def check_tensors(reader, arrays, dtype):
    """Names of tensors that are missing, added or unlike the gguf package's."""
    found = {t.name: t for t in reader.tensors}
    wrong = [n for n in found.keys() ^ arrays.keys() if not n.startswith("rope_f")]
    for name in found.keys() & arrays.keys():
        array, tensor = arrays[name], found[name]
        plain = array.ndim < 2 or name == "position_embd.weight"
        kind = "F32" if plain else "F16" if dtype == "q8_0" and array.shape[-1] % 32 else dtype.upper()
        data = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        same = tensor.tensor_type.name == kind and tensor.data.tobytes() == data.tobytes()
        if not same or list(reversed(tensor.shape.tolist())) != list(array.shape):
            wrong.append(name)
    return wrong


def rounded(model, dtype):
    """The model with matrices rounded as in a GGUF file; the original for f32, and for q8_0, whose difference is that of the rounding."""
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}.get(dtype)
    if kind is None:
        return model
    model = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not name.endswith("wpe.weight"):
            weight.data = weight.data.to(kind).float()
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits[0].float()


def check_converter(script, source, reader, dtype, folder):
    """Keys and tensors unlike those of llama.cpp's converter."""
    other = folder / "converter.gguf"
    # The converter knows pre-tokenizers of published vocabularies only.
    pre = reader.fields["tokenizer.ggml.pre"].contents()
    program = ("import sys, convert_hf_to_gguf as main; from conversion.base import TextModel; "
               f"TextModel.get_vocab_base_pre = lambda *_: {pre!r}; main.main()")
    done = subprocess.run([sys.executable, "-c", program, str(source), "--outfile", str(other), "--outtype", dtype],
                          capture_output=True, text=True, cwd=script.parent)
    if done.returncode != 0:
        return [f"converter: {done.stderr.strip().splitlines()[-1]}"]
    theirs = gguf.GGUFReader(other)
    wrong = []
    skipped = ["GGUF.", "general.name", "general.size_label", "general.finetune", "general.basename"]
    if reader.fields["tokenizer.ggml.model"].contents() == "llama":
        # Pieces of the model made here have other scores; CodeGemma's tokens are added to any Gemma.
        skipped += ["tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"]
        skipped += [f"tokenizer.ggml.{name}_token_id" for name in ("prefix", "suffix", "middle", "eot", "fim_", "file_separator")]
    if not any(t.name.startswith("rope_f") for t in reader.tensors):
        skipped.append("phi3.rope.scaling.original_context_length")  # without effect
    for key, field in theirs.fields.items():
        if key.startswith(tuple(skipped)):
            continue
        ours = reader.fields.get(key)
        if ours is None or ours.contents() != field.contents():
            a, b = (str(f.contents())[:60] if f else None for f in (ours, field))
            wrong.append(f"{key}: {a} and {b}")
    ours = {t.name: t for t in reader.tensors}
    for tensor in theirs.tensors:
        mine = ours.get(tensor.name)
        if mine is None or mine.tensor_type != tensor.tensor_type:
            wrong.append(tensor.name)
        elif mine.data.tobytes() != tensor.data.tobytes() and not (
                tensor.name.startswith("rope_f") and np.allclose(mine.data, tensor.data, rtol=1e-6, atol=0)):
            wrong.append(tensor.name)
    return wrong


def sentence_piece_model(folder):
    """Writes tokenizer.model, which the converter reads, for a tokenizer.json."""
    from sentencepiece import sentencepiece_model_pb2 as proto
    root = json.loads((folder / "tokenizer.json").read_text())
    if not root["model"]["byte_fallback"]:
        return
    added = {t["content"]: t["special"] for t in root["added_tokens"]}
    made = {}
    for merge in root["model"]["merges"]:
        made.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), -len(made) - 1.0)
    model = proto.ModelProto()
    tokens = {i: t for t, i in root["model"]["vocab"].items()}
    for token in (tokens.get(i, f"[PAD{i}]") for i in range(max(tokens) + 1)):
        byte = len(token) == 6 and token.startswith("<0x")
        kind = 2 if token == "<unk>" else 3 if added.get(token) else 6 if byte else 1
        model.pieces.add(piece=token, score=made.get(token, -1000.0), type=kind)
    model.trainer_spec.byte_fallback = True
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {t["id"]: dict(content=t["content"], special=t["special"]) for t in root["added_tokens"] if t["content"] != "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def check_llama_cpp(file, want, ids, original):
    """Largest difference of llama.cpp's logits, of their largest, and texts with other token ids."""
    import llama_cpp
    llm = llama_cpp.Llama(str(file), n_ctx=ids.shape[1] + 8, logits_all=True, verbose=False, flash_attn=False,
                          type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    llm.eval(ids[0].tolist())
    got = torch.tensor(np.array(llm.scores[: ids.shape[1]]))
    texts = [*TEXTS, "caf\u00e9 \u4f60\u597d \U0001f600"]
    if "Metaspace" not in str(original.backend_tokenizer.pre_tokenizer):  # which adds no second space
        texts.append(" a leading space")
    texts = [t for t in texts
             if llm.tokenize(t.encode(), add_bos=False) != original(t, add_special_tokens=False)["input_ids"]]
    return ((got - want).abs().max() / want.abs().max()).item(), texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--converter", type=pathlib.Path)
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    o = parser.parse_args()
    root = pathlib.Path(tempfile.mkdtemp(prefix="check-gguf-"))
    failures = []

    def tessera(*words):
        done = subprocess.run([str(o.build / "bin/tessera"), *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    def report(name, wrong):
        if wrong:
            failures.append(name)
            print(f"  FAILED {name}: " + "; ".join(map(str, wrong))[:2000])

    def check(name, source, model, reads_all, dtypes):
        original = transformers.AutoTokenizer.from_pretrained(source)
        ids = torch.arange(1, 97)[None] % model.config.vocab_size
        want = logits(model, ids)
        line = []
        for dtype in dtypes:
            out = root / f"{name}-{dtype}"
            done = tessera("consolidate", source, out, "--format", "gguf", "--dtype", dtype)
            if done.stderr.strip():
                print(" ", done.stderr.strip())
            reader = gguf.GGUFReader(out / "model.gguf")
            arch = reader.fields["general.architecture"].contents()
            report(f"{name} {dtype} tensors", check_tensors(reader, expected(model, arch), dtype))
            if o.converter and dtype in dtypes[:1]:
                report(f"{name} {dtype} converter", check_converter(o.converter, source, reader, dtype, root))
            if dtype in ("f32", "q8_0"):
                line.append(f"from GGUF {dtype} {check_import(name, out, source, dtype, want, ids, original):.1e}")
            if o.llama_cpp and dtype in ("f32", "q8_0"):
                difference, texts = check_llama_cpp(out / "model.gguf", want, ids, original)
                line.append(f"llama.cpp {dtype} {difference:.1e}")
                report(f"{name} {dtype} logits of llama.cpp", [difference] if difference > max(DTYPES[dtype], 1e-3) else [])
                report(f"{name} {dtype} tokens of llama.cpp", texts)
            if model.config.model_type not in READ or reads_all is None:
                continue
            with contextlib.redirect_stderr(io.StringIO()):
                loaded = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32).eval()
            if not reads_all:  # settings that transformers does not take from GGUF files
                weights = loaded.state_dict()
                loaded = type(model)(model.config).eval()
                loaded.load_state_dict(weights, strict=False)
            same = logits(rounded(model, dtype), ids)
            difference = ((logits(loaded, ids) - same).abs().max() / same.abs().max()).item()
            line.append(f"transformers {dtype} {difference:.1e}")
            report(f"{name} {dtype} logits", [difference] if difference > DTYPES[dtype] else [])
            tokenizer = transformers.AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
            report(f"{name} {dtype} tokens", [t for t in TEXTS if tokenizer(t, add_special_tokens=False)["input_ids"]
                                              != original(t, add_special_tokens=False)["input_ids"]])
            if name == "--model":
                prompt = torch.tensor([original("The capital of France is")["input_ids"]])
                texts = [m.generate(prompt, max_new_tokens=24, do_sample=False).tolist() for m in (model, loaded)]
                print(f"  {dtype}: {original.decode(texts[1][0])!r}")
                report(f"{name} {dtype} greedy text", [texts] if dtype == "f32" and texts[0] != texts[1] else [])
        print(f"{name}: tensors of {', '.join(dtypes)}; logits differ by {', '.join(line) or '(not read)'}", flush=True)

    def check_import(name, exported, source, dtype, want, ids, original):
        """Largest difference of logits of the model that tessera makes of a GGUF file, of their largest."""
        back = root / f"{name}-{dtype}-back"
        arch = gguf.GGUFReader(exported / "model.gguf").fields["general.architecture"].contents()
        follows = arch in ("llama", "qwen2", "qwen3") and name not in ("llama3", "mistral-7b")
        tessera("consolidate", exported / "model.gguf", back, *([] if follows else ["--config", source / "config.json"]))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
        difference = ((logits(loaded, ids) - want).abs().max() / want.abs().max()).item()
        report(f"{name} {dtype} logits of the model from GGUF", [difference] if difference > DTYPES[dtype] else [])
        tokenizer = transformers.AutoTokenizer.from_pretrained(back)
        report(f"{name} {dtype} tokens of the model from GGUF", [t for t in [*TEXTS, " a leading space"]
                                                                 if tokenizer(t)["input_ids"] != original(t)["input_ids"]])
        return difference

    for name in o.only:
        source = root / name
        source.mkdir()
        model = make(name, source)
        if o.converter:
            sentence_piece_model(source)
        check(name, source, model, CASES[name][3], list(DTYPES))
    if o.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32).eval()
        check("--model", o.model, model, True, list(DTYPES))
    print(f"FAILED: {', '.join(failures)}" if failures else "all equal")
    shutil.rmtree(root)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
