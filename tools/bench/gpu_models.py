#!/usr/bin/env python3
"""Compares a few steps of training on a GPU, in fp32 and bf16, with the same steps on the CPU in fp32.

  gpu_models.py BUILD_DIR [--device cuda] [--only TEXT] [--workers 6] [--library-path PATH] [--json FILE]

Small models of every family and of every way to compute, save memory and shard (ranks of one GPU exchange data through host memory), and
LoRA; then greedy generation and evaluation of one model. Prints the largest relative differences of loss and gradient norm.
Exit code 1 if one is above its bound or a run fails.
"""
import json, os, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

from common import RUNNING, kill_group, metrics, run, start_benchmark, train_command, write_tokens

BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 1e-2)}  # of loss and gradient norm
FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "olmo3", "smollm3", "mixtral",
            "qwen3_moe", "olmoe", "nanochat"]
MODEL = {"model.arch": "llama", "model.n_layer": 2, "model.n_head": 4, "model.n_embd": 128, "model.vocab_size": 512, "model.seq_len": 128,
         "train.global_batch": 4, "train.steps": 6, "train.threads": 2, "optim.lr": "1e-3"}
# Name: keys.
SETTINGS = {
    **{family: {"model.arch": family} for family in FAMILIES},
    "dropout": {"model.arch": "gpt2", "model.dropout": 0.1},
    "micro-batches of 1": {"train.micro_batch": 1},
    "recompute cheap": {"train.recompute": "cheap"},
    "recompute mlp": {"train.recompute": "mlp"},
    "recompute block": {"train.recompute": "block"},
    "2 heads of keys, head_dim 40": {"model.n_kv_head": 2, "model.head_dim": 40},
    "head_dim 128": {"model.head_dim": 128},
    "window in 1024 tokens": {"model.arch": "gemma3", "model.seq_len": 1024},
    "odd sizes": {"model.arch": "gpt2", "model.n_embd": 132, "model.vocab_size": 513, "model.seq_len": 61},
    "GPT-2's width and vocabulary": {"model.arch": "gpt2", "model.n_embd": 768, "model.n_head": 12, "model.vocab_size": 50257, "train.steps": 3},
}
# Name: keys and ranks, on the GPU alone.
SHARDED = {
    "offload of the optimizer": ({"shard.offload": "optimizer"}, None),
    **{f"2 ranks, {mode}": ({"shard.mode": mode}, 2) for mode in ("full", "gradients", "optimizer")},
    "4 ranks, hybrid": ({"shard.mode": "hybrid", "shard.group": 2}, 4),
    "2 ranks, bf16 gradients": ({"shard.reduce_dtype": "bf16", "shard.gradient_dtype": "bf16"}, 2),
}


class Check:
    def __init__(self, options, folder):
        self.o, self.folder, self.failed, self.lines = options, folder, False, []
        self.env = dict(os.environ, **({"LD_LIBRARY_PATH": options.library_path} if options.library_path else {}))
        self.tokens = f"{folder}/tokens.bin"
        write_tokens(self.tokens, 40000, 512)

    def say(self, line):
        print(line, flush=True)
        self.lines.append(line.rstrip())

    def train(self, device, precision, keys, ranks=None):
        """(loss, gradient norm) of each step, or an error text."""
        keys = {**MODEL, "data.train": self.tokens, "train.device": device, "train.precision": precision,
                "run.out": tempfile.mkdtemp(dir=self.folder), **({"comm.backend": "shm"} if ranks else {}), **keys}
        ran = run(train_command(self.o.build, keys, ranks), 120, env=self.env)
        if ran.code != 0:
            return f"ended with {ran.code}: {' '.join(ran.err[-400:].split())}"
        return [(row["loss"], row["grad_norm"]) for row in metrics(keys["run.out"]) if "step_ms" in row]

    def row(self, name, expected, keys, ranks=None):
        text = f"{name:<30}"
        if isinstance(expected, str):
            self.failed = True
            return f"{text} on the CPU: {expected}"
        for precision, bounds in BOUNDS.items():
            got = self.train(self.o.device, precision, keys, ranks)
            if isinstance(got, str) or len(got) != len(expected):
                self.failed = True
                text += f" {precision}: {got}"
                continue
            off = [[abs(g[i] - e[i]) / abs(e[i]) for g, e in zip(got, expected)] for i in (0, 1)]
            worst = [max(values) for values in off]
            good = all(value <= bound for values, bound in zip(off, bounds) for value in values)  # false for a NaN
            self.failed |= not good
            text += f" {precision} {worst[0]:>8.1e} {worst[1]:>8.1e} {'' if good else 'WRONG':<5}"
        return text

    def setting(self, item):
        name, keys = item
        return self.row(name, self.train("cpu", "fp32", keys), keys)

    def compare(self):
        names = lambda table: [(name, value) for name, value in table.items() if self.o.only in name]
        if not names(SETTINGS) + names(SHARDED):
            sys.exit(f"nothing is named like '{self.o.only}'")
        pool = ThreadPoolExecutor(self.o.workers)
        try:
            for line in pool.map(self.setting, names(SETTINGS)):
                self.say(line)
            expected = self.train("cpu", "fp32", {})
            for line in pool.map(lambda item: self.row(item[0], expected, *item[1]), names(SHARDED)):
                self.say(line)
        finally:  # also on SIGTERM
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                kill_group(process)
        if self.o.only:
            return
        model = f"{self.folder}/model"
        self.train("cpu", "fp32", {"checkpoint.every": 6, "run.out": model})
        lora = {"model.init_from": model, "lora.rank": 4}
        self.say(self.row("LoRA", self.train("cpu", "fp32", lora), lora))
        for what in ("generate --prompt-tokens 5 6 7 --max-new-tokens 64 --temperature 0", f"eval --json --data {self.tokens}"):
            command, *arguments = what.split()
            said = []
            for device in ("cpu", self.o.device):
                ran = run([f"{self.o.build}/bin/tessera", command, model, *arguments, "--device", device], 60, env=self.env)
                said.append(ran.out if ran.code == 0 else None)
                if ran.code != 0:
                    self.say(f"{command} on {device} ended with {ran.code}: {' '.join(ran.err[-400:].split())}")
            if None in said:
                good, text = False, ""
            elif command == "eval":
                loss = [json.loads(text)["loss"] for text in said]
                good, text = abs(loss[1] - loss[0]) <= 1e-5 * loss[0], f"{loss[1]:.6f}, on the CPU {loss[0]:.6f}"
            else:
                good, text = said[0] == said[1], "the CPU's tokens" if said[0] == said[1] else f"{said[1]}, on the CPU {said[0]}"
            self.failed |= not good
            self.say(f"{command:<30} fp32 {text} {'' if good else 'WRONG'}")


def main():
    a = start_benchmark(__doc__, device="cuda", only="", workers=6)
    a.add_argument("--library-path", help="LD_LIBRARY_PATH of tessera")
    a.add_argument("--json", help="write the printed lines to this file")
    with tempfile.TemporaryDirectory() as folder:
        o = a.parse_args()
        check = Check(o, folder)
        check.say(f"{'':<35}     loss grad_norm                loss grad_norm")
        try:
            check.compare()
        finally:
            if o.json:
                with open(o.json, "w") as f:
                    json.dump(check.lines, f, indent=1)
    return 1 if check.failed else 0


sys.exit(main())
