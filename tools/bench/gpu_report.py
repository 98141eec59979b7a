#!/usr/bin/env python3
"""Writes the report of tools/gpu_check.sh from the results of its steps.

  gpu_report.py WORK --environment CUDA_ROOT --commit REV     # writes WORK/environment.json
  gpu_report.py WORK --commit REV --report DIR [--earlier DIR] [--logs FILE]

The second form writes DIR/DATE-GPU.json and .md, with the verdict on each target of docs/gpu/README.md: met, missed or not
measured. Parts without results in WORK keep the results of an earlier report of the same name and commit, in DIR or --earlier.
"""
import argparse, datetime, json, os, pathlib, platform, re, subprocess, sys, tarfile

PARTS = ["build", "pack", "test", "bench", "nccl", "sanitize", "suite"]
TAIL = 25  # lines shown of a failed step's log: from the first error, and the end
SOURCES = pathlib.Path(__file__).resolve().parents[2]
FIGURES = {"kernels": "kernels.jsonl", "own_attention": "own-attention.jsonl", "gpt2": "gpt2.json", "ranks": "ranks.json", "torch_roofs": "roofs.json",
           "models": "models.json"}
PART_OF = {"ranks": "nccl", "models": "test"}  # the part of a figure; others: bench


def ask(*command, timeout=60):
    """First line of a program's output, or None."""
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout.strip()
        return text.splitlines()[0].strip() if text else None
    except (OSError, subprocess.SubprocessError):
        return None


def gpu_field(field):
    return ask("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0")


def header_version(headers, prefix, names):
    """Version from the #defines of the first header that exists, or None."""
    for header in headers:
        try:
            text = open(header, errors="replace").read()
        except OSError:
            continue
        numbers = [re.search(rf"#define\s+{prefix}{name}\s+(\d+)", text) for name in names]
        if all(numbers):
            return ".".join(n.group(1) for n in numbers)
    return None


def environment(work, cuda_root):
    includes = [work / "nvidia" / "include", pathlib.Path(cuda_root) / "include", *pathlib.Path(cuda_root).glob("targets/*/include"),
                pathlib.Path("/usr/include")]
    memory = re.search(r"MemTotal:\s+(\d+) kB", open("/proc/meminfo").read())
    model = re.search(r"model name\s*:\s*(.*)", open("/proc/cpuinfo").read())
    release = re.search(r'PRETTY_NAME="(.*)"', open("/etc/os-release").read())
    torch = "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), " \
            "'.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None)"
    said = (ask(sys.executable, "-c", torch, timeout=120) or "").split()
    return {
        "GPU": gpu_field("name"),
        "GPU memory": gpu_field("memory.total"),
        "compute capability": gpu_field("compute_cap"),
        "power limit": gpu_field("power.limit"),
        "GPUs": (ask("bash", "-c", "nvidia-smi -L | grep -c GPU")),
        "driver": gpu_field("driver_version"),
        "CUDA toolkit": ask("bash", "-c", "nvcc --version | sed -n 's/.*, V//p'"),
        "cuDNN headers": header_version([i / "cudnn_version.h" for i in includes], "CUDNN_", ["MAJOR", "MINOR", "PATCHLEVEL"]),
        "NCCL headers": header_version([i / "nccl.h" for i in includes], "NCCL_", ["MAJOR", "MINOR", "PATCH"]),
        "PyTorch": said[0] if said else None,
        "PyTorch's CUDA, cuDNN, NCCL": " ".join(said[1:]) if said else None,
        "compiler": ask("g++", "--version"),
        "CMake": ask("cmake", "--version"),
        "processor": model and model.group(1),
        "cores": os.cpu_count(),
        "memory GiB": memory and round(int(memory.group(1)) / 2**20),
        "system": release and release.group(1),
        "kernel": platform.release(),
    }


def read_json(path):
    try:
        text = open(path).read()
        if str(path).endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)
    except (OSError, ValueError):
        return None


