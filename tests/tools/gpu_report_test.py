#!/usr/bin/env python3
"""Tests tools/bench/gpu_report.py on made-up figures: verdicts on the targets."""
import json, pathlib, subprocess, sys, tempfile, unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench" / "gpu_report.py"
SPEED, SPEED_GOAL, BF16_SPEED, BF16_GOAL, MFU, MFU_GOAL, MEMORY, KERNELS, JITTER = range(9)


def row(size, mode, mfu, iqr, what="same micro-batch"):
    return dict(size=size, what=what, mode=mode, batch=96, seq=1024, steps=40, ms=100.0, tokens_per_s=1, tflop_s=1.0, mfu=mfu,
                iqr_of_median=iqr, worst_of_median=1.1, peak_gib=10.0, booked_gib=9.0, peer=None)


def ratio(size, mode, over, speed, memory):
    return dict(size=size, batch=96, mode=mode, over=over, speed=speed, memory=memory)


def kernel(name, share, unit="GB/s", work=1e9):
    return dict(name=name, ms=1.0, best_ms=1.0, worst_ms=1.0, rate=share * 1000, unit=unit, share_of_roof=share, work=work)


def gpt2(speed, bf16_speed, mfu, memory, iqr):
    return dict(gpu="NVIDIA H100", compiled=True, notes=["a note"],
                kernels=[dict(size="124M", batch=64, kernel="adamw", calls=111.0, ms=2.0, planned_ms=1.5)],
                results=[row("124M", "tessera bf16", mfu, iqr), row("124M", "torch bf16", 0.3, 0.5),
                         row("350M", "tessera bf16", 0.1, 0.001), row("124M", "tessera bf16", mfu - 0.01, 0.9, "largest that fits")],
                ratios=[ratio("124M", "tessera bf16", "torch bf16", speed, memory), ratio("350M", "tessera bf16", "torch bf16", 0.5, 0.4),
                        ratio("124M", "tessera bf16", "torch bf16-true", 0.1, 2.0),
                        ratio("124M", "tessera, bf16 weights", "torch bf16-true", bf16_speed, None)])


def report(steps=(), environment=None, **figures):
    """The report on these files, as JSON and as text."""
    with tempfile.TemporaryDirectory() as folder:
        work, out = pathlib.Path(folder, "work"), pathlib.Path(folder, "out")
        (work / "logs").mkdir(parents=True)
        (work / "environment.json").write_text(json.dumps(environment or {"GPU": "NVIDIA H100 80GB HBM3"}))
        (work / "steps.tsv").write_text("".join("\t".join(map(str, step)) + "\n" for step in steps))
        for name, value in figures.items():
            lines = "".join(json.dumps(line) + "\n" for line in value) if name == "kernels" else json.dumps(value)
            (work / f"{name}.{'jsonl' if name == 'kernels' else 'json'}").write_text(lines)
        subprocess.run([sys.executable, "-B", SCRIPT, work, "--commit", "0123456789ab", "--report", out], check=True, timeout=60)
        data, = out.glob("*.json")
        text, = out.glob("*.md")
        return json.loads(data.read_text()), text.read_text()


