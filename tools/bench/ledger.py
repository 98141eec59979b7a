#!/usr/bin/env python3
"""Measures the cost per step of recording and comparing collectives.

  ledger.py BUILD_DIR [--ranks 2] [--steps 100]

Runs `tessera_collectives_bench ledger`, then trains nanoGPT's small CPU setting (4 layers, width 128, context 64, batch 12) on
random characters, and prints collectives per step x (record + compare) / median step. The comparison cannot be switched off, so
its code is timed separately.
"""
import json, os, random, re, statistics, tempfile

from common import must, run, small_keys, start_benchmark, step_times, train_command


def main():
    o = start_benchmark(__doc__, ranks=2, steps=100).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = must([f"{o.build}/tools/bench/tessera_collectives_bench", "ledger", o.ranks, f"{folder}/flight"]).out
        print(text)
        cost = {name: float(us) for name, us in re.findall(r"^(record|compare), us ([0-9.]+)", text, re.M)}
        data, out = f"{folder}/text", f"{folder}/run"
        with open(data, "w") as f:
            f.write("".join(random.Random(1).choices("abcdefgh \n", k=100_000)))
        must(train_command(o.build, small_keys(data, o.steps, out), o.ranks))
        step = statistics.median(step_times(out, 5))
        report = json.loads(run([f"{o.build}/bin/tessera", "run-report", out, "--json"]).out)
        calls = (report["ranks"][0]["last"]["sequence"] + 1) / o.steps
    micros = calls * (cost["record"] + cost["compare"])
    print(f"{calls:.1f} collectives a step, {micros:.1f} us of {step:.2f} ms (median): {micros / step / 10:.3f}%")


main()
