#!/usr/bin/env python3
"""Compares GPT-2 training steps of tessera and PyTorch on one GPU, alternating.

  gpt2_gpu.py BUILD_DIR [--sizes 124M 350M 1558M] [--rounds 2] [--steps 20] [--seconds 480] [--json FILE] [--no-torch]

Both run the same shapes (T=1024, random weights and tokens, forward, backward, clipping, AdamW). tessera is the complete trainer
with precision bf16 (bf16 compute, float32 weights); a step includes reading the batch and copying it to the GPU, but no logging.
PyTorch (gpt2_torch.py) is compiled, with fused AdamW, once with autocast (float32 weights) and once all in bf16, with tokens on
the GPU. Both compute a vocabulary padded to 50304: PyTorch's model has as many weights, tessera pads by itself. FLOPs count 50257 for
both.
Order: (1) tessera and PyTorch with float32 weights, then both all in bf16, each pair alternating at a micro-batch that both fit;
(2) tessera with gradients of attention that do not repeat to the bit, as PyTorch's do not, with products that it tunes in the first
step (which the former does, too), with its own attention instead of cuDNN's, and with GELU as a separate kernel; (3) each kernel's
time in a profiled run, beside that of tessera plan --time h100; (4) each at its own largest micro-batch. Of (1), sizes above 350M run
after the others, one round with float32 weights. Sizes of which not even one sequence fits are left out with a message.
ms: median of all timed steps after warm-up; IQR and worst show jitter. peak: driver's peak of memory in use above the start;
booked: peak of tessera's ledger, or of PyTorch's allocator.
MFU: (6 N + 6 L C T) flops per token over the data sheet's dense bf16 peak, known for A100, H100 and H200.
Measurements beyond --seconds are left out with a message. Failures, and --no-torch, don't stop the rest.
"""
import json, os, pathlib, statistics, subprocess, sys, tempfile, time

from common import SIZES, VOCAB, flops_per_token, gpt2_keys, metrics, run, start_benchmark, step_times, train_command, write_tokens

HERE = pathlib.Path(__file__).resolve().parent
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0}  # TFLOP/s, dense bf16
# Micro-batches to try, in descending order, and where to start on a GPU of 80 GiB.
BATCHES = [384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]
FIRST = {"tiny": (2, 2), "124M": (192, 96), "350M": (96, 48), "774M": (48, 24), "1558M": (16, 12)}  # tessera's, PyTorch's
SAME = {"tiny": 2, "124M": 64, "350M": 32, "774M": 16, "1558M": 8}  # of both, on 80 GiB
PADDED_VOCAB = 50304
RUN_SECONDS = 240  # limit of one program
FIRST_RUN_SECONDS = {"tessera": 10, "torch": 90}  # expected time of the first run; torch compiles
# Mode: (program, precision).
MODES = {"tessera bf16": ("tessera", "bf16"), "torch bf16": ("torch", "bf16"), "tessera, bf16 weights": ("tessera", "bf16-true"),
         "torch bf16-true": ("torch", "bf16-true")}
PAIRS = [("tessera bf16", "torch bf16"), ("tessera, bf16 weights", "torch bf16-true")]
# tessera with library features switched off or on: (environment, plugin that must exist).
VARIANTS = {"tessera, not deterministic": ({"TESSERA_TRAIN_DETERMINISTIC": "off"}, "libtessera_cudnn.so"),
            "tessera, tuned products": ({"TESSERA_TRAIN_TUNED_PRODUCTS": "{folder}/tuned.json"}, "libtessera_cuda.so"),
            "tessera, own attention": ({"TESSERA_ATTENTION": "own"}, "libtessera_cudnn.so"),
            "tessera, GELU after products": ({"TESSERA_EPILOGUES": "0"}, "libtessera_cuda.so")}
LAST = ["774M", "1558M"]  # sizes that run after the others, in less detail


class OutOfTime(Exception):
    pass


class Failed(Exception):
    """A program failed."""

    def __init__(self, what, ran):
        ended = "was killed at its deadline" if ran.code is None else f"ended with {ran.code}"
        super().__init__(f"{what} {ended}: {ran.err[-600:].strip()}")


