#!/usr/bin/env python3
"""Compares tessera consolidate with cp and with the programs that other frameworks have for it; prints a table of medians.

  consolidate.py BUILD_DIR [--size 8GiB] [--world 4] [--rounds 3] [--memory 256MiB] [--cache cold|warm] [--dir DIR]
                 [--sources tessera|dcp|hf|verl|deepspeed ...] [--python PYTHON]

Makes a checkpoint with float32 weights of --size, and each of --sources from the same weights. Then runs in each round, for each source:
  cp          cp -r of the source, without sync
  cp, sync    (of tessera's own checkpoint) the same, with sync
  tessera     tessera consolidate to a Hugging Face directory: checksums verified, synced, renamed
  and, not synced, what others have:
    dcp       dcp_to_torch_save, of a PyTorch Distributed Checkpoint
    hf        torch's consolidate_safetensors_files with 1 and 8 threads, of HuggingFaceStorageWriter's shards
    verl      python -m verl.model_merger, of a file per rank
    deepspeed zero_to_fp32, of ZeRO-3 (whose source has AdamW's moments, too)

cold: before each run, syncs and drops the source from the page cache (posix_fadvise). warm: reads the source before each run.
Others need a Python with torch, transformers, verl and deepspeed (--python). Peak memory is the resident set of the process.

--dir: folder on the disk to measure, with room for the sources, one more copy of the weights, and one output. All files are removed at the end.
"""
import os, pathlib, shutil, statistics, subprocess, sys, tempfile

from common import drop_cache, files_under, must, parse_size, size_of, start_benchmark

PEERS = {"tessera": [], "dcp": ["dcp"], "hf": ["hf1", "hf8"], "verl": ["verl"], "deepspeed": ["deepspeed"]}
HERE = pathlib.Path(__file__).resolve().parent


def fill_cache(folder):
    os.sync()
    for name in files_under(folder):
        with open(name, "rb", buffering=0) as f:
            while f.read(2**22):
                pass


class Bench:
    def __init__(self, o, folder):
        self.o, self.folder, self.rows = o, folder, {}

    def turn(self, name, source, command, target, synced=False):
        """Runs a command that makes `target` from `source`; records time and memory."""
        if self.o.cache == "cold":
            drop_cache(source)
        else:
            fill_cache(source)
        result = must(["sh", "-c", '"$@" && sync -f "$0"', self.folder, *command] if synced else command)
        megabytes = size_of(target) / 1e6
        self.rows.setdefault(name, []).append((result.seconds, megabytes / result.seconds, result.peak_rss_gib * 1024))
        shutil.rmtree(target) if os.path.isdir(target) else os.remove(target)
        print(f"  {' '.join(name):<20} {result.seconds:7.2f} s {megabytes / result.seconds:8.0f} MB/s "
              f"{result.peak_rss_gib * 1024:6.0f} MiB", file=sys.stderr, flush=True)

    def median(self, name, field):
        return statistics.median(row[field] for row in self.rows[name])

    def table(self):
        print("| source | | s | MB/s | of cp | of tessera's time | peak memory, MiB |\n| --- | --- | --- | --- | --- | --- | --- |")
        for source, name in self.rows:
            seconds = self.median((source, name), 0)
            print(f"| {source} | {name} | {seconds:.2f} | {self.median((source, name), 1):.0f} | {self.median((source, name), 1) / self.median((source, 'cp'), 1):.2f} | "
                  f"{seconds / self.median((source, 'tessera'), 0):.2f} | {self.median((source, name), 2):.0f} |")


def main():
    a = start_benchmark(__doc__, world=4, width=2560, rounds=3, memory="256MiB", python="python3", dir=None)
    a.add_argument("--size", type=parse_size, default=2**33)
    a.add_argument("--cache", choices=["cold", "warm"], default="cold")
    a.add_argument("--sources", nargs="+", choices=list(PEERS), default=["tessera", "dcp"])
    o = a.parse_args()
    with tempfile.TemporaryDirectory(dir=o.dir, prefix="consolidate-") as folder:
        made = must([f"{o.build}/tools/bench/tessera_checkpoint_io", "make", f"{folder}/run", "--size", o.size, "--world", o.world,
                     "--width", o.width])
        print(made.out.strip(), file=sys.stderr)
        own, whole, out = f"{folder}/run/checkpoints/step-00000001", f"{folder}/whole", f"{folder}/out"
        consolidate = [f"{o.build}/bin/tessera", "consolidate", "--memory", o.memory, "--max-shard-size", "1TB"]
        must(consolidate + [own, whole])
        if "tessera" not in o.sources:
            shutil.rmtree(f"{folder}/run")
        peer = [o.python, HERE / "consolidate_torch.py"]
        paths = {name: own if name == "tessera" else f"{folder}/{name}" for name in o.sources}
        for name, path in paths.items():
            if name != "tessera":
                must(peer + ["make", name, whole, path, o.world])
        shutil.rmtree(whole)
        bench = Bench(o, folder)
        for _ in range(o.rounds):
            for name, path in paths.items():
                bench.turn((name, "cp"), path, ["cp", "-r", path, out], out)
                if name == "tessera":
                    bench.turn((name, "cp, sync"), path, ["cp", "-r", path, out], out, synced=True)
                bench.turn((name, "tessera"), path, consolidate + [path, out], out)
                for layout in PEERS[name]:
                    bench.turn((name, layout), path, peer + ["merge", layout, path, out], out)
        bench.table()


if __name__ == "__main__":
    main()
