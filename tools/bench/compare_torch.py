#!/usr/bin/env python3
"""Compares GPT-2 training steps of tessera and tuned PyTorch on the CPU; prints a table of medians.

  compare_torch.py BUILD_DIR [--seq 64 256] [--batch 4] [--rounds 3] [--steps 8] [--python /usr/bin/python3]

Both run the same shapes (GPT-2 124M, random weights and tokens, float32, forward, backward, clipping,
AdamW) with the same number of threads, alternating, so that a slow phase of the machine affects both.
tessera is the complete trainer, with reading and logging. The peer is gpt2_torch.py, with OpenBLAS (Debian's
package libopenblas0-pthread) and its kernels for this CPU, and a malloc that keeps freed memory.
Medians are over all timed steps of all rounds; memory is the peak resident set.
"""
import json, os, pathlib, statistics, tempfile

from common import VOCAB, gpt2_keys, must, start_benchmark, step_times, train_command, write_tokens

HERE = pathlib.Path(__file__).resolve().parent
WARMUP = 3


def run_tessera(o, seq, folder):
    steps = WARMUP + o.steps
    tokens = f"{folder}/tokens-{seq}.bin"
    if not os.path.exists(tokens):
        write_tokens(tokens, steps * o.batch * seq + 1, VOCAB)
    out = tempfile.mkdtemp(dir=folder)
    command = train_command(o.build, gpt2_keys("124M", seq, tokens, "cpu", o.batch, steps, out))
    rss = must(command, env=dict(os.environ, OMP_NUM_THREADS=str(o.threads))).peak_rss_gib
    return step_times(out, WARMUP), rss


def run_torch(o, seq):
    # malloc keeps freed memory, which avoids page faults: faster here than jemalloc.
    env = dict(os.environ, OMP_NUM_THREADS=str(o.threads), MALLOC_MMAP_THRESHOLD_="8589934592",
               MALLOC_TRIM_THRESHOLD_="17179869184", MALLOC_TOP_PAD_="268435456")
    # Debian's OpenBLAS picks slower kernels on CPUs that it does not know.
    env["OPENBLAS_CORETYPE"] = "SkylakeX" if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text() else "Haswell"
    ran = must([o.python, HERE / "gpt2_torch.py", "--size", "124M", "--batch", o.batch, "--seq", seq, "--warmup", WARMUP,
                "--steps", o.steps, "--threads", o.threads], env=env)
    result = json.loads(ran.out.splitlines()[-1])
    return result["ms_per_step"], ran.peak_rss_gib, result["peer"]


def main():
    o = start_benchmark(__doc__, seq=[64, 256], batch=4, rounds=3, steps=8, threads=2, python="/usr/bin/python3").parse_args()
    print(f"{'T':>5} {'tessera ms':>11} {'torch ms':>9} {'speed ratio':>11} {'tessera GiB':>12} {'torch GiB':>10} {'memory ratio':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for seq in o.seq:
            ours, theirs, rss, peer_rss, peer = [], [], 0, 0, ""
            for _ in range(o.rounds):
                ms, gib = run_tessera(o, seq, folder)
                ours += ms
                rss = max(rss, gib)
                ms, gib, peer = run_torch(o, seq)
                theirs.append(ms)
                peer_rss = max(peer_rss, gib)
            m, p = statistics.median(ours), statistics.median(theirs)
            print(f"{seq:>5} {m:>11.1f} {p:>9.1f} {p / m:>10.2f}x {rss:>12.2f} {peer_rss:>10.2f} {rss / peer_rss:>11.2f}x   {peer}", flush=True)


main()
