#!/usr/bin/env python3
"""Compares the times that `tessera plan --time` predicts with those of training steps on this CPU; prints a table.

  plan_time.py BUILD_DIR [--fit 4x64 1x512] [--check 2x128 2x256 1x1024] [--precision fp32] [--rounds 3] [--steps 3]

GPT-2, rows x tokens. Rates are fitted to profiles of the shapes of --fit. All shapes run in turns, so that a slow phase of the
machine affects all, and each round's profiles predict its other runs.
"""
import json, os, statistics, tempfile

from common import VOCAB, gpt2_keys, must, start_benchmark, step_times, train_command, write_tokens

WARMUP = 2  # the steps before the three that are profiled


def keys(o, shape, folder):
    batch, seq = map(int, shape.split("x"))
    tokens = f"{folder}/{shape}.bin"
    if not os.path.exists(tokens):
        write_tokens(tokens, (WARMUP + o.steps) * batch * seq + 1, VOCAB)
    return {**gpt2_keys(o.size, seq, tokens, "cpu", batch, WARMUP + o.steps, tempfile.mkdtemp(dir=folder)),
            "train.precision": o.precision, "train.threads": o.threads}


def main():
    o = start_benchmark(__doc__, fit=["4x64", "1x512"], check=["2x128", "2x256", "1x1024"], size="124M", precision="fp32", rounds=3,
                        steps=3, threads=2).parse_args()
    measured, predicted = ({shape: [] for shape in o.fit + o.check} for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(o.rounds):
            profiles = []
            for shape in o.fit + o.check:
                values = keys(o, shape, folder)
                if shape in o.fit:
                    profiles.append(f"{folder}/{shape}.json")
                    values["train.profile"] = profiles[-1]
                must(train_command(o.build, values))
                measured[shape].append(statistics.median(step_times(values["run.out"], WARMUP)))
            for shape in o.fit + o.check:
                options = [f"--{key}={value}" for key, value in keys(o, shape, folder).items()]
                plan = must([f"{o.build}/bin/tessera", "plan", "--json", *options, *(f"--time={p}" for p in profiles)])
                predicted[shape].append(json.loads(plan.out)["time"]["ms_per_step"])
    print("| rows x tokens | predicted ms | measured ms | predicted over measured, each round | fitted to it |")
    print("| --- | --- | --- | --- | --- |")
    for shape in o.fit + o.check:
        ratios = ", ".join(f"{p / m:.2f}" for p, m in zip(predicted[shape], measured[shape]))
        print(f"| {shape} | {statistics.median(predicted[shape]):.0f} | {statistics.median(measured[shape]):.0f} | {ratios} | "
              f"{'yes' if shape in o.fit else 'no'} |")


main()
