#!/usr/bin/env python3
"""Compares training runs of one or more ranks on a device with the reference values of tests/golden.

  golden_ranks.py BUILD_DIR [--worlds 1 2 4] [--precision fp32 bf16] [--backends staged nccl] [--limit S] [--json FILE]

staged: collectives go through host memory. nccl: one GPU per rank; with fewer GPUs, ranks share one by a method that NCCL does
not officially support (see BootstrapOptions::backend). If NCCL does not start or hangs on a shared GPU, the run and larger worlds
are skipped; wrong values still fail. Checks loss and gradient norm of every step against PyTorch's float64 and against the run
of one rank, with relative bounds 1e-4 (fp32) and 2e-2 (bf16). Runs beyond --limit are skipped. Exit code 0 if all other runs
pass, 1 if one fails or none ran.
"""
import json, os, pathlib, re, subprocess, sys, tempfile, time

from common import free_port, kill_group, metrics, start_benchmark, train_command

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
SHARED_GPU = {"TESSERA_NCCL_SHARE_DEVICES": "1", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
              "NCCL_PROTO": "Simple", "NCCL_MAX_CTAS": "1"}
# Messages when NCCL does not start or a collective hangs.
STUCK = re.compile(r"^.*(?:NCCL\b.*\b(?:does not start|did not connect)|\bE043 ).*$", re.M)
LEAST_SECONDS = 5  # least time left to start a run


class Skipped(Exception):
    """Reason why a run is no evidence for or against tessera."""


def has_steps(run):
    try:
        return bool(metrics(run))
    except (OSError, ValueError):
        return False


def wait_all(processes, deadline):
    """Exit codes; None for a process that still runs at the deadline, which is 30 s after the first failure at the latest."""
    end = time.monotonic() + deadline
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.poll() not in (None, 0) for p in processes):
            end = min(end, time.monotonic() + 30)
        time.sleep(0.05)
    return [p.poll() for p in processes]


def train(o, golden, expected, world, backend, precision, folder, end):
    """Metrics of each step, or an error text. @throws Skipped if NCCL can't share a GPU, or too little time is left until `end`"""
    seconds = min(o.seconds, end - time.monotonic())
    if seconds < LEAST_SECONDS:
        raise Skipped("no time was left")
    shared = backend == "nccl" and world > o.gpus
    out = tempfile.mkdtemp(dir=folder)
    keys = {"run.out": out, "model.init_from": golden, "data.train": golden / "tokens.bin", "data.order": "sequential",
            "model.seq_len": expected["seq"], "train.global_batch": expected["batch"], "train.steps": len(expected["loss"]),
            "train.device": o.device, "train.precision": precision, "optim.schedule": "constant", "optim.warmup_steps": 0,
            "optim.lr": expected["lr"], "optim.beta1": expected["betas"][0], "optim.beta2": expected["betas"][1],
            "optim.eps": expected["eps"], "optim.weight_decay": expected["weight_decay"], "optim.clip_norm": expected["clip_norm"],
            "comm.init_timeout": 20 if shared else 60, "comm.timeout": 15 if shared else 30}
    if world > 1:
        keys["comm.backend"] = "shm" if backend == "staged" else "nccl"
    command = train_command(o.build, keys)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if shared:
        rendezvous = ["--world-size", str(world), "--rdzv", f"127.0.0.1:{free_port()}"]
        commands = [(command + rendezvous + ["--rank", str(rank), "--local-rank", str(rank)],
                     dict(env, NCCL_HOSTID=f"tessera-{rank}", **SHARED_GPU)) for rank in range(world)]
    else:
        commands = [(command + (["--nproc", str(world)] if world > 1 else []), env)]
    logs = [open(f"{out}/log-{i}.txt", "w+") for i in range(len(commands))]
    processes = []
    try:
        for (arguments, variables), log in zip(commands, logs):
            processes.append(subprocess.Popen(arguments, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                              start_new_session=True))
        codes = wait_all(processes, seconds)
    finally:
        for process in processes:
            kill_group(process)
            process.wait()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
    if any(codes):
        stuck = next((found for text in texts if (found := STUCK.search(text))), None)
        if shared and stuck:
            raise Skipped(f"NCCL does not serve ranks that share a GPU here: {stuck.group(0).strip()[:400]}")
        return f"ended with {codes}: " + " | ".join(text[-800:] for text in texts)
    if None in codes:
        if seconds < o.seconds:
            raise Skipped(f"no time was left: only {seconds:.0f} s")
        if shared and not has_steps(out):
            raise Skipped(f"NCCL does not serve ranks that share a GPU here: killed after {seconds:.0f} s, before the first step")
        return f"was killed after {seconds:.0f} s: {codes}: " + " | ".join(text[-200:] for text in texts)
    rows = [row for row in metrics(out) if "loss" in row]
    return rows if len(rows) == len(expected["loss"]) else f"has {len(rows)} steps instead of {len(expected['loss'])}"


