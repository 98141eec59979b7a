#!/usr/bin/env python3
"""nanoGPT's small CPU setting on a text (Tiny Shakespeare): validation loss and time, on one rank and on two.

  shakespeare.py BUILD_DIR TEXT [--rounds 1]

4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps, no dropout, characters, 90/10 split; learning rate
1e-3 falling as a cosine to 1e-4, warm-up 100, beta2 0.99. The loss is over the whole validation part. The time is the
command's, from start to exit: reading, training, the final evaluation. Runs take turns.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time


def run(build, text, ranks, folder):
    out = tempfile.mkdtemp(dir=folder)
    command = [f"{build}/bin/tessera", "train", "--nproc", str(ranks), "--data.train", text, "--data.tokenizer", "chars",
               "--model.n_layer", "4", "--model.n_head", "4", "--model.n_embd", "128", "--model.seq_len", "64",
               "--train.global_batch", "12", "--train.steps", "2000", "--train.eval_every", "0", "--train.eval_batches", "0",
               "--optim.lr", "1e-3", "--optim.min_lr", "1e-4", "--optim.warmup_steps", "100", "--optim.beta2", "0.99",
               "--optim.schedule", "cosine", "--checkpoint.every", "0", "--run.out", out]
    start = time.monotonic()
    result = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    seconds = time.monotonic() - start
    if result.returncode != 0:
        sys.exit(result.stderr[-2000:])
    rows = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
    val = [r["val_loss"] for r in rows if "val_loss" in r][-1]
    step_ms = statistics.median(r["step_ms"] for r in rows if "step_ms" in r)
    return val, seconds, step_ms


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("build")
    a.add_argument("text")
    a.add_argument("--rounds", type=int, default=1)
    a.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    o = a.parse_args()
    print(f"{'ranks':>5} {'val loss':>9} {'seconds':>8} {'ms/step':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(o.rounds):
            for ranks in o.ranks:
                val, seconds, step_ms = run(o.build, o.text, ranks, folder)
                print(f"{ranks:>5} {val:>9.4f} {seconds:>8.1f} {step_ms:>8.2f}", flush=True)


main()
