#!/usr/bin/env python3
"""Compares saving and loading checkpoints with dd processes that write and read the same number of bytes.

  checkpoint_io.py BUILD_DIR [--size 2GiB] [--width 1024] [--ranks 2] [--load-ranks RANKS 2*RANKS] [--threads 4] [--rounds 5]
                   [--train 124M|none] [--runs 2] [--every 10] [--saves 3] [--dir DIR] [--json FILE]

Each round runs these, in alternating order:
  save   One process per rank saves a checkpoint of --size (weights and both moments of a GPT-2) synchronously: free space,
         data with checksums, sync, index, rename. Compared with one dd per rank that writes the same number of bytes in blocks
         of 4 MiB and syncs (conv=fsync). Both read random bytes from memory.
  load   Ranks load that checkpoint, each its share into allocated memory, and verify all checksums. Compared with as many dd
         processes that read shares of the same files in blocks of 4 MiB. Before each, files are synced and dropped from the
         page cache (posix_fadvise).
Then --runs runs of `tessera train` save asynchronously (checkpoint.async=on) every --every steps. Prints the time that saves
stalled training (stall_ms) as a share of the save. Each step trains one short row per rank.

--dir: folder on the disk to measure, with room for four checkpoints; memory must hold two. "of dd" is the median ratio of the
rounds, with the smallest and the largest.
"""
import json, os, shutil, statistics, subprocess, sys, tempfile, time

from common import SIZES, VOCAB, drop_cache, gpt2_keys, must, parse_size, saves, start_benchmark, train_command, write_tokens

SEQ = 16


def parallel(scripts):
    """Runs shell scripts in parallel; returns seconds."""
    start = time.monotonic()
    processes = [subprocess.Popen(["sh", "-ec", script]) for script in scripts]
    if any(process.wait() != 0 for process in processes):
        sys.exit("dd failed")
    return time.monotonic() - start


def dd(source, target, skip, count, more=""):
    return f"dd if={source} of={target} bs=4M iflag=skip_bytes,count_bytes skip={skip} count={count} status=none {more}\n"


