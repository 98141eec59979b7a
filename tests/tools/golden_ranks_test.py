#!/usr/bin/env python3
"""Tests tools/bench/golden_ranks.py with a fake tessera: failures and skipped runs."""
import json, os, pathlib, subprocess, sys, tempfile, unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench" / "golden_ranks.py"
PROGRAM = f"#!{sys.executable}\n" + r'''
import json, os, sys, time
keys = dict(word[2:].split("=", 1) for word in sys.argv[2:] if word.startswith("--") and "=" in word)
expected = json.load(open(keys["model.init_from"] + "/expected.json"))
nccl = keys.get("comm.backend") == "nccl"
kind = os.environ["KIND"] if nccl or os.environ["KIND"] == "hangs always" else "works"
if kind == "does not start":
    sys.exit(print("tessera: NCCL 2.28.3 does not start on rank 1: a reason") or 4)
if kind == "late":
    sys.exit(print("E043 step=1 phase=all_gather#3 culprit=rank 1 action=x: a reason") or 4)
if kind == "crashes":
    sys.exit(139)
if kind.startswith("hangs"):
    time.sleep(60)
if nccl and "--rank" in sys.argv and sys.argv[sys.argv.index("--rank") + 1] != "0":
    sys.exit(0)
with open(keys["run.out"] + "/metrics.jsonl", "w") as f:
    for loss, norm in zip(expected["loss"], expected["grad_norm"]):
        f.write(json.dumps({"loss": loss * (2 if kind == "is wrong" else 1), "grad_norm": norm}) + "\n")
'''


class GoldenRanks(unittest.TestCase):
    def run_all(self, kind, *arguments):
        """Exit code, and results over NCCL by precision and world size: True, False or the reason for skipping."""
        with tempfile.TemporaryDirectory() as folder:
            program, results = pathlib.Path(folder, "bin", "tessera"), pathlib.Path(folder, "ranks.json")
            program.parent.mkdir()
            program.write_text(PROGRAM)
            program.chmod(0o755)
            ran = subprocess.run([sys.executable, "-B", SCRIPT, folder, "--json", results, *arguments], env=dict(os.environ, KIND=kind),
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
            rows = json.loads(results.read_text())
            for row in rows:
                if "skipped" in row:
                    self.assertIn(f"skipped: {row['skipped']}", ran.stdout)
            return ran.returncode, {f"{r['precision']} {r['world']}": r.get("skipped", r["ok"]) for r in rows if r["backend"] == "nccl"}

    def test_all_passed(self):
        self.assertEqual(self.run_all("works"), (0, {"fp32 2": True, "fp32 4": True, "bf16 2": True, "bf16 4": True}))

    def test_nccl_without_support_for_a_shared_gpu_is_skipped(self):
        for kind, why in (("does not start", "NCCL 2.28.3 does not start on rank 1"), ("late", "E043 step=1")):
            code, results = self.run_all(kind)
            self.assertEqual(code, 0)
            self.assertIn(why, results["fp32 2"])
            for later in ("fp32 4", "bf16 2", "bf16 4"):  # not run
                self.assertEqual(results[later], "2 ranks were, too")

    def test_with_a_gpu_per_rank_nothing_is_skipped(self):
        code, results = self.run_all("does not start", "--gpus", "4", "--precision", "fp32")
        self.assertEqual((code, results), (1, {"fp32 2": False, "fp32 4": False}))

    def test_wrong_values_and_crashes_fail(self):
        for kind in ("is wrong", "crashes"):
            self.assertEqual(self.run_all(kind, "--precision", "fp32"), (1, {"fp32 2": False, "fp32 4": False}))

    def test_out_of_time_is_skipped(self):
        code, results = self.run_all("hangs always", "--limit", "2", "--seconds", "1.5", "--precision", "fp32")
        self.assertEqual((code, results), (1, {"fp32 2": "no time was left", "fp32 4": "no time was left"}))


if __name__ == "__main__":
    unittest.main()