def counted(text):
    """Summary of the test counts in a log of ctest or doctest."""
    ctest = re.search(r"\d+% tests passed, \d+ tests failed out of \d+", text)
    if ctest:
        return ctest.group(0)
    files = re.findall(r"^== (\w+check): (\w+)_test\.cpp: exit code (\d+)", text, re.M)
    if files:
        stopped = [name for _, name, code in files if code in ("124", "137")]
        bad = [f"{name} ({code})" for _, name, code in files if code not in ("0", "124", "137")]
        return f"{len(files)} files, " + (f"{len(files) - len(bad) - len(stopped)} clean" if bad or stopped else "all clean") + \
            (f"; not finished in time: {', '.join(stopped)}" if stopped else "") + (f"; not clean: {', '.join(bad)}" if bad else "")
    cases = re.findall(r"\[doctest\] test cases:\s*(\d+)\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed", text)
    if cases:
        total, passed, failed = (sum(int(c[i]) for c in cases) for i in range(3))
        ended = re.findall(r"^== kernels: (\w+)_test\.cpp: exit code (\d+)", text, re.M)
        bad = [f"{name} ({code})" for name, code in ended if code != "0"]
        return f"{total} test cases, {passed} passed, {failed} failed" + (f"; not passed: {', '.join(bad)}" if bad else "")
    return ""


def failed_tests(text):
    """Names of failed tests (ctest) or cases (doctest) in a log."""
    names = re.findall(r"^\s*\d+ - (\S+) \((?:Failed|Timeout|SEGFAULT|Subprocess aborted|Not Run|ILLEGAL|[^)]*)\)", text, re.M)
    cases, current = [], None
    for line in text.splitlines():
        if line.startswith("TEST CASE:"):
            current = line.removeprefix("TEST CASE:").strip()
        elif "ERROR:" in line and current and current not in cases:
            cases.append(current)
    return names or cases


def steps(work):
    result = []
    try:
        lines = open(work / "steps.tsv").read().splitlines()
    except OSError:
        return result
    for line in lines:
        part, name, outcome, seconds, log, why = (line.split("\t") + [""] * 6)[:6]
        step = dict(part=part, name=name, result=outcome, seconds=int(seconds), why=why)
        try:
            text = open(work / "logs" / log, errors="replace").read()
        except OSError:
            text = ""
        step["counted"] = counted(text)
        # Messages of tests about skipped parts.
        skipped = [line.strip()[:300] for line in text.splitlines()
                   if re.search(r"\b(skip(ped|ping)?|left out)\b", line, re.I) and not line.startswith(("[doctest]", "TEST CASE"))]
        step["notes"] = list(dict.fromkeys(skipped))[:5]
        if outcome in ("failed", "timeout"):
            step["failed"] = failed_tests(text)[:40]
            lines = text.splitlines()
            first = [i for i, line in enumerate(lines) if re.search(r"\b(ERROR|error):|FAILED:|=========.*(Invalid|Race|Uninit|Error)", line)]
            step["head"] = lines[first[0]:first[0] + TAIL] if first and first[0] < len(lines) - TAIL else []
            step["tail"] = lines[-TAIL:]
        result.append(step)
    return result


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return lines + ["| " + " | ".join("-" if cell is None or cell == "" else str(cell).replace("|", "\\|") for cell in row) + " |"
                    for row in rows]


def percent(share):
    return None if share is None else f"{100 * share:.1f}%"


SMALL = 64e6  # bytes: smaller kernels are bound by launch latency or the L2 cache


def copy_roof(figures):
    """The faster of tessera's and PyTorch's copies of 1 GiB, (GB/s, name), because a slow copy would flatter every kernel."""
    own = next((k["rate"] for k in figures.get("kernels") or [] if k["name"] == "roof: copy f32"), 0)
    torch = (figures.get("torch_roofs") or {}).get("copy_gb_s", 0)
    return (torch, "PyTorch's copy") if torch > own else (own, "tessera's copy")


def share_of_roof(kernel, figures):
    """Share of copy_roof() for memory-bound kernels; of their own roof for others."""
    roof, _ = copy_roof(figures)
    return kernel["rate"] / roof if kernel["unit"] == "GB/s" and roof > 0 else kernel["share_of_roof"]


def kernel_table(kernels, share):
    return table(["", "ms", "worst ms", "rate", "of the roof"],
                 [(k["name"], f"{k['ms']:.4f}", f"{k['worst_ms']:.4f}", f"{k['rate']:.1f} {k['unit']}", percent(share(k))) for k in kernels])


