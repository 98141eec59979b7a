#!/usr/bin/env python3
"""Trains nanoGPT's small CPU setting on a text (Tiny Shakespeare) on one and two ranks: validation loss and time.

  shakespeare.py BUILD_DIR TEXT [--rounds 1] [--steps 2000] [--nanogpt DIR [--python PYTHON ...]]

4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps, no dropout, characters, 90/10 split; learning rate
1e-3 with cosine decay to 1e-4, warm-up 100, beta2 0.99. The loss is over the whole validation part. The time is of the whole
command: reading, training, final evaluation. Runs alternate. With a checkout of nanoGPT (data prepared with
data/shakespeare_char/prepare.py) its train.py runs, too, under each PYTHON. On a machine whose speed varies, use many rounds of
few steps and compare the median steps.
"""
import re, statistics, subprocess, sys, tempfile, time

from common import metrics, must, small_keys, start_benchmark, step_times, train_command


def run_tessera(build, text, ranks, steps, folder):
    out = tempfile.mkdtemp(dir=folder)
    # The learning rate's schedule and beta2 are the defaults.
    seconds = must(train_command(build, small_keys(text, steps, out), ranks)).seconds
    val = [r["val_loss"] for r in metrics(out) if "val_loss" in r][-1]
    return val, seconds, step_times(out, 5)


def run_nanogpt(folder, python, steps, out):
    command = [python, "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20",
               "--eval_interval=250", "--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4",
               "--n_embd=128", f"--max_iters={steps}", f"--lr_decay_iters={max(steps, 200)}", "--dropout=0.0", f"--out_dir={out}/nanogpt"]
    start = time.monotonic()
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - start
    if result.returncode != 0:
        sys.exit(result.stderr[-2000:])
    val = float(re.findall(r"val loss ([0-9.]+)", result.stdout)[-1])
    return val, seconds, [float(ms) for ms in re.findall(r"time ([0-9.]+)ms", result.stdout)][5:]


def main():
    a = start_benchmark(__doc__, rounds=1, steps=2000, ranks=[1, 2])
    a.add_argument("text")
    a.add_argument("--nanogpt", help="a checkout of nanoGPT")
    a.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters that run nanoGPT")
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {f"tessera, {n} rank{'s' if n > 1 else ''}":
                lambda n=n: run_tessera(o.build, o.text, n, o.steps, folder) for n in o.ranks}
        for python in o.python if o.nanogpt else []:
            version = subprocess.run([python, "-c", "import torch; print(torch.__version__.split('+')[0])"],
                                     capture_output=True, text=True, check=True).stdout.strip()
            name = f"nanoGPT, PyTorch {version}"
            runs[f"{name} ({python})" if name in runs else name] = lambda p=python: run_nanogpt(o.nanogpt, p, o.steps, folder)
        results = {name: [] for name in runs}
        for _ in range(o.rounds):
            for name, run in runs.items():
                results[name].append(run())
    print(f"{'':<28} {'val loss':>9} {'seconds':>8} {'ms/step':>8}   medians of {o.rounds} rounds of {o.steps} steps")
    for name, rows in results.items():
        print(f"{name:<28} {rows[-1][0]:>9.4f} {statistics.median(r[1] for r in rows):>8.1f} "
              f"{statistics.median(ms for r in rows for ms in r[2]):>8.2f}")


main()
