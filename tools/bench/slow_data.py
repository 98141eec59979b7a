#!/usr/bin/env python3
"""Compares steps on a slow disk with steps on data in memory, within one run.

  slow_data.py BUILD_DIR [--mb-per-s 50] [--seek-ms 0] [--steps 3000]

BUILD_DIR needs the target tessera_slow_reads. Trains a GPT-2 of 2 layers (width 64, context 1024) on random tokens in shuffled order,
with one thread. Reads of the data are delayed as by the disk in every other second. Compares steps that, with the step before,
lie within a slow or a fast second. Prints the medians, the median ratio of a slow second to the mean of the fast ones before and
after it with its 95% interval (bootstrap), and how long the disk took per step.
"""
import collections, json, os, random, statistics, tempfile

from common import gpt2_keys, must, start_benchmark, train_command, write_tokens


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
    by_second, slow_steps = collections.defaultdict(list), 0
    for before, step in zip(steps[5:], steps[6:]):
        slow_steps += int(step["time"]) % 2
        start = before["time"] - before["step_ms"] / 1e3
        if int(start) == int(step["time"]):
            by_second[int(start)].append(step["step_ms"])
    fast, slow = ([ms for second, times in by_second.items() for ms in times if second % 2 == odd] for odd in (0, 1))
    mean = {second: statistics.fmean(times) for second, times in by_second.items()}
    ratios = [2 * mean[s] / (mean[s - 1] + mean[s + 1]) for s in mean if s % 2 == 1 and s - 1 in mean and s + 1 in mean]
    draws = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000))
    print(f"disk of {o.mb_per_s:g} MB/s with seeks of {o.seek_ms:g} ms: {reads:.0f} reads, {1e3 * slept / slow_steps:.2f} ms per step")
    print(f"step: {statistics.median(slow):.2f} ms on the disk ({len(slow)} steps), {statistics.median(fast):.2f} ms in memory ({len(fast)})")
    print(f"ratio: {statistics.median(ratios):.4f} [{draws[25]:.4f}, {draws[975]:.4f}], {len(ratios)} slow seconds")


main()
