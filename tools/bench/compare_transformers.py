#!/usr/bin/env python3
"""Times a training step and generation of a Hugging Face model beside transformers, in turn, on the CPU.

    pip install torch transformers
    python tools/bench/compare_transformers.py BUILD_DIR MODEL [--batch 2] [--seq 256] [--rounds 5] [--threads N]
    python tools/bench/compare_transformers.py BUILD_DIR MODEL --only generate [--prompt 32] [--tokens 128] [--samples 1]

One process at a time. Training: AdamW in float32 with clipping, on random tokens; transformers with sdpa attention and
torch's fused AdamW, tessera by `tessera train`; the median step of each process without its first two. Generation: greedy,
from a prompt of `--prompt` tokens, `--tokens` new ones for each of `--samples` copies of it; transformers' generate() with
its cache, warmed up once; tessera by `tessera generate --json`, without the time to load; both with a copy of the model that
has no token to end a text. Prints the median of the rounds, and the ratio of medians.
"""
import argparse
import array
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

THEIRS = """
import json, statistics, sys, time
import torch, transformers
model_dir, what = sys.argv[1:3]
batch, seq, tokens, steps, threads, length, samples = map(int, sys.argv[3:])
torch.set_num_threads(threads)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
vocab = model.config.vocab_size
if what == "train":
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(steps):
        ids = torch.randint(0, vocab, (batch, seq + 1))
        start = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1], use_cache=False).logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    print(statistics.median(times[2:]))
else:
    model.eval()
    prompt = torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(1)).repeat(samples, 1)
    def run(count):
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=count, max_new_tokens=count,
                             pad_token_id=0)
        assert out.shape == (samples, length + count)
        return time.perf_counter() - start
    run(4)
    print(run(tokens))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    for name, value in dict(batch=2, seq=256, prompt=32, tokens=128, samples=1, steps=7, rounds=5, threads=2).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=("train", "generate"))
    o = parser.parse_args()
    tessera = str(o.build / "bin/tessera")
    config = json.loads((o.model / "config.json").read_text())
    vocab = config["vocab_size"]
    endless = tempfile.TemporaryDirectory()
    for file in o.model.glob("*.safetensors*"):
        (pathlib.Path(endless.name) / file.name).symlink_to(file.resolve())
    (pathlib.Path(endless.name) / "config.json").write_text(json.dumps(dict(config, eos_token_id=None)))
    o.model = pathlib.Path(endless.name)

    def theirs(what):
        words = [sys.executable, "-c", THEIRS, o.model, what, o.batch, o.seq, o.tokens, o.steps, o.threads, o.prompt, o.samples]
        return float(subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout)

    def train(folder):
        data = pathlib.Path(folder) / "tokens.bin"
        draw = random.Random(1)
        data.write_bytes(array.array("H", [draw.randrange(min(vocab, 65536)) for _ in range(200_000)]).tobytes())
        run = pathlib.Path(folder) / "run"
        keys = {"model.init_from": o.model, "model.seq_len": o.seq, "data.train": data, "train.global_batch": o.batch, "train.steps": o.steps,
                "train.threads": o.threads, "train.eval_every": 0, "checkpoint.every": 0, "optim.warmup_steps": 0, "optim.lr": 1e-4,
                "optim.schedule": "constant", "train.device": "cpu", "run.out": run}
        subprocess.run([tessera, "train", *(f"--{k}={v}" for k, v in keys.items())], check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return statistics.median([line["step_ms"] for line in lines if "step_ms" in line][2:]) / 1e3

    def generate():
        draw = random.Random(1)
        prompt = [str(draw.randrange(vocab)) for _ in range(o.prompt)]
        words = [tessera, "generate", o.model, "--device", "cpu", "--threads", o.threads, "--temperature", 0,
                 "--max-new-tokens", o.tokens, "--samples", o.samples, "--json", "--prompt-tokens", *prompt]
        out = json.loads(subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout)
        assert all(len(sample["tokens"]) == o.tokens for sample in out.get("samples", [out]))
        return out["seconds"]

    times = {what: ([], []) for what in ("train", "generate") if o.only in (None, what)}
    for _ in range(o.rounds):
        for what, (ours, other) in times.items():
            with tempfile.TemporaryDirectory() as folder:
                ours.append(train(folder) if what == "train" else generate())
            other.append(theirs(what))
    for what, lists in times.items():
        ours, other = map(statistics.median, lists)
        spread = ", ".join(f"{min(x):.3f} to {max(x):.3f}" for x in lists)
        print(f"{what}: tessera {ours:.3f} s, transformers {other:.3f} s, ratio {other / ours:.2f} ({spread})")


if __name__ == "__main__":
    main()
