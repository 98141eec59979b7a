#!/usr/bin/env python3
"""Flips random bits, one at a time, in the files of a small checkpoint of each format, and looks at what tessera does with it.

    python tools/check_flips.py BUILD_DIR [--flips 1000] [--seed 1] [--jobs 2] [--formats TEXT ...]

Needs no packages: checkpoints of other programs are the fixtures of the tests, which their own libraries wrote. After each flip it
runs `tessera checkpoint verify` and `tessera consolidate`, and counts:
- noticed: exit code 1, 2 or 3 of `verify`, or of `consolidate`, which then writes nothing;
- harmless: the output has the same bits, as for padding;
- silent: exit code 0, and other bits; or a crash, or more than 20 seconds. These must be 0.
Files without checksums are flipped in sealed checkpoints alone. The model's config.json is given by --config or --like where the
format has none, so that names and shapes are known. Prints a table in Markdown; exit code 1 if a flip is silent.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import json
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FORMATS = {}  # name -> function(tessera, folder) that returns the checkpoint below the folder, and words for consolidate
EXPECTED = "expected.safetensors.golden"


def form(name):
    def add(function):
        FORMATS[name] = function
        return function
    return add


def run(tessera, *words):
    done = subprocess.run([str(tessera), *map(str, words)], capture_output=True, text=True, timeout=20)
    return done.returncode, done.stderr


def must(tessera, *words):
    code, error = run(tessera, *words)
    assert code == 0, f"{words}: {error}"


def fixture(name, folder):
    copy = folder / "source"
    shutil.copytree(ROOT / "tests/io" / name, copy, ignore=shutil.ignore_patterns(EXPECTED))
    return copy


def known(name):
    """A checkpoint with a config.json, which is moved out of it."""
    def make(tessera, folder):
        source = fixture(name, folder)
        config = next(source.rglob("config.json"))
        shutil.move(config, folder / "config.json")
        return source, ["--config", folder / "config.json"]
    return make


def like(name, file=None, more=()):
    """A checkpoint of a model that tessera does not know: its names and shapes are given."""
    def make(tessera, folder):
        source = fixture(name, folder)
        source = source / file if file else source
        must(tessera, "consolidate", source, folder / "like", "--format", "safetensors", *more)
        (folder / "like/config.json").write_text('{"model_type": "other"}')
        return source, ["--like", folder / "like", *more]
    return make


@form("tessera")
def _(tessera, folder):
    (folder / "tokens.bin").write_bytes(struct.pack("<257H", *[i * 7 % 17 for i in range(257)]))
    keys = {"model.vocab_size": 17, "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 8, "model.seq_len": 8, "train.steps": 2,
            "train.global_batch": 2, "train.eval_every": 0, "train.device": "cpu", "checkpoint.every": 2,
            "data.train": folder / "tokens.bin", "run.out": folder / "run"}
    must(tessera, "train", "--nproc", 2, *[word for key, value in keys.items() for word in (f"--{key}", value)])
    return next((folder / "run/checkpoints").glob("step-*")), []


FORMATS["PyTorch DCP (FSDP2)"] = known("dcp/fixtures/fsdp-gpt2")
FORMATS["PyTorch DCP, compressed by ZStandard"] = known("dcp/fixtures/zstd")
FORMATS["PyTorch DCP (torchtitan, FSDP2 x TP)"] = like("dcp/fixtures/torchtitan")
FORMATS["accelerate's folder (DCP)"] = like("dcp/fixtures/accelerate")
FORMATS["Lightning FSDP (DCP)"] = like("dcp/fixtures/lightning")
FORMATS["Megatron-core (torch_dist)"] = known("megatron/fixtures/llama")
FORMATS["FSDP2 rank files"] = like("torch/fixtures/fsdp2", more=("--exclude", "count"))
FORMATS["FSDP1 rank files (accelerate, .bin)"] = like("torch/fixtures/fsdp1", more=("--exclude", "count"))
FORMATS["Lightning .ckpt"] = like("torch/fixtures/lightning", "last.ckpt", ("--exclude", "*count"))
FORMATS["DeepSpeed ZeRO-2"] = like("deepspeed/fixtures/zero2", more=("--exclude", "steps", "--exclude", "mask"))
FORMATS["DeepSpeed ZeRO-3"] = known("deepspeed/fixtures/zero3-gpt2")


def written(form):
    def make(tessera, folder):
        source, config = known("dcp/fixtures/fsdp-gpt2")(tessera, folder / "made")
        must(tessera, "consolidate", source, folder / "source", "--format", form, *config)
        return folder / "source"
    return make


def unsealed(form):
    def make(tessera, folder):
        source = written(form)(tessera, folder)
        shutil.move(source / "config.json", folder / "config.json")
        return source, ["--config", folder / "config.json"]
    return make


FORMATS["pytorch_model.bin (written by tessera)"] = unsealed("bin")
FORMATS["PyTorch DCP (written by tessera)"] = unsealed("dcp")


def hugging_face(tessera, folder):
    return written("hf")(tessera, folder), []


def gguf(tessera, folder):
    return written("gguf")(tessera, folder) / "model.gguf", ["--config", folder / "made/config.json"]


def unknown(name):
    """A checkpoint whose names are unknown: its seal protects them."""
    return lambda tessera, folder: (fixture(name, folder), ["--format", "safetensors"])


def sealed(make):
    def seal(tessera, folder):
        source, words = make(tessera, folder)
        must(tessera, "checkpoint", "seal", source)
        return source, words
    return seal


FORMATS["Hugging Face safetensors, sealed"] = sealed(hugging_face)
FORMATS["GGUF, sealed"] = sealed(gguf)
FORMATS["DCP as safetensors, sealed"] = sealed(unknown("dcp/fixtures/dcp-safetensors"))
FORMATS["PyTorch DCP, sealed"] = sealed(unknown("dcp/fixtures/mixed"))


def digest(folder):
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


class Checkpoint:
    """A checkpoint that one process flips bits of."""

    def __init__(self, tessera, name, folder):
        self.tessera, self.out = tessera, folder / "out"
        (folder / "made").mkdir(parents=True)
        self.source, self.words = FORMATS[name](tessera, folder)
        place = self.source if self.source.is_dir() else self.source.parent
        self.files = sorted(p for p in place.rglob("*") if p.is_file() and p.stat().st_size > 0)
        if not self.source.is_dir():
            self.files = [p for p in self.files if p.name.startswith(self.source.name)]  # and its seal
        code, self.expected, error = self.consolidate()
        assert code == 0, f"{name}: {error}"
        assert self.consolidate()[1] == self.expected, f"{name}: two exports differ"
        code, error = run(tessera, "checkpoint", "verify", self.source)
        assert code == 0, f"{name}: {error}"

    def consolidate(self):
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.rmtree(self.out.with_name("out.tmp"), ignore_errors=True)
        code, error = run(self.tessera, "consolidate", self.source, self.out, *self.words)
        return code, digest(self.out) if self.out.exists() else {}, error

    def flip(self, seed):
        """What came of a flip, and where it was."""
        pick = random.Random(seed)
        file = pick.choices(self.files, [p.stat().st_size for p in self.files])[0]
        at, bit = pick.randrange(file.stat().st_size), pick.randrange(8)
        old = file.read_bytes()
        file.write_bytes(old[:at] + bytes([old[at] ^ 1 << bit]) + old[at + 1:])
        try:
            where = f"{file.name}, byte {at}, bit {bit}"
            verified, _ = run(self.tessera, "checkpoint", "verify", self.source)
            code, output, _ = self.consolidate()
        except subprocess.TimeoutExpired:
            return "silent", where + ": more than 20 seconds"
        finally:
            file.write_bytes(old)
        if not {verified, code} <= {0, 1, 2, 3}:
            return "silent", f"{where}: exit codes {verified} and {code}"
        if code == 0 and output != self.expected:
            changed = sorted(k for k in output.keys() | self.expected.keys() if output.get(k) != self.expected.get(k))
            return "silent", f"{where}: {', '.join(changed)} differ; verify ended with {verified}"
        if code and output:
            return "silent", f"{where}: exit code {code}, but an output"
        return {(True, True): "by both", (True, False): "by verify alone", (False, True): "by consolidate alone",
                (False, False): "harmless"}[verified != 0, code != 0], where


def work(tessera, name, folder, seeds):
    checkpoint = Checkpoint(tessera, name, folder)
    return [checkpoint.flip(seed) for seed in seeds]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--flips", type=int, default=1000, help="of each format")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--formats", nargs="+", help="only those whose name has one of these texts")
    o = parser.parse_args()
    tessera = (o.build / "bin/tessera").resolve()
    kinds = ("by both", "by verify alone", "by consolidate alone", "harmless", "silent")
    print("| format | flips | noticed by both | by verify alone | by consolidate alone | harmless | silent |\n|" + " --- |" * 7)
    failed = []
    memory = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="check-flips-", dir=memory) as root, concurrent.futures.ProcessPoolExecutor(o.jobs) as pool:
        for number, name in enumerate(FORMATS):
            if o.formats and not any(text in name for text in o.formats):
                continue
            parts = [pool.submit(work, tessera, name, pathlib.Path(root, f"{number}-{job}"),
                                 [f"{o.seed}/{name}/{i}" for i in range(job, o.flips, o.jobs)]) for job in range(o.jobs)]
            found = [each for part in parts for each in part.result()]
            counts = collections.Counter(kind for kind, _ in found)
            print(f"| {name} | {len(found)} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |", flush=True)
            failed += [f"{name}: {where}" for kind, where in found if kind == "silent"]
    print(*failed, sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
