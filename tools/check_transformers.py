#!/usr/bin/env python3
"""Loads exports of `tessera consolidate` with Hugging Face's transformers and safetensors, and compares them with tessera.

  check_transformers.py BUILD_DIR [--model MODEL ... | --families]

Configure BUILD_DIR with -DTESSERA_BUILD_BENCH=ON and build tessera and tessera_logits. Exports each MODEL as one file, as several
files, and as bf16. Without --model: two small models trained here on two ranks (characters and bytes), PyTorch FSDP shards and a
Hugging Face directory from the tests. With --families: every model of tests/golden/families, saved by transformers in several
files, read by two ranks, and saved by them unchanged.

Checks of each export: transformers reports no missing or unexpected tensor; parameters have the requested dtype; logits are
within 1e-4 (1e-5 of the largest logit, if that is more) of tessera's for the source (bf16: for the export; both in float32); greedy continuations are equal; the
generation_config.json is right; and for models trained on text the tokenizer gives tessera's ids and restores each text.

Needs Python with torch, transformers and safetensors. Exit code 1 if a check fails.
"""
import argparse, json, os, pathlib, random, subprocess, sys, tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # use files of the directory only
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch, transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

transformers.utils.logging.disable_progress_bar()
ROOT = pathlib.Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4
TEXTS = ["To be, or not to be: that 's all !", "  \n\n indented\n", "gr\u00fc\u00dfe, \u20ac 5 \U0001F600e\u0301 \u2581\u0120",
         "\ttabs\r\nand returns ", " ", "\u00a0\ufeff\x7f"]


class Failed(Exception):
    pass


def check(condition, message):
    if not condition:
        raise Failed(message)


class Tessera:
    def __init__(self, build):
        self.program, self.logits_program = f"{build}/bin/tessera", f"{build}/tools/bench/tessera_logits"

    def __call__(self, *words):
        ran = subprocess.run([self.program, *map(str, words)], capture_output=True, text=True)
        check(ran.returncode == 0, f"tessera {' '.join(map(str, words))}: exit code {ran.returncode}\n{ran.stderr[-1000:]}")
        return ran.stdout

    def train(self, run, text, tokenizer):
        self("train", "--nproc", 2, "--run.out", run, "--data.train", text, "--data.tokenizer", tokenizer, "--train.steps", 30,
             "--train.global_batch", 4, "--train.eval_every", 30, "--train.eval_batches", 1, "--model.n_layer", 2, 
             "--model.n_head", 2, "--model.n_embd", 32, "--model.seq_len", 32, "--optim.lr", 0.01, "--optim.warmup_steps", 2)

    def logits(self, model, rows):
        text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
        ran = subprocess.run([self.logits_program, model], input=text.encode(), capture_output=True)
        check(ran.returncode == 0, ran.stderr.decode())
        return torch.frombuffer(bytearray(ran.stdout), dtype=torch.float32).view(len(rows), len(rows[0]), -1)

    def generate(self, model, count, *prompt):
        return json.loads(self("generate", model, "--json", "--temperature", 0, "--max-new-tokens", count, *prompt))


def check_files(out, several):
    """Checks with safetensors alone that the index matches the files."""
    held, size = {}, 0
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            check(file.metadata().get("format") == "pt", f"{path.name}: metadata is {file.metadata()}")
            for name in file.keys():
                tensor = file.get_tensor(name)
                check(name not in held, f"{name} is in {held.get(name)} and {path.name}")
                held[name], size = path.name, size + tensor.numel() * tensor.element_size()
    check((len(set(held.values())) > 1) == several, f"tensors are in {len(set(held.values()))} files")
    if several:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        check(index == {"metadata": {"total_size": size}, "weight_map": held}, "the index differs from the files")


def check_tokenizer(tessera, out, vocab_size):
    tokenizer = AutoTokenizer.from_pretrained(out)
    check(len(tokenizer) == vocab_size, f"the tokenizer has {len(tokenizer)} entries, the model {vocab_size}")
    compared = 0
    known = json.loads((out / "tokenizer_tessera.json").read_text()).get("vocabulary")
    for text in TEXTS:
        if known is not None and not set(text) <= set(known):
            continue
        expected = tessera.generate(out, 0, "--prompt", text)["prompt_tokens"]
        found = tokenizer(text).input_ids
        check(found == expected, f"{text!r}: AutoTokenizer gives {found}, tessera {expected}")
        check(tokenizer.decode(found) == text, f"{text!r} decodes to {tokenizer.decode(found)!r}")
        compared += 1
    if known is not None:
        try:
            found = tokenizer("\u4e2d").input_ids if "\u4e2d" not in known else None
        except Exception:
            found = None
        check(found is None, f"a character outside of the vocabulary became {found}")
    return compared


