#!/usr/bin/env python3
"""Compares GPT-2 training steps of tessera and tuned PyTorch on the CPU; prints a table of medians.

  compare_torch.py BUILD_DIR --python VENV/bin/python [--shapes 4x64 4x256 1x1024] [--precision fp32 bf16] [--rounds 3] [--steps 6]
                   [--recompute cheap]

Both run the same shapes (rows x tokens; random weights and tokens, forward, backward, clipping, AdamW) with
the same number of threads, in turns, so that a slow phase of the machine affects all. tessera is the complete trainer, with
reading and logging. The peer is gpt2_torch.py: eager, and with torch.compile, of which the faster one counts; fused AdamW, and a
malloc that keeps freed memory. bf16 is over float32 weights, in PyTorch by autocast. Medians are over all timed steps of all
rounds; memory is the peak resident set, in PyTorch that of the faster one.
"""
import json, os, pathlib, statistics, tempfile

from common import VOCAB, gpt2_keys, must, start_benchmark, step_times, train_command, write_tokens

HERE = pathlib.Path(__file__).resolve().parent
WARMUP = 3


def run_tessera(o, batch, seq, precision, folder):
    """Times of steps, and the peak resident set in GiB."""
    steps = WARMUP + o.steps
    tokens = f"{folder}/tokens-{batch}-{seq}.bin"
    if not os.path.exists(tokens):
        write_tokens(tokens, steps * batch * seq + 1, VOCAB)
    out = tempfile.mkdtemp(dir=folder)
    keys = {**gpt2_keys(o.size, seq, tokens, "cpu", batch, steps, out), "train.precision": precision, "train.threads": o.threads,
            "train.recompute": o.recompute}
    rss = must(train_command(o.build, keys)).peak_rss_gib
    return step_times(out, WARMUP), rss


def run_torch(o, batch, seq, precision, compiled):
    env = dict(os.environ, OMP_NUM_THREADS=str(o.threads), MALLOC_MMAP_THRESHOLD_="8589934592",
               MALLOC_TRIM_THRESHOLD_="17179869184", MALLOC_TOP_PAD_="268435456")
    ran = must([o.python, HERE / "gpt2_torch.py", "--size", o.size, "--batch", batch, "--seq", seq, "--warmup", WARMUP,
                "--steps", o.steps, "--threads", o.threads, "--precision", precision, *(["--compile"] if compiled else [])], env=env)
    result = json.loads(ran.out.splitlines()[-1])
    return result["steps_ms"], ran.peak_rss_gib, result["peer"]


def main():
    o = start_benchmark(__doc__, shapes=["4x64", "4x256", "1x1024"], precision=["fp32", "bf16"], size="124M", rounds=3, steps=6,
                        recompute="none", threads=2, python="python3").parse_args()
    print("| precision | rows x tokens | tessera ms | PyTorch ms | eager, compiled | PyTorch's time over ours | tessera GiB | PyTorch GiB | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    peer = ""
    with tempfile.TemporaryDirectory() as folder:
        for precision in o.precision:
            for shape in o.shapes:
                batch, seq = map(int, shape.split("x"))
                ours, rss, theirs = [], 0, {False: ([], []), True: ([], [])}
                for _ in range(o.rounds):
                    ms, gib = run_tessera(o, batch, seq, precision, folder)
                    ours += ms
                    rss = max(rss, gib)
                    for compiled, (times, memory) in theirs.items():
                        ms, gib, peer = run_torch(o, batch, seq, precision, compiled)
                        times += ms
                        memory.append(gib)
                mine = statistics.median(ours)
                eager, compiled = (statistics.median(times) for times, _ in theirs.values())
                best, memory = min((eager, max(theirs[False][1])), (compiled, max(theirs[True][1])))
                print(f"| {precision} | {shape} | {mine:.0f} | {best:.0f} | {eager:.0f}, {compiled:.0f} | {best / mine:.2f} | {rss:.2f} | "
                      f"{memory:.2f} | {rss / memory:.2f} |", flush=True)
    print(f"\n{peer}, {o.threads} threads, {o.size}; tessera with train.recompute {o.recompute}")


if __name__ == "__main__":
    main()
