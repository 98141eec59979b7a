#!/usr/bin/env python3
"""Saving a training run's checkpoints against a plain parallel writer of as many bytes, taking turns, as a table of medians.

  checkpoint_save.py BUILD_DIR [--size 124M] [--ranks 2] [--rounds 3] [--every 10] [--saves 3] [--dir DIR]

In each round: dd, one process a rank, writes random bytes from memory with a sync at the end (its best of --saves); a run
saves between steps (checkpoint.async=off); another saves beside them, every --every steps, which should leave a save time to
end. Each save is timed from the end of its step to the commit: with checksums, syncs, index and renames. The stall is what
rank 0 did not train for it. Steps are of one short row a rank, so that little else happens while steps wait.

--dir is where files go: a folder on the disk to be measured, with room for three checkpoints.
"""
import argparse, os, shutil, statistics, subprocess, tempfile, time

from common import SIZES, VOCAB, end_on_sigterm, must, parameters, run, saves, step_times, write_tokens

SEQ = 16


def dd(folder, source, ranks):
    """Seconds that `ranks` processes take to write and sync a copy of `source` each."""
    start = time.monotonic()
    writers = [subprocess.Popen(["dd", f"if={source}", f"of={folder}/dd-{rank}", "bs=4M", "conv=fsync", "status=none"])
               for rank in range(ranks)]
    if any(writer.wait() != 0 for writer in writers):
        raise SystemExit("dd failed")
    seconds = time.monotonic() - start
    for rank in range(ranks):
        os.remove(f"{folder}/dd-{rank}")
    return seconds


def train(o, folder, tokens, steps, every, mode):
    """The records of a run's saves but the last, which training does not wait beside."""
    layers, heads, width = SIZES[o.size]
    out = f"{folder}/run-{mode}"
    command = [f"{o.build}/bin/tessera", "train", "--nproc", o.ranks, "--model.n_layer", layers, "--model.n_head", heads,
               "--model.n_embd", width, "--model.vocab_size", VOCAB, "--model.seq_len", SEQ, "--data.train", tokens,
               "--data.order", "sequential", "--train.device", "cpu", "--train.steps", steps, "--train.global_batch", o.ranks,
               "--train.eval_every", 0, "--optim.lr", "1e-4", "--checkpoint.every", every, "--checkpoint.keep", 1,
               "--checkpoint.async", mode, "--run.out", out]
    must(run(command), command)
    step_ms, records = step_times(out, 2), saves(out)
    shutil.rmtree(out)
    return [save for save in records if save["step"] < steps], step_ms


def main():
    end_on_sigterm()
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("build")
    a.add_argument("--size", choices=SIZES, default="124M")
    a.add_argument("--ranks", type=int, default=2)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--every", type=int, default=10)
    a.add_argument("--saves", type=int, default=3)
    a.add_argument("--dir")
    o = a.parse_args()
    total = 12 * parameters(o.size, positions=SEQ)
    plain, off, on, step_ms = [], [], [], []
    with tempfile.TemporaryDirectory(dir=o.dir) as folder, tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
        for _ in range(0, total // o.ranks, 2**24):
            source.write(os.urandom(2**24))
        source.truncate(total // o.ranks)
        source.flush()
        tokens = f"{folder}/tokens.bin"
        steps = o.every * o.saves + 1
        write_tokens(tokens, (steps + 1) * o.ranks * SEQ + 1, VOCAB)
        for _ in range(o.rounds):
            plain.append(min(dd(folder, source.name, o.ranks) for _ in range(o.saves)))
            off += train(o, folder, tokens, o.saves + 1, 1, "off")[0]
            records, times = train(o, folder, tokens, steps, o.every, "on")
            on += records
            step_ms += times
    median = statistics.median
    rate = total / 1e9 / median(plain)
    print(f"GPT-2 {o.size}, {o.ranks} ranks, {total / 1e9:.2f} GB a checkpoint; medians of {o.rounds} rounds, {o.saves} saves each")
    print(f"{'':28} {'seconds':>8} {'GB/s':>6} {'of dd':>6} {'stall ms':>9} {'of the save':>11}")
    print(f"{'dd, ' + str(o.ranks) + ' processes, fsync':28} {median(plain):8.2f} {rate:6.2f} {1:6.2f}")
    for name, records in (("between steps (async=off)", off), ("beside steps (async=on)", on)):
        seconds, stall = median(s["seconds"] for s in records), median(s["stall_ms"] for s in records)
        speed = median(s["gb_per_s"] for s in records)
        share = median(s["stall_ms"] / 1e3 / s["seconds"] for s in records)
        print(f"{name:28} {seconds:8.2f} {speed:6.2f} {speed / rate:6.2f} {stall:9.1f} {share:11.1%}")
    print(f"a step takes {median(step_ms):.0f} ms (median, while saves run)")


if __name__ == "__main__":
    main()