def targets(figures, steps):
    """Targets for one H100 with results: dicts of target, bound, measured, verdict."""
    all_kernels = any((s["name"], s["result"]) == ("each kernel", "ok") for s in steps)
    gpt2 = figures.get("gpt2") or {}
    compiled = gpt2.get("compiled", True)
    ratios = gpt2.get("ratios") or []
    same = [r for r in gpt2.get("results") or [] if r["mode"] == "tessera bf16" and r["what"] == "same micro-batch"]
    best = max((r for r in gpt2.get("results") or [] if r["mode"] == "tessera bf16" and r["size"] == "124M" and r["mfu"]),
               key=lambda r: r["mfu"], default=None)
    result = []

    def add(target, bound, measured, met):
        """met: None if not measured."""
        result.append(dict(target=target, bound=bound, measured=measured or None,
                           verdict="not measured" if met is None else "met" if met else "missed"))

    for mode, over, what in (("tessera bf16", "torch bf16", "bf16 over float32 weights"),
                             ("tessera, bf16 weights", "torch bf16-true", "all in bf16")):
        ratio = next((r for r in ratios if (r["size"], r["mode"], r["over"]) == ("124M", mode, over)), None) if compiled else None
        for bound, goal in ((1.0, ""), (1.15, ", the goal")):
            add(f"tokens/s over compiled PyTorch's, GPT-2 124M, {what}{goal}", f"at least {bound}x",
                ratio and f"{ratio['speed']:.3f}x at B={ratio['batch']}", ratio and ratio["speed"] >= bound)
    for bound, goal in ((0.48, ""), (0.55, ", the goal")):
        add(f"model FLOPs utilization, GPT-2 124M{goal}", f"at least {100 * bound:.0f}%",
            best and f"{percent(best['mfu'])} at B={best['batch']}", best and best["mfu"] >= bound)
    memory = [r for r in ratios if (r["mode"], r["over"]) == ("tessera bf16", "torch bf16") and r["memory"]] if compiled else []
    add("peak memory over compiled PyTorch's at the same micro-batch", "at most 0.8x",
        ", ".join(f"{r['size']} {r['memory']:.3f}x" for r in memory), all(r["memory"] <= 0.8 for r in memory) if memory else None)
    roof, whose = copy_roof(figures)
    kernels = [(k["name"], share) for k in figures.get("kernels") or []
               if k["unit"] == "GB/s" and not k["name"].startswith("roof") and (share := share_of_roof(k, figures)) > 0
               and k.get("work", k["rate"] * k["ms"] * 1e6) >= SMALL]
    slow = sorted(((name, share) for name, share in kernels if share < 0.85), key=lambda k: k[1])
    add("memory-bound kernels, of the measured copy bandwidth", "at least 85%",
        kernels and f"{len(kernels) - len(slow)} of {len(kernels)} kernels, of {roof:.1f} GB/s by {whose}" +
        "".join(f"; {name} {percent(share)}" for name, share in slow) + ("" if all_kernels else "; others were not measured"),
        False if slow else True if kernels and all_kernels else None)
    add("step time jitter: IQR over the median", "below 2%",
        ", ".join(f"{r['size']} {percent(r['iqr_of_median'])}" for r in same),
        all(r["iqr_of_median"] < 0.02 for r in same) if same else None)
    return result


def suite(report):
    """Result of the test suite, one sentence."""
    step = next((s for s in report["steps"] if (s["part"], s["name"]) == ("suite", "every test")), None)
    if step is None:
        return "The test suite was not requested."
    if step["result"] == "ok":
        return "The test suite passed."
    return f"The test suite did not pass: {step['result']}, {step['why']}."


