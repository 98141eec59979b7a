"""Shared helpers of the Python benchmarks."""
import argparse, array, ctypes, json, os, random, signal, socket, struct, subprocess, sys, tempfile, threading, time

# Layers, heads, width.
SIZES = {"tiny": (2, 2, 64), "124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280), "1558M": (48, 25, 1600)}
VOCAB = 50257
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parameters(size, positions=1024, vocab=VOCAB):
    """Weights of a GPT-2 with a tied head."""
    layers, _, width = SIZES[size]
    return (vocab + positions) * width + layers * (12 * width * width + 13 * width) + 2 * width


def flops_per_token(size, seq, vocab=VOCAB):
    """6 N + 6 L C T: llm.c's convention, which counts causal attention half."""
    layers, _, width = SIZES[size]
    return 6 * parameters(size, max(seq, 1024), vocab) + 6 * layers * width * seq


def write_tokens(path, count, vocab):
    """Writes a token file in llm.c's format with random tokens."""
    tokens = array.array("H", random.Random(1).choices(range(vocab), k=count))
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253))
        tokens.tofile(f)


def train_command(build, keys, ranks=None):
    """Command of a training run without saves, and with one evaluation at the end, unless `keys` have others."""
    keys = {"train.eval_every": 0, "checkpoint.every": 0, **keys}
    return [f"{build}/bin/tessera", "train", *(["--nproc", ranks] if ranks else []), *(f"--{key}={value}" for key, value in keys.items())]


def gpt2_keys(size, seq, tokens, device, batch, steps, out):
    """Keys of a run of a GPT-2 on random tokens."""
    layers, heads, width = SIZES[size]
    return {"model.n_layer": layers, "model.n_head": heads, "model.n_embd": width, "model.vocab_size": VOCAB, "model.seq_len": seq,
            "data.train": tokens, "data.order": "sequential", "train.device": device, "train.global_batch": batch,
            "train.steps": steps, "optim.lr": "1e-4", "run.out": out}


def small_keys(text, steps, out):
    """Keys of nanoGPT's small CPU setting on a text: 4 layers, width 128, context 64, batch 12."""
    return {"data.train": text, "data.tokenizer": "chars", "model.n_layer": 4, "model.n_head": 4, "model.n_embd": 128,
            "model.seq_len": 64, "train.global_batch": 12, "train.steps": steps, "train.eval_batches": 0, "train.device": "cpu",
            "run.out": out}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def gpu_memory():
    """Returns a function that reads the bytes in use on GPU 0 from NVML. Both raise OSError if NVML is missing or fails."""
    library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0:
        raise OSError("NVML finds no GPU")

    def used():
        total_free_used = (ctypes.c_ulonglong * 3)()
        if library.nvmlDeviceGetMemoryInfo(device, total_free_used) != 0:
            raise OSError("NVML does not report the memory in use")
        return total_free_used[2]

    return used


class GpuMemory:
    """Measures the peak of the memory in use on GPU 0 above the start; None without NVML. Includes contexts,
    workspaces and caches of any program."""

    def __init__(self, every=0.02):
        self.every, self.before, self.most, self.end = every, None, None, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self.end.wait(self.every):
            try:
                self.most = max(self.most, self.used())
            except OSError:
                pass

    def __enter__(self):
        try:
            self.used = gpu_memory()
            self.before = self.most = self.used()
            self.thread.start()
        except (OSError, AttributeError):
            pass
        return self

    def __exit__(self, *_):
        self.end.set()
        if self.before is not None:
            self.thread.join()

    @property
    def peak_gib(self):
        return None if self.before is None else (self.most - self.before) / 2**30


class Ran:
    """Result of a program: code (None: killed at its deadline), out, err, seconds, peak_rss_gib, peak_gpu_gib."""


def start_benchmark(doc, **defaults):
    """Returns a parser of BUILD_DIR and of one option for each default, with its type (a list takes several values, None takes
    text). Turns SIGTERM into an exception, so that run() kills its child processes, which have sessions of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    for name, default in defaults.items():
        several = isinstance(default, list)
        kind = str if default is None else type(default[0] if several else default)
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, nargs="+" if several else None)
    return parser


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


RUNNING = set()  # programs of run()


def run(command, deadline=3600.0, env=None, gpu=False):
    """Runs a program; kills it and its children at the deadline (seconds). May be called in threads; then SIGTERM kills no programs
    by itself, and the caller must: for process in RUNNING: kill_group(process)."""
    result, watch = Ran(), GpuMemory()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if gpu:
            watch.__enter__()
        start = time.monotonic()
        process = subprocess.Popen(list(map(str, command)), env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                                   start_new_session=True)
        RUNNING.add(process)
        killed = threading.Event()

        def kill():
            killed.set()
            kill_group(process)

        timer = threading.Timer(deadline, kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:  # also kills leftover child processes
            timer.cancel()
            RUNNING.discard(process)
            kill_group(process)
            if gpu:
                watch.__exit__()
        process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait again
        result.seconds = time.monotonic() - start
        result.code = None if killed.is_set() else process.returncode
        out.seek(0)
        err.seek(0)
        result.out, result.err = out.read(), err.read()
        result.peak_rss_gib, result.peak_gpu_gib = usage.ru_maxrss / 2**20, watch.peak_gib if gpu else None
    return result


def must(command, env=None):
    """Runs a program, which must succeed: otherwise exits with its stderr."""
    result = run(command, env=env)
    if result.code != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.err[-2000:]}")
    return result


def metrics(run_directory):
    return [json.loads(line) for line in open(f"{run_directory}/metrics.jsonl")]


def saves(run_directory):
    return [json.loads(line) for line in open(f"{run_directory}/saves.jsonl")]


def step_times(run_directory, warmup):
    """Milliseconds of each step after the first `warmup`."""
    return [row["step_ms"] for row in metrics(run_directory) if "step_ms" in row][warmup:]


def parse_size(text):
    number = text.rstrip("BKMGiIbkmg")
    return int(float(number) * UNITS[text[len(number):].upper() or "B"])


def files_under(folder):
    return [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]


def size_of(folder):
    return sum(os.path.getsize(name) for name in (files_under(folder) if os.path.isdir(folder) else [folder]))


def drop_cache(folder):
    """Removes a folder's data from the page cache and keeps everything else."""
    os.sync()
    for name in files_under(folder):
        with open(name, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
