#!/usr/bin/env python3
"""Compares tessera consolidate with cp and with PyTorch's ways to merge shards; prints a table of medians.

  consolidate.py BUILD_DIR [--size 8GiB] [--world 4] [--rounds 3] [--memory 256MiB] [--cache cold|warm] [--dir DIR]
                 [--peers none|dcp|merge ...] [--python PYTHON]

Makes a checkpoint of --size, then runs in each round:
  cp        cp -r of the checkpoint's directory, without sync
  cp, sync  the same, with sync
  tessera   tessera consolidate to a Hugging Face directory: checksums verified, synced, renamed
and for the same weights:
  dcp       (--peers dcp) PyTorch's dcp_to_torch_save of a Distributed Checkpoint of as many ranks, not synced; and tessera
            consolidate of the same directory to plain safetensors
  merge     (--peers merge) like DeepSpeed's zero_to_fp32: torch.load of all ranks' flat partitions, torch.cat by parameter,
            torch.save; not synced

cold: before each run, syncs and drops the source from the page cache (posix_fadvise). warm: reads the source before each run.
Peers need a Python with torch (--python); without it, or without enough memory, they are skipped with a message. Peak memory
is the resident set of the process.

--dir: folder on the disk to measure, with room for the source, the target and one more copy per peer. All files are removed at
the end.
"""
import os, pathlib, shutil, statistics, subprocess, sys, tempfile

from common import drop_cache, files_under, must, parse_size, size_of, start_benchmark

TORCH_BYTES = 600 * 2**20  # memory of PyTorch itself
HERE = pathlib.Path(__file__).resolve().parent


def fill_cache(folder):
    os.sync()
    for name in files_under(folder):
        with open(name, "rb", buffering=0) as f:
            while f.read(2**22):
                pass


def available_memory():
    for line in open("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024


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
        print(f"  {name:<20} {result.seconds:7.2f} s {megabytes / result.seconds:8.0f} MB/s "
              f"{result.peak_rss_gib * 1024:6.0f} MiB", file=sys.stderr, flush=True)

    def median(self, name, field):
        return statistics.median(row[field] for row in self.rows[name])

    def table(self):
        print("| | s | MB/s | of cp | of cp, sync | peak memory, MiB |\n| --- | --- | --- | --- | --- | --- |")
        for name in self.rows:
            rate = self.median(name, 1)
            print(f"| {name} | {self.median(name, 0):.2f} | {rate:.0f} | {rate / self.median('cp', 1):.2f} | "
                  f"{rate / self.median('cp, sync', 1):.2f} | {self.median(name, 2):.0f} |")


def have_torch(python):
    return subprocess.run([python, "-c", "import torch.distributed.checkpoint.format_utils"], capture_output=True).returncode == 0


def main():
    a = start_benchmark(__doc__, world=4, width=2560, rounds=3, memory="256MiB", python="python3", dir=None)
    a.add_argument("--size", type=parse_size, default=2**33)
    a.add_argument("--cache", choices=["cold", "warm"], default="cold")
    a.add_argument("--peers", nargs="+", choices=["none", "dcp", "merge"], default=["dcp", "merge"])
    o = a.parse_args()
    peers = [peer for peer in o.peers if peer != "none"]
    if peers and not have_torch(o.python):
        print(f"{o.python} has no torch with dcp_to_torch_save: {' and '.join(peers)} left out", file=sys.stderr)
        peers = []
    for peer, times in (("dcp", 1.15), ("merge", 2.15)):
        needed = times * o.size + TORCH_BYTES
        if peer in peers and available_memory() < needed:
            print(f"{peer} needs {needed / 2**30:.1f} GiB of memory, {available_memory() / 2**30:.1f} GiB are available: left out",
                  file=sys.stderr)
            peers.remove(peer)

    tessera = f"{o.build}/bin/tessera"
    with tempfile.TemporaryDirectory(dir=o.dir, prefix="consolidate-") as folder:
        made = must([f"{o.build}/tools/bench/tessera_checkpoint_io", "make", f"{folder}/run", "--size", o.size, "--world", o.world,
                     "--width", o.width])
        print(made.out.strip(), file=sys.stderr)
        source = f"{folder}/run/checkpoints/step-00000001"
        consolidate = [tessera, "consolidate", "--memory", o.memory, "--max-shard-size", "1TB"]
        peer_files = [sys.executable if not peers else o.python, HERE / "consolidate_torch.py"]
        if peers:
            must(consolidate + [source, f"{folder}/whole"])
            for peer in peers:
                must(peer_files + [f"make-{peer}", f"{folder}/whole/model.safetensors", f"{folder}/{peer}", o.world])
            shutil.rmtree(f"{folder}/whole")
        bench = Bench(o, folder)
        for _ in range(o.rounds):
            bench.turn("cp", source, ["cp", "-r", source, f"{folder}/copy"], f"{folder}/copy")
            bench.turn("cp, sync", source, ["cp", "-r", source, f"{folder}/copy"], f"{folder}/copy", synced=True)
            bench.turn("tessera", source, consolidate + [source, f"{folder}/out"], f"{folder}/out")
            if "dcp" in peers:
                bench.turn("dcp_to_torch_save", f"{folder}/dcp", peer_files + ["dcp", f"{folder}/dcp", f"{folder}/out.pt"],
                           f"{folder}/out.pt")
                bench.turn("tessera, DCP", f"{folder}/dcp",
                           consolidate + ["--format", "safetensors", f"{folder}/dcp", f"{folder}/out"], f"{folder}/out")
            if "merge" in peers:
                bench.turn("merge in memory", f"{folder}/merge",
                           peer_files + ["merge", f"{folder}/merge", f"{folder}/out.pt"], f"{folder}/out.pt")
        bench.table()


if __name__ == "__main__":
    main()