def markdown(report):
    env, figures = report["environment"], report["figures"]
    lines = [f"# {env.get('GPU') or 'GPU'}, {report['date']}", "",
             f"Written by `tools/gpu_check.sh` at commit `{report['commit']}`.", ""]
    lines += table(["", ""], [(key, value) for key, value in env.items() if value is not None])
    bad = [s for s in report["steps"] if s["result"] in ("failed", "timeout")]
    skipped = [s for s in report["steps"] if s["result"] == "skipped"]
    done = [s for s in report["steps"] if s["result"] == "ok"]
    lines += ["", "## What ran", "", f"{len(done)} steps passed, {len(bad)} failed, {len(skipped)} were left out.", ""]
    lines += table(["part", "step", "result", "seconds", "counted"],
                   [(s["part"], s["name"], s["result"], s["seconds"], s["counted"]) for s in report["steps"] if s["result"] != "skipped"])
    lines += ["", suite(report)]
    never = [part for part in PARTS if part not in {"build", "pack", *(s["part"] for s in report["steps"])}]
    if skipped or never:
        lines += ["", "Left out:", ""]
        lines += [f"- {s['part']}, {s['name']}: {s['why']}" for s in skipped]
        lines += [f"- {part}: not requested" for part in never]
    notes = [f"- {s['name']}: {note}" for s in report["steps"] for note in s.get("notes", [])]
    if notes:
        lines += ["", "Messages of the steps:", "", *notes]

    lines += ["", "## Targets", "",
              "Set for one H100 (MFU: of its 989 TFLOP/s dense bf16). Kernels that move less than "
              f"{SMALL / 1e6:.0f} MB are not compared with the copy bandwidth." +
              ("" if "H100" in (env.get("GPU") or "H100") else " This is another GPU."), ""]
    lines += table(["target", "", "measured", ""], [(t["target"], t["bound"], t["measured"], t["verdict"]) for t in report["targets"]])

    gpt2 = figures.get("gpt2")
    if gpt2 and gpt2["results"]:
        lines += ["", "## GPT-2 training steps", "",
                  "Measured by `tools/bench/gpt2_gpu.py`, which describes the method. Peak: memory in use by the driver's count, above the "
                  "start. Booked: by tessera's ledger, or PyTorch's allocator.", ""]
        lines += table(["size", "", "B", "T", "ms", "tokens/s", "MFU", "IQR", "worst", "peak GiB", "booked GiB", "micro-batch"],
                       [(r["size"], r["mode"], r["batch"], r["seq"], r["ms"], r["tokens_per_s"], percent(r["mfu"]),
                         percent(r["iqr_of_median"]), f"{r['worst_of_median']:.2f}x", r["peak_gib"], r["booked_gib"], r["what"])
                        for r in gpt2["results"]])
        if gpt2["ratios"]:
            lines += ["", "tessera over PyTorch at the same micro-batch (speed: higher is better; memory: lower is better):", ""]
            lines += table(["size", "", "over", "B", "speed", "memory"],
                           [(r["size"], r["mode"], r["over"], r["batch"], f"{r['speed']:.2f}x", r["memory"] and f"{r['memory']:.2f}x")
                            for r in gpt2["ratios"]])
    if gpt2 and gpt2.get("kernels"):
        lines += ["", "Kernels of a profiled step, timestamps included, and the estimate of `tessera plan --time h100`:", "",
                  *table(["size", "B", "kernel", "calls", "ms", "estimate", "estimate over measured"],
                         [[k["size"], k["batch"], k["kernel"], f"{k['calls']:.0f}", f"{k['ms']:.2f}", f"{k['planned_ms']:.2f}",
                           f"{k['planned_ms'] / k['ms']:.2f}" if k["ms"] else "-"] for k in gpt2["kernels"]])]
    if gpt2 and gpt2["notes"]:
        lines += ["", *[f"- {' '.join(note.split())}" for note in gpt2["notes"]]]
    kernels = figures.get("kernels")
    if kernels:
        lines += ["", "## Kernels", "",
                  "`tessera_kernels_bench --device cuda`. The roofs are measured in the same run: a copy of 1 GiB by `kernels::cast`, an "
                  "8192^3 product by `kernels::matmul`, in bf16, and in float32 for attention of float32. Bytes count each operand of a "
                  "kernel once. Memory-bound kernels are compared with the faster of that copy and PyTorch's.", ""]
        roofs = figures.get("torch_roofs")
        roof, whose = copy_roof(figures)
        if roofs:
            lines += [f"PyTorch on the same GPU: a copy of 1 GiB at {roofs['copy_gb_s']} GB/s, the product at "
                      f"{roofs['product_tflop_s']} TFLOP/s.", ""]
        if roof > 0:
            lines += [f"Memory roof: {whose}, {roof:.1f} GB/s.", ""]
        lines += kernel_table(kernels, lambda kernel: share_of_roof(kernel, figures))
    own = [k for k in figures.get("own_attention") or [] if k["name"].startswith("attention")]
    if own:
        lines += ["", "tessera's own attention, where the table above is of cuDNN's:", ""]
        lines += kernel_table(own, lambda kernel: kernel["share_of_roof"])
    models = figures.get("models")
    if models:
        lines += ["", "## Families and settings", "",
                  "`tools/bench/gpu_models.py`: the largest relative differences of loss and gradient norm from the same steps on the CPU "
                  "in fp32.", "", "```", *models, "```"]
    ranks = figures.get("ranks")
    if ranks:
        lines += ["", "## Runs of one or more ranks", "",
                  "`tools/bench/golden_ranks.py`: worst relative differences from the reference values, and of the loss from the run of "
                  "one rank.", ""]
        lines += table(["set", "precision", "ranks", "collectives", "loss", "grad_norm", "to one rank", ""],
                       [(r["set"], r["precision"], r["world"], r["backend"],
                         *(f"{r[key]:.1e}" if r.get(key) is not None else None for key in ("loss", "grad_norm", "to_one_rank")),
                         f"skipped: {r['skipped'][:200]}" if "skipped" in r else
                         "ok" if r["ok"] else " ".join(r.get("error", "FAILED").split())[:200]) for r in ranks])
    if bad:
        lines += ["", "## Failures"]
        for s in bad:
            lines += ["", f"### {s['part']}, {s['name']}: {s['why']}", ""]
            lines += [f"- {name}" for name in s["failed"]]
            if s.get("head"):
                lines += ["", "First error:", "", "```", *s["head"], "```", "", "End of the log:"]
            lines += ["", "```", *s["tail"], "```"]
    return "\n".join(lines) + "\n"


