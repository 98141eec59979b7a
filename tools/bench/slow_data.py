#!/usr/bin/env python3
"""Compares steps on a slow disk with steps on data in memory, within one run.

  slow_data.py BUILD_DIR [--mb-per-s 50] [--seek-ms 0] [--steps 3000]

BUILD_DIR needs the target tessera_slow_reads. Trains a GPT-2 of 2 layers (width 64, context 1024) on random tokens in shuffled order,
with one thread. Reads of the data are delayed as by the disk in every other second. Compares steps that, with the step before,
lie within a slow or a fast second. Prints the medians, their ratio with its 95% interval (bootstrap), and how long the disk took per
step.
"""
import json, os, random, statistics, tempfile

from common import gpt2_keys, must, start_benchmark, train_command, write_tokens


def ratio(slow, fast):
    return statistics.median(slow) / statistics.median(fast)


def main():
    parser = start_benchmark(__doc__, steps=3000)
    parser.add_argument("--mb-per-s", type=float, default=50)
    parser.add_argument("--seek-ms", type=float, default=0, help="added to each read of a row")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, out, log = f"{folder}/data.bin", f"{folder}/run", f"{folder}/log"
        write_tokens(data, 2_000_000, 256)
        keys = {**gpt2_keys("tiny", 1024, data, "cpu", 2, o.steps, out), "model.vocab_size": 256, "data.order": "shuffled", "train.threads": 1}
        os.environ.update(LD_PRELOAD=os.path.abspath(f"{o.build}/tools/bench/tessera_slow_reads.so"), SLOW_BYTES_PER_S=str(o.mb_per_s * 1e6),
                          SLOW_SEEK_MS=str(o.seek_ms), SLOW_LOG=log)
        must(train_command(o.build, keys))
        reads, slept = (float(word) for word in open(log).read().split())
        steps = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
    by_second, slow_steps = {0: [], 1: []}, 0
    for before, step in zip(steps[5:], steps[6:]):
        slow_steps += int(step["time"]) % 2
        start = before["time"] - before["step_ms"] / 1e3
        if int(start) == int(step["time"]):
            by_second[int(start) % 2].append(step["step_ms"])
    fast, slow = by_second[0], by_second[1]
    draws = sorted(ratio(random.choices(slow, k=len(slow)), random.choices(fast, k=len(fast))) for _ in range(1000))
    print(f"disk of {o.mb_per_s:g} MB/s with seeks of {o.seek_ms:g} ms: {reads:.0f} reads, {1e3 * slept / slow_steps:.2f} ms per step")
    print(f"step: {statistics.median(slow):.2f} ms on the disk ({len(slow)} steps), {statistics.median(fast):.2f} ms in memory ({len(fast)})")
    print(f"ratio: {ratio(slow, fast):.4f} [{draws[25]:.4f}, {draws[975]:.4f}]")


main()