class Bench:
    def __init__(self, options, folder):
        self.o, self.folder, self.end = options, folder, time.monotonic() + options.seconds
        self.results, self.notes, self.longest, self.failed, self.kernels = [], [], {}, False, []

    def left(self, kind):
        """Time limit of one more program of this kind. @throws OutOfTime if the slowest so far would not fit."""
        left = self.end - time.monotonic()
        program = kind.split()[0]
        first = FIRST_RUN_SECONDS[program] if program == "tessera" or self.o.compile else 20
        if left < 1.2 * self.longest.get(kind, first):
            raise OutOfTime(f"no time was left for {kind}")
        return min(left, RUN_SECONDS)

    def say(self, text):
        if text not in self.notes:
            print(text, flush=True)
            self.notes.append(text)

    def start(self, kind, command, variables=None):
        env = dict(os.environ, **(variables or {}))
        if kind.startswith("tessera") and self.o.library_path:
            env["LD_LIBRARY_PATH"] = self.o.library_path
        deadline = self.left(kind)
        ran = run(command, deadline, env=env, gpu=True)
        self.longest[kind] = max(self.longest.get(kind, 0), ran.seconds)
        if ran.code is None and deadline < RUN_SECONDS:
            raise OutOfTime(f"{kind} had only {deadline:.0f} s")
        return ran

    def keys(self, size, batch, steps):
        """Keys of a run of `steps` steps and the warm-up."""
        warmup = self.o.warmup
        tokens = f"{self.folder}/tokens.bin"
        count = (warmup + steps) * batch * self.o.seq + 1
        if not os.path.exists(tokens) or os.path.getsize(tokens) < 2 * count + 1024:
            write_tokens(tokens, count, VOCAB)
        out = tempfile.mkdtemp(dir=self.folder)
        return gpt2_keys(size, self.o.seq, tokens, "cuda", batch, warmup + steps, out)

    def tessera(self, size, batch, steps, variables=None):
        """One run; None if out of memory."""
        keys = self.keys(size, batch, steps)
        ran = self.start(f"tessera {size}", train_command(self.o.build, keys), {"TESSERA_TRAIN_PRECISION": "bf16", **(variables or {})})
        if ran.code == 5 or (ran.code not in (0, None) and no_memory(ran.err)):
            return None
        if ran.code != 0:
            raise Failed(f"tessera {size} at B={batch}", ran)
        for line in ran.err.splitlines():
            if any(word in line for word in ("attention",)):  # notes on kernels in use
                self.say(f"tessera {size}: {line.strip()}")
        out = keys["run.out"]
        last = [row for row in metrics(out) if "step_ms" in row][-1]
        return dict(batch=batch, steps_ms=step_times(out, self.o.warmup), peak_gib=ran.peak_gpu_gib,
                    booked_gib=last["memory_bytes"] / 2**30, last_loss=last["loss"], seconds=ran.seconds)

    def profile(self, size, batch):
        """Time of each kernel in a step, and what the plan says of it."""
        keys = {**self.keys(size, batch, 6), "train.precision": "bf16"}
        profile = f"{self.folder}/profile.json"
        ran = self.start(f"tessera {size}", train_command(self.o.build, {**keys, "train.profile": profile}))
        plan = self.start(f"tessera plan {size}", [f"{self.o.build}/bin/tessera", "plan", "--json", "--time", "h100",
                                                   *(f"--{k}={v}" for k, v in keys.items())])
        for what, program in (("its profile", ran), ("its plan", plan)):
            if program.code != 0:
                raise Failed(f"tessera {size}, {what}", program)
        planned = json.loads(plan.out)["time"]["kernels"]
        rows = {}
        for event in json.load(open(profile))["traceEvents"]:
            if "step" in event.get("args", {}):
                row = planned.get(event["name"], {"calls": 0, "ms": 0.0})
                rows.setdefault(event["name"], dict(size=size, batch=batch, kernel=event["name"], calls=row["calls"],
                                                    planned_ms=row["ms"], ms=0.0))["ms"] += event["dur"] / 3e3  # three steps
        self.kernels += sorted(rows.values(), key=lambda row: -row["ms"])
        self.save()

    def torch(self, size, batches, steps, precision):
        """One run at the first of `batches` that fits; None if none fits."""
        mode = ["--compile"] if self.o.compile else []
        ran = self.start(f"torch {size} {precision}",
                         [self.o.python, HERE / "gpt2_torch.py", "--size", size, "--batch", *batches, "--seq", self.o.seq, "--precision",
                          precision, "--warmup", self.o.warmup, "--steps", steps, "--vocab", PADDED_VOCAB, *mode])
        if ran.code != 0:
            if ran.code is not None and no_memory(ran.err):
                return None
            raise Failed(f"PyTorch {size} {precision}", ran)
        result = json.loads(ran.out.splitlines()[-1])
        return dict(batch=result["batch"], steps_ms=result["steps_ms"], peak_gib=ran.peak_gpu_gib,
                    booked_gib=result["peak_memory_gib"], last_loss=result["loss"], seconds=ran.seconds, peer=result["peer"],
                    device=result["device"])

    def run(self, mode, size, batches, steps):
        """One run of `mode` at the first of `batches` that fits; None if none fits."""
        program, precision = MODES[mode]
        if program == "torch":
            return self.torch(size, batches, steps, precision)
        for batch in batches:
            result = self.tessera(size, batch, steps, {"TESSERA_TRAIN_PRECISION": precision})
            if result is not None:
                return result
        return None

    def row(self, mode, size, rows, what):
        steps = sorted(ms for r in rows for ms in r["steps_ms"])
        quartiles = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
        ms, batch = statistics.median(steps), rows[0]["batch"]
        tokens_per_s = batch * self.o.seq / ms * 1e3
        peaks = [r["peak_gib"] for r in rows if r["peak_gib"] is not None]
        peak_flops = next((peak for name, peak in PEAKS.items() if name in self.o.gpu), None)
        flops = tokens_per_s * flops_per_token(size, self.o.seq) / 1e12
        row = dict(size=size, what=what, mode=mode, batch=batch, seq=self.o.seq, steps=len(steps), ms=round(ms, 3),
                   tokens_per_s=round(tokens_per_s), tflop_s=round(flops, 2), mfu=round(flops / peak_flops, 4) if peak_flops else None,
                   iqr_of_median=round((quartiles[2] - quartiles[0]) / ms, 4), worst_of_median=round(steps[-1] / ms, 4),
                   peak_gib=round(max(peaks), 3) if peaks else None, booked_gib=round(max(r["booked_gib"] for r in rows), 3),
                   peer=rows[0].get("peer"))
        self.results.append(row)
        mfu, peak = (f"{100 * row['mfu']:.1f}%" if row["mfu"] else "-"), (f"{row['peak_gib']:.2f}" if peaks else "-")
        print(f"{size:<6} {mode:<22} {batch:>4} {row['ms']:>9.2f} {row['tokens_per_s']:>10} {mfu:>6} {100 * row['iqr_of_median']:>5.1f}% "
              f"{row['worst_of_median']:>6.2f}x {peak:>8} {row['booked_gib']:>8.2f}  {what}", flush=True)
        self.save()

    def save(self):
        if not self.o.json:
            return
        same = {(r["size"], r["mode"]): r for r in self.results if r["what"] == "same micro-batch"}
        ratios = []
        for size in self.o.sizes:
            for mode, over in PAIRS:
                mine, peer = same.get((size, mode)), same.get((size, over))
                if mine is None or peer is None:
                    continue
                memory = [r["peak_gib"] for r in (mine, peer)]
                ratios.append(dict(size=size, batch=mine["batch"], mode=mode, over=over, speed=round(peer["ms"] / mine["ms"], 3),
                                   memory=round(memory[0] / memory[1], 3) if all(memory) else None))
        with open(self.o.json, "w") as f:
            json.dump(dict(gpu=self.o.gpu, compiled=self.o.compile, results=self.results, ratios=ratios, kernels=self.kernels, notes=self.notes), f,
                      indent=1)

    def tried(self, what, attempt):
        """Result of `attempt`; None, with a message, if it fails or runs out of time."""
        try:
            return attempt()
        except Failed as failure:
            self.failed = True
            self.say(str(failure))
        except OutOfTime as reason:
            self.say(f"{what}: cut short, {reason}")
        return None

    def measured(self, mode, size, batches, steps):
        """run(); None, with a message, if none fits, it fails or runs out of time."""
        def attempt():
            result = self.run(mode, size, batches, steps)
            if result is None:
                self.say(f"{mode} {size}: not even B={batches[-1]} fits")
            return result
        return self.tried(f"{mode} {size}", attempt)

    def fit(self, mode, size):
        """A short run at the first micro-batch that fits, starting at FIRST."""
        return self.measured(mode, size, BATCHES[first(size, mode, self.o.gpu_gib):], 3)

    def rounds(self, modes, size, batch):
        """Measures modes at one micro-batch, alternating; drops a mode that fails. False, without a row, if one does not fit."""
        rows, turns = {mode: [] for mode in modes}, list(modes)
        try:
            for _ in range(1 if size in LAST else self.o.rounds):
                for mode in list(turns):
                    try:
                        result = self.run(mode, size, [batch], self.o.steps)
                    except (Failed, OutOfTime) as failure:
                        self.failed |= isinstance(failure, Failed)
                        self.say(f"{mode} {size}: {failure}")
                        turns.remove(mode)
                        continue
                    if result is None:
                        rows = {mode: [] for mode in modes}
                        return False
                    rows[mode].append(result)
        finally:  # also on SIGTERM
            for mode in modes:
                if rows[mode]:
                    self.row(mode, size, rows[mode], "same micro-batch")
        return True

    def largest(self, mode, size, fits, same):
        """Measures at the largest micro-batch that fits (at least `fits`) if it is larger than `same`."""
        index = BATCHES.index(fits)
        if self.o.climb and index <= first(size, mode, self.o.gpu_gib):  # larger ones were not tried yet
            while index > 0:
                batch = BATCHES[index - 1]
                if self.tried(f"{mode} {size}, B={batch}", lambda: self.run(mode, size, [batch], 3)) is None:
                    break
                index -= 1
        if BATCHES[index] > same:
            if (result := self.measured(mode, size, [BATCHES[index]], self.o.steps)) is not None:
                self.row(mode, size, [result], "largest that fits")

    def compare(self, sizes):
        """Makes all measurements of some sizes, the large ones last."""
        same = {}
        for size in sorted(sizes, key=LAST.__contains__):
            for pair in PAIRS[:1] if size in LAST else PAIRS:
                modes = [mode for mode in pair if self.o.torch or MODES[mode][0] == "tessera"]
                most = same.get(size, max(1, SAME[size] * self.o.gpu_gib / 79))
                batch = next((b for b in BATCHES if b <= most and self.rounds(modes, size, b)), None)
                if batch is None:
                    self.say(f"{size}: not one sequence fits {' and '.join(modes)}")
                    break
                same.setdefault(size, batch)
        for size, batch in same.items():
            for name, (variables, plugin) in VARIANTS.items():
                if not os.path.exists(f"{self.o.build}/bin/{plugin}"):
                    continue
                variables = {key: value.format(folder=self.folder) for key, value in variables.items()}
                result = self.tried(f"{name} {size}", lambda: self.tessera(size, batch, self.o.steps, variables))
                if result is not None:
                    self.row(name, size, [result], "same micro-batch")
        for size, batch in same.items():
            self.tried(f"kernels of {size}", lambda: self.profile(size, batch))
        for size, batch in same.items():
            for mode, (program, _) in MODES.items():
                if (self.o.torch or program == "tessera") and (result := self.fit(mode, size)) is not None:
                    self.largest(mode, size, result["batch"], batch)