def report(work, o):
    now = datetime.datetime.now(datetime.timezone.utc)
    env = read_json(work / "environment.json") or {}
    gpu = env.get("GPU") or gpu_field("name") or "gpu"
    name = f"{now:%Y-%m-%d}-" + re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    result = dict(date=f"{now:%Y-%m-%d}", commit=o.commit, environment=env, steps=steps(work),
                  figures={key: value for key, file in FIGURES.items() if (value := read_json(work / file)) is not None})
    ran = {step["part"] for step in result["steps"]}
    for folder in filter(None, [o.report, o.earlier]):
        earlier = read_json(pathlib.Path(folder) / f"{name}.json")
        if not earlier or earlier["commit"] != o.commit or o.commit == "unknown" or o.commit.endswith("+"):
            continue
        kept = [step for step in earlier["steps"] if step["part"] not in ran]
        result["steps"] += kept
        for key, value in earlier["figures"].items():
            if PART_OF.get(key, "bench") in {step["part"] for step in kept}:
                result["figures"].setdefault(key, value)
        result["environment"] = env or earlier["environment"]
        break
    result["targets"] = targets(result["figures"], result["steps"])
    result["steps"].sort(key=lambda step: PARTS.index(step["part"]))
    folder = pathlib.Path(o.report)
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", markdown(result))):
        path = folder / (name + suffix)
        path.with_suffix(suffix + ".new").write_text(text.replace(f"{SOURCES}/", ""))
        path.with_suffix(suffix + ".new").rename(path)
    (work / "report").write_text(f"{folder / name}.md\n")
    if o.logs:
        with tarfile.open(o.logs + ".new", "w:gz") as tar:
            tar.add(work / "logs", arcname="logs")
        os.rename(o.logs + ".new", o.logs)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("work", type=pathlib.Path)
    a.add_argument("--environment", metavar="CUDA_ROOT")
    a.add_argument("--commit", default="unknown")
    a.add_argument("--report", metavar="DIR")
    a.add_argument("--earlier", metavar="DIR")
    a.add_argument("--logs", metavar="FILE")
    o = a.parse_args()
    if o.environment:
        text = json.dumps(environment(o.work, o.environment), indent=1)
        (o.work / "environment.json.new").write_text(text)
        (o.work / "environment.json.new").rename(o.work / "environment.json")
    if o.report:
        report(o.work, o)


main()