class Targets(unittest.TestCase):
    def verdicts(self, kernels_ended="ok", **figures):
        data, text = report([("bench", "each kernel", kernels_ended, 1, "-", "")] if "kernels" in figures else (), **figures)
        for target in data["targets"]:
            self.assertIn(f"| {target['target']} | {target['bound']} | {target['measured'] or '-'} | {target['verdict']} |", text)
        return [target["verdict"] for target in data["targets"]], data["targets"]

    def test_nothing_measured(self):
        self.assertEqual(self.verdicts()[0], ["not measured"] * 9)

    def test_all_met(self):
        verdicts, said = self.verdicts(gpt2=gpt2(1.2, 1.15, 0.56, 0.8, 0.019), kernels=[
            kernel("roof: copy f32", 1.0), kernel("add", 0.85), kernel("clip_factor", 0.001, work=20.0),
            kernel("matmul qkv", 0.2, "TFLOP/s")])
        self.assertEqual(verdicts, ["met"] * 9)
        self.assertEqual(said[KERNELS]["measured"], "1 of 1 kernels, of 1000.0 GB/s by tessera's copy")
        self.assertEqual(said[JITTER]["measured"], "124M 1.9%, 350M 0.1%")

    def test_some_missed(self):
        verdicts, said = self.verdicts(gpt2=gpt2(1.1, 0.99, 0.5, 0.81, 0.02), kernels=[
            kernel("roof: copy f32", 1.0), kernel("add", 0.9), kernel("gelu_forward", 0.7)])
        self.assertEqual(verdicts, ["met", "missed", "missed", "missed", "met", "missed", "missed", "missed", "missed"])
        self.assertEqual(said[SPEED]["measured"], "1.100x at B=96")
        self.assertEqual(said[MEMORY]["measured"], "124M 0.810x, 350M 0.400x")
        self.assertEqual(said[KERNELS]["measured"], "1 of 2 kernels, of 1000.0 GB/s by tessera's copy; gelu_forward 70.0%")

    def test_the_roof_is_the_faster_copy(self):
        kernels = [kernel("roof: copy f32", 1.0), kernel("add", 0.9), kernel("gelu_forward", 0.94), kernel("matmul qkv", 0.2, "TFLOP/s")]
        for torch, roof, verdict, add in ((1100.0, "1100.0 GB/s by PyTorch's copy", "missed", "; add 81.8%"),
                                          (1000.0, "1000.0 GB/s by tessera's copy", "met", ""),
                                          (500.0, "1000.0 GB/s by tessera's copy", "met", "")):
            roofs = dict(peer="torch 2", copy_gb_s=torch, product_tflop_s=700.0)
            verdicts, said = self.verdicts(kernels=kernels, roofs=roofs)
            self.assertEqual(verdicts[KERNELS], verdict)
            counted = "1 of 2" if add else "2 of 2"
            self.assertEqual(said[KERNELS]["measured"], f"{counted} kernels, of {roof}{add}")

    def test_roofs_measured_by_pytorch_only(self):
        own = dict(kernel("add", 0.9), share_of_roof=0.0)  # copy not measured by tessera
        verdicts, said = self.verdicts(kernels=[own], roofs=dict(copy_gb_s=1000.0, product_tflop_s=700.0))
        self.assertEqual((verdicts[KERNELS], said[KERNELS]["measured"]), ("met", "1 of 1 kernels, of 1000.0 GB/s by PyTorch's copy"))
        self.assertEqual(self.verdicts(kernels=[own])[0][KERNELS], "not measured")

    def test_incomplete_kernels_can_only_miss(self):
        roof, fast, slow = kernel("roof: copy f32", 1.0), kernel("add", 0.9), kernel("gelu_forward", 0.7)
        for kernels, verdict in (([roof, fast], "not measured"), ([roof, fast, slow], "missed")):
            verdicts, said = self.verdicts("timeout", kernels=kernels)
            self.assertEqual(verdicts[KERNELS], verdict)
            self.assertIn("others were not measured", said[KERNELS]["measured"])

    def test_an_uncompiled_peer_is_ignored(self):
        verdicts, _ = self.verdicts(gpt2=dict(gpt2(2.0, 2.0, 0.56, 0.5, 0.01), compiled=False))
        for target in (SPEED, SPEED_GOAL, BF16_SPEED, BF16_GOAL, MEMORY):
            self.assertEqual(verdicts[target], "not measured")
        self.assertEqual(verdicts[MFU], "met")

    def test_without_pytorch(self):
        alone = gpt2(1.0, 1.0, 0.5, 0.5, 0.01)
        verdicts, _ = self.verdicts(gpt2=dict(alone, ratios=[]))
        self.assertEqual(verdicts, ["not measured"] * 4 + ["met", "missed", "not measured", "not measured", "met"])


if __name__ == "__main__":
    unittest.main()