def first(size, mode, gpu_gib):
    """Index in BATCHES at which the search starts."""
    most = max(1, FIRST[size][MODES[mode][0] == "torch"] * round(gpu_gib) / 80)
    return next(i for i, batch in enumerate(BATCHES) if batch <= most)


def no_memory(text):
    return "out of memory" in text.lower() or "ALLOC_FAILED" in text


def gpu():
    """Name and GiB of GPU 0."""
    try:
        line = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"],
                              capture_output=True, text=True, check=True, timeout=30).stdout.strip()
        name, mib = line.rsplit(",", 1)
        return name.strip(), float(mib) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown", 80.0


def main():
    a = start_benchmark(__doc__, seq=1024, rounds=2, steps=20, warmup=5)
    a.add_argument("--sizes", nargs="+", default=["124M", "350M", "1558M"], choices=SIZES)
    a.add_argument("--seconds", type=float, default=480, help="time limit of all measurements")
    a.add_argument("--json", help="write results to this file")
    a.add_argument("--library-path", help="LD_LIBRARY_PATH of tessera")
    a.add_argument("--python", default=sys.executable, help="interpreter that runs PyTorch")
    a.add_argument("--no-torch", dest="torch", action="store_false")
    a.add_argument("--no-compile", dest="compile", action="store_false", help="run PyTorch without torch.compile")
    a.add_argument("--no-climb", dest="climb", action="store_false", help="try no micro-batch above the start of the search")
    o = a.parse_args()
    o.gpu, o.gpu_gib = gpu()
    print(f"{o.gpu}; T={o.seq}\n{'':<6} {'':<22} {'B':>4} {'ms':>9} {'tokens/s':>10} {'MFU':>6} {'IQR':>6} {'worst':>7} {'peak GiB':>8} "
          f"{'booked':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(o, folder)
        try:
            bench.compare(o.sizes)
        finally:
            bench.save()
    return 0 if bench.results and not bench.failed else 1


sys.exit(main())