class Bench:
    def __init__(self, o, folder, source):
        self.o, self.folder, self.source = o, folder, source
        self.program = f"{o.build}/tools/bench/tessera_checkpoint_io"
        self.model = ["--size", int(o.size), "--width", o.width]
        self.checkpoint = f"{folder}/checkpoints/step-00000001"
        self.rank_bytes = self.call("plan", *self.model, "--world", o.ranks)["rank_bytes"]
        self.rows = {}  # name: [{seconds, bytes, ...}, ...] by round

    def call(self, *words):
        return json.loads(must([self.program, *words]).out)

    def shards(self):
        return sorted(f"{self.checkpoint}/{name}" for name in os.listdir(self.checkpoint) if name.endswith(".safetensors"))

    def write(self):
        os.sync()
        targets = [f"{self.folder}/dd-{rank}" for rank in range(self.o.ranks)]
        seconds = parallel([dd(self.source, *each, "conv=fsync") for each in zip(targets, [0] * self.o.ranks, self.rank_bytes)])
        for target in targets:
            os.remove(target)
        return {"seconds": seconds, "bytes": sum(self.rank_bytes)}

    def save(self):
        shutil.rmtree(f"{self.folder}/checkpoints", ignore_errors=True)
        os.sync()
        return self.call("save", self.folder, self.source, *self.model, "--world", self.o.ranks)

    def read(self, ranks):
        """One dd reader per rank; each reads as many bytes of the concatenated shards as its rank loads."""
        drop_cache(self.checkpoint)
        total, scripts, begin = sum(map(os.path.getsize, self.shards())), [""] * ranks, 0
        for shard in self.shards():
            end = begin + os.path.getsize(shard)
            for rank in range(ranks):
                low, high = max(begin, total * rank // ranks), min(end, total * (rank + 1) // ranks)
                if low < high:
                    scripts[rank] += dd(shard, "/dev/null", low - begin, high - low)
            begin = end
        return {"seconds": parallel(scripts), "bytes": total}

    def load(self, ranks):
        drop_cache(self.checkpoint)
        return self.call("load", self.checkpoint, *self.model, "--world", ranks, "--threads", self.o.threads)

    def turn(self, number, *measures):
        for name, measure in measures if number % 2 == 0 else reversed(measures):
            row = measure()
            self.rows.setdefault(name, []).append(row)
            print(f"  {name:<28} {row['seconds']:7.2f} s {row['bytes'] / row['seconds'] / 1e6:8.0f} MB/s", file=sys.stderr, flush=True)

    def round(self, number):
        o = self.o
        self.turn(number, (f"dd, {o.ranks} writers", self.write), (f"save, {o.ranks} ranks", self.save))
        for ranks in o.load_ranks:
            self.turn(number, (f"dd, {ranks} readers", lambda: self.read(ranks)), (f"load, {ranks} ranks", lambda: self.load(ranks)))

    def table(self):
        print("| | s | MB/s | of dd | read / needed |\n| --- | --- | --- | --- | --- |")
        plain = None
        for name, rows in self.rows.items():
            rates = [row["bytes"] / row["seconds"] / 1e6 for row in rows]
            seconds = statistics.median(row["seconds"] for row in rows)
            of_dd = read = ""
            if name.startswith("dd"):
                plain = rates
            else:
                ratios = [rate / base for rate, base in zip(rates, plain)]
                of_dd = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            if name.startswith("load"):
                read = f"{rows[0]['read_bytes'] / rows[0]['bytes']:.3f}"
            print(f"| {name} | {seconds:.2f} | {statistics.median(rates):.0f} | {of_dd} | {read} |")


def train(o, folder, tokens, steps):
    """Records of a run's saves except the last, which overlaps with no step."""
    out = f"{folder}/run"
    keys = gpt2_keys(o.train, SEQ, tokens, "cpu", o.ranks, steps, out)
    must(train_command(o.build, {**keys, "checkpoint.every": o.every, "checkpoint.keep": 1}, o.ranks))
    records = saves(out)
    shutil.rmtree(out)
    return [record for record in records if record["step"] < steps]


def main():
    a = start_benchmark(__doc__, width=1024, ranks=2, threads=4, rounds=5, runs=2, every=10, saves=3, dir=None, json=None)
    a.add_argument("--size", type=parse_size, default=2**31)
    a.add_argument("--load-ranks", type=int, nargs="+")
    a.add_argument("--train", choices=[*SIZES, "none"], default="124M")
    o = a.parse_args()
    o.load_ranks = o.load_ranks or [o.ranks, 2 * o.ranks]
    records = []
    with tempfile.TemporaryDirectory(dir=o.dir, prefix="checkpoint-io-") as folder, \
            tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
        bench = Bench(o, folder, source.name)
        for begin in range(0, max(bench.rank_bytes), 2**24):
            source.write(os.urandom(min(2**24, max(bench.rank_bytes) - begin)))
        source.flush()
        steps = o.every * o.saves + 1
        tokens = f"{folder}/tokens.bin"
        write_tokens(tokens, (steps + 1) * o.ranks * SEQ + 1, VOCAB)
        bench.save()  # warm-up, and input of the first round's loads
        for number in range(o.rounds):
            bench.round(number)
        shutil.rmtree(f"{folder}/checkpoints")
        for _ in range(o.runs if o.train != "none" else 0):
            records += train(o, folder, tokens, steps)
        bench.table()
    if records:
        median = statistics.median
        seconds, stall = median(row["seconds"] for row in records), median(row["stall_ms"] for row in records)
        share = median(row["stall_ms"] / 1e3 / row["seconds"] for row in records)
        print(f"\nA run of GPT-2 {o.train} on {o.ranks} ranks, {len(records)} background saves of "
              f"{records[0]['bytes'] / 1e6:.0f} MB: {seconds:.2f} s each, training stalled for {stall:.1f} ms: {share:.1%} of the save (medians).")
    if o.json:
        with open(o.json, "w") as file:
            json.dump({"options": vars(o), "cpus": os.cpu_count(), "rows": bench.rows, "train_saves": records}, file, indent=1)


if __name__ == "__main__":
    main()