def check_export(tessera, source, out, options):
    tessera("consolidate", source, out, *options)
    check_files(out, several="--max-shard-size" in options)
    model, info = AutoModelForCausalLM.from_pretrained(out, torch_dtype="auto", output_loading_info=True)
    for kind, found in info.items():
        check(not found, f"transformers says {kind}: {found}")
    bf16 = "bf16" in options
    dtypes = {p.dtype for p in model.parameters()}
    check(dtypes == {torch.bfloat16 if bf16 else torch.float32}, f"parameters are {dtypes}")
    if bf16:  # read again, because buffers (Gemma's scale of embeddings) were rounded too
        model = AutoModelForCausalLM.from_pretrained(out, torch_dtype=torch.float32)
    model = model.float().eval()
    config = model.config
    draw = random.Random(1)
    positions = min(config.max_position_embeddings, 64)
    rows = [[draw.randrange(config.vocab_size) for _ in range(positions)] for _ in range(4)]
    with torch.no_grad():
        theirs = model(torch.tensor(rows)).logits
    ours = tessera.logits(out if bf16 else source, rows)
    check(ours.shape == theirs.shape, f"logits are {list(theirs.shape)}, tessera's {list(ours.shape)}")
    difference = (ours - theirs).abs().max().item()
    # Large logits of deep models are less exact, transformers' too: SmolLM2's reach 38, with errors of 6e-5 in float32.
    allowed = TOLERANCE * max(1.0, theirs.abs().max().item() / 10)
    check(difference <= allowed, f"logits differ by {difference:.2e}, more than {allowed:.0e}")

    generation = GenerationConfig.from_pretrained(out)
    eos = json.loads((out / "config.json").read_text()).get("eos_token_id")  # transformers fills in defaults
    check(generation.eos_token_id == eos, f"eos_token_id {generation.eos_token_id}, not {eos}")
    prompt = rows[0][:positions // 4 or 1]
    count = positions - len(prompt)
    expected = tessera.generate(out, count, "--prompt-tokens", *prompt)["tokens"]
    generation.update(do_sample=False, max_new_tokens=count, pad_token_id=0)
    found = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                           generation_config=generation)[0, len(prompt):].tolist()
    check(found == expected, f"greedy continuation {found}, tessera's {expected}")

    texts = check_tokenizer(tessera, out, config.vocab_size) if (out / "tokenizer_tessera.json").exists() else None
    return difference, ours.abs().max().item(), count, texts


def small_models(tessera, folder):
    """{name: source}: models trained here on two ranks, and files of the tests."""
    text = "".join(TEXTS) * 40
    (folder / "text.txt").write_bytes(text.encode())
    sources = {"GPT-2 of DCP (FSDP, 3 ranks)": ROOT / "tests/io/dcp/fixtures/fsdp-gpt2",
               "Hugging Face directory": ROOT / "tests/golden/gpt2-odd"}
    for tokenizer in ("chars", "bytes"):
        run = folder / f"run-{tokenizer}"
        tessera.train(run, folder / "text.txt", tokenizer)
        sources[f"checkpoint of 2 ranks, {tokenizer}"] = run
    return sources


def family_models(tessera, folder):
    """{name: source}: runs that read a model of transformers and saved it without learning."""
    sources = {}
    tokens = folder / "tokens.bin"
    draw = random.Random(2)
    tokens.write_bytes(b"".join(draw.randrange(61).to_bytes(2, "little") for _ in range(2000)))
    torch.manual_seed(3)
    for file in sorted((ROOT / "tests/golden/families").glob("*.json")):
        for number, case in enumerate(json.loads(file.read_text())["cases"]):
            config = transformers.AutoConfig.for_model(**case["config"])
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25 * torch.randn_like(parameter))
            theirs, run = folder / f"{file.stem}-{number}", folder / f"run-{file.stem}-{number}"
            model.save_pretrained(theirs, max_shard_size="12KB")
            tessera("train", "--nproc", 2, "--run.out", run, "--model.init_from", theirs, "--data.train", tokens, "--model.seq_len", 8,
                    "--train.steps", 1, "--train.global_batch", 2, "--train.eval_every", 0, "--optim.lr", 0, "--optim.min_lr", 0,
                    "--optim.warmup_steps", 0)
            sources[f"{file.stem}: {case['label']}"] = run
    return sources


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("build", type=pathlib.Path)
    a.add_argument("--model", nargs="+", type=pathlib.Path)
    a.add_argument("--families", action="store_true")
    o = a.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    tessera, failures = Tessera(o.build), 0
    with tempfile.TemporaryDirectory(prefix="check-transformers-") as name:
        folder = pathlib.Path(name)
        make = family_models if o.families else small_models
        sources = {str(path): path for path in o.model} if o.model else make(tessera, folder)
        exports = 0
        for what, source in sources.items():
            size = json.loads(tessera("consolidate", source, folder / "none", "--dry-run", "--json"))["bytes"]
            for how, options in (("one file", []), ("several files", ["--max-shard-size", size // 3]), ("bf16", ["--dtype", "bf16"])):
                exports += 1
                try:
                    difference, largest, count, texts = check_export(tessera, source, folder / f"out-{exports}", options)
                    said = f"logits of up to {largest:.1f} differ by {difference:.1e} at most, {count} equal tokens"
                    print(f"ok      {what}, {how}: {said}" + (f", {texts} texts encoded and decoded" if texts else ""))
                except Failed as failure:
                    failures += 1
                    print(f"FAILED  {what}, {how}: {failure}")
    print(f"{exports - failures} of {exports} exports passed")
    return failures > 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failure:
        sys.exit(f"check_transformers: {failure}")