def worst(pairs):
    """Largest relative difference; infinite if a value is NaN."""
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return max(differences) if all(d == d for d in differences) else float("inf")


def main():
    a = start_benchmark(__doc__)
    a.add_argument("--set", default="gpt2-tiny", help="folder of tests/golden")
    a.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    a.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=BOUNDS)
    a.add_argument("--backends", nargs="+", default=["staged", "nccl"], choices=["staged", "nccl"])
    a.add_argument("--device", default="cuda")
    a.add_argument("--gpus", type=int, default=1, help="number of GPUs of this machine")
    a.add_argument("--seconds", type=float, default=60, help="time limit of one run")
    a.add_argument("--limit", type=float, default=3600, help="seconds for all runs")
    a.add_argument("--json", help="write results to this file")
    o = a.parse_args()
    golden = GOLDEN / o.set
    expected = json.load(open(golden / "expected.json"))
    results, single, end = [], {}, time.monotonic() + o.limit
    unserved = None  # smallest world that NCCL can't run on a shared GPU
    print(f"{o.set:<10} {'ranks':>5} {'':<8} {'loss':>10} {'grad_norm':>10} {'to 1 rank':>10}   worst relative difference", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for backend in o.backends:
            for precision in o.precision:
                for world in o.worlds:
                    if world == 1 and backend != o.backends[0]:
                        continue  # a single rank has no collectives
                    if expected["batch"] % world != 0:
                        print(f"{o.set}: {world} ranks can't share {expected['batch']} rows", flush=True)
                        continue
                    shared = backend == "nccl" and world > o.gpus
                    result = dict(set=o.set, world=world, backend=backend if world > 1 else "none", precision=precision)
                    try:
                        if shared and unserved is not None and world >= unserved:
                            raise Skipped(f"{unserved} ranks were, too")
                        rows = train(o, golden, expected, world, backend, precision, folder, end)
                    except Skipped as reason:
                        if shared and unserved is None and end - time.monotonic() >= LEAST_SECONDS:
                            unserved = world
                        rows, text = None, f"skipped: {reason}"
                        result.update(ok=None, skipped=str(reason))
                    if isinstance(rows, str):
                        text = rows
                        result.update(ok=False, error=rows)
                    elif rows is not None:
                        loss = [row["loss"] for row in rows]
                        if world == 1:
                            single[precision] = loss
                        result.update(loss=worst(zip(loss, expected["loss"])),
                                      grad_norm=worst(zip((row["grad_norm"] for row in rows), expected["grad_norm"])),
                                      to_one_rank=worst(zip(loss, single[precision])) if precision in single else None)
                        numbers = [result[key] for key in ("loss", "grad_norm", "to_one_rank") if result[key] is not None]
                        result["ok"] = all(n < BOUNDS[precision] for n in numbers)
                        to_one = "-" if result["to_one_rank"] is None else f"{result['to_one_rank']:.1e}"
                        text = f"{result['loss']:>10.1e} {result['grad_norm']:>10.1e} {to_one:>10}   {'ok' if result['ok'] else 'FAILED'}"
                    print(f"{precision:<10} {world:>5} {result['backend']:<8} {text}", flush=True)
                    results.append(result)
                    if o.json:
                        with open(o.json, "w") as f:
                            json.dump(results, f, indent=1)
    verdicts = {result["ok"] for result in results}  # None: skipped
    return 0 if True in verdicts and False not in verdicts else 1


sys.exit(main())
