#!/usr/bin/env python3
"""Injects every fault that a run must survive or report, and prints a table.

  fault_table.py BUILD_DIR [--only runs|saves|others ...] [--jobs N] [--markdown FILE]
  fault_table.py BUILD_DIR --check

The parts `runs` and `saves` are the campaigns of tests/faults, which print their own tables and run N trials in parallel; `others`
are the tests of the remaining faults. The table has one row per fault:

  ranks    numbers of ranks
  runs     runs, bit flips, or power cuts; for tests outside of a campaign all runs, including reference runs
  longest  time from the fault until the last process exited, without CPU time withheld by the host; campaigns only
  broken   campaign runs or tests that neither survived nor reported the fault

--check only verifies that every test of the table exists. Exit code 0, or 1 if something is broken or missing. Tests that
this machine skips (network faults without root) are marked and don't count as broken.
"""
import argparse, collections, json, os, pathlib, re, subprocess, sys, tempfile

Row = collections.namedtuple("Row", "fault promise campaign tests")
COMMIT = {"save/index-written", "save/renamed", "save/committed", "commit"}


def saves(point):
    return point.startswith("save") or point == "commit"


def kinds(*names):
    return lambda fault, point: fault in names


CAMPAIGNS = {
    "runs": [("faults/fault_tests", "a rank that fails at any point of a run is named by all others, in time")],
    "saves": [("faults/fault_tests", "a rank is killed at any call of a save: the old or the new checkpoint is valid"),
              ("faults/fault_tests", "any call of a save fails: rank and file are named, and training continues"),
              ("faults/fault_tests", "a rank stopped during a save is named, and the previous checkpoint stays valid"),
              ("faults/fault_tests", "the log of a save is complete: replayed, it gives the run's files"),
              ("faults/fault_tests", "after a power cut at any point of a save, the old or the new checkpoint is valid"),
              ("faults/fault_tests", "a save that skips a sync loses data in a power cut")]}
ROWS = [
    Row("a rank is killed in a step, a collective, the start, or a load", "3 s; all name it, the signal and the phase",
        lambda fault, point: fault == "kill" and not saves(point), []),
    Row("a rank is killed while it saves", "3 s; the previous checkpoint stays valid",
        lambda fault, point: fault.startswith("kill") and saves(point) and point not in COMMIT, []),
    Row("a rank is killed during a commit", "the old or the new checkpoint, never a mix",
        lambda fault, point: fault.startswith("kill") and point in COMMIT, []),
    Row("a rank aborts or exits by itself", "3 s; all name it, and how it ended", kinds("abort", "exit"), []),
    Row("power cut during a save", "the old or the new checkpoint, never a mix", kinds("power cut"), []),
    Row("only one rank is asked to save and stop", "all ranks agree on it after the step", None,
        [("e2e/e2e_restart_tests", "SIGUSR1 to one rank stops all ranks at the same step, with one checkpoint")]),
    Row("a rank is stopped (SIGSTOP)", "5 s; all name it as stopped", kinds("stop"), []),
    Row("a rank hangs while its heartbeat continues", "the deadline of the wait; all name it", None,
        [("faults/fault_tests", "a rank that hangs while its heartbeat continues is named at the deadline of the others' wait")]),
    Row("a rank is slow", "a warning names it; the run continues", None,
        [("faults/fault_tests", "a slow rank is named, and no rank is ended for it")]),
    Row("disk full, or file system read-only", "bytes needed and free are named; training continues, or stops by configuration",
        kinds("ENOSPC", "EROFS"),
        [("faults/fault_tests", "founding case: a save for which there is no space"),
         ("e2e/e2e_tests", "a rank that cannot write is named, and training goes on until it can"),
         ("e2e/e2e_tests", "after a failed save a run continues or stops, as configured")]),
    Row("a system call of a save fails, is interrupted, or is short", "rank and file are named; the previous checkpoint stays valid",
        kinds("EIO", "EINTR", "short"), []),
    Row("a network file system shows files late", "wait of one second, then skipped by name", None,
        [("e2e/e2e_tests", "a shard that a network file system shows late is waited for, but not for long")]),
    Row("a bit of a checkpoint flips", "file and tensor are named; the previous checkpoint is loaded", None,
        [("io/io_tests", "every flipped bit is detected, with its file and tensor"),
         ("e2e/e2e_tests", "if one rank cannot read a checkpoint, all ranks load the previous one")]),
    Row("two jobs use one run directory", "the second is refused, and learns the holder", None,
        [("e2e/e2e_tests", "a run directory belongs to one run, and to one job at a time")]),
    Row("NaN or Inf in a gradient", "rank and parameter are named before the update; skip or stop", None,
        [("e2e/e2e_restart_tests", "a non-finite step stops the run, and all ranks report the same"),
         ("e2e/e2e_restart_tests", "non-finite steps are skipped, at most ten in a row")]),
    Row("a rank runs out of memory", "3 s; request and ledger are printed, all name it", kinds("memory"),
        [("e2e/e2e_restart_tests", "out of memory on one rank ends all within 3 s, and all name it")]),
    Row("a run needs more memory than exists", "refused before any allocation, with advice", None,
        [("faults/fault_tests", "founding case: a run that needs more memory than there is is refused before it takes any"),
         ("faults/fault_tests", "founding case: a precision that needs too much memory is told, with what would do")]),
    Row("another number of ranks at resume", "it resumes", None,
        [("e2e/e2e_tests", "a run saved by two, three or four ranks resumes on one to four")]),
    Row("resuming the optimizer from weights alone", "one sentence that says what to do", None,
        [("faults/fault_tests", "founding case: weights alone are saved, and a run goes on from them and is fine-tuned")]),
    Row("a rank is started with another configuration", "refused at the start; field and rank are named", None,
        [("tools/tools_train_tests", "a field of the configuration that one rank has differently is named, whichever it is"),
         ("tools/tools_train_tests", "version, build and device are compared, and all that differs is told at once"),
         ("faults/fault_tests", "founding case: a rank that would call in another order is refused at the start")]),
    Row("ranks call different collectives", "refused before data moves; all name the odd rank", None,
        [("comm/comm_test", "processes that disagree all say so, before data move, and name the odd one"),
         ("comm/comm_test", "ranks that disagree all throw the same error, before the odd one's data moves")]),
    Row("a rank never arrives at the start", "the deadline; arrived and missing ranks are named", None,
        [("faults/fault_tests", "founding case: a start to which one rank never comes")]),
    Row("a rank arrives late at the start", "the others wait for it", None,
        [("faults/fault_tests", "a rank that arrives late is waited for")]),
    Row("a port is taken, or an earlier run's store answers", "both are skipped", None,
        [("faults/fault_tests", "ports that others hold, and a store of a former run, are passed over")]),
    Row("SIGTERM of the launcher or of any rank", "stop after the same step, save, exit code 143", None,
        [("e2e/e2e_tests", "SIGTERM ends a run after a step with a checkpoint, and nothing is lost"),
         ("e2e/e2e_restart_tests", "a stop request during the start does not count as a failure")]),
    Row("hostile clients on the control port", "none joins; results are identical bit for bit", None,
        [("e2e/e2e_tests", "hundreds of hostile clients during training: none joins, and the losses are the same"),
         ("comm/control/comm_control_test", "ten thousand hostile connections: none joins, none takes a rank's place or time")]),
    Row("a rank dies twice at the same place", "with --min-nproc the run continues without it", None,
        [("faults/fault_tests", "a rank that dies twice at the same place is dropped, and its checkpoint data are kept")]),
    Row("the launcher dies or is stopped", "the ranks exit, and say so", None,
        [("e2e/e2e_tests", "ranks do not outlive their launcher"),
         ("e2e/e2e_tests", "ranks whose launcher is stopped exit with the same error")]),
    Row("the network is cut, lossy or slow", "all exit and name who is unreachable; short disturbances change nothing", None,
        [("e2e/e2e_network_tests", "a rank whose network is cut is named by all others, and all end"),
         ("e2e/e2e_network_tests", "if two ranks lose their connection, all ranks name the same one"),
         ("e2e/e2e_network_tests", "if two ranks can't connect, all ranks name the same one"),
         ("e2e/e2e_network_tests", "an unreachable rank is reported at the start by all ranks, including itself"),
         ("e2e/e2e_network_tests", "a temporary network disturbance changes nothing")])]


def missing_tests():
    """Tests of the table that don't exist in the sources."""
    sources = pathlib.Path(__file__).resolve().parents[1] / "tests"
    # Join adjacent literals of long names.
    text = "".join(re.sub(r'"\s*"', "", path.read_text()) for path in sources.rglob("*_test.cpp"))
    for program, name in [test for row in ROWS for test in row.tests] + sum(CAMPAIGNS.values(), []):
        if f'"{name}"' not in text:
            yield f"{program}: no test '{name}'"


class Trial:
    """Runs tests and keeps the lines of their log and the names of failed ones."""

    def __init__(self, build, tests, folder, jobs, show=False):
        self.broken, self.skipped, log = [], False, f"{folder}/{len(os.listdir(folder))}"
        variables = {"TESSERA_FAULT_LOG": log, "TESSERA_FAULT_POINTS": "all", "TESSERA_FAULT_JOBS": str(jobs), "TESSERA_BIT_FLIPS": "10000"}
        for program, name in tests:
            # doctest separates patterns by commas.
            words = [f"{build}/tests/{program}", "--test-case=" + name.replace(",", "?")]
            process = subprocess.Popen(words, env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output = ""
            for line in process.stdout:
                output += line
                if show and line.startswith("| "):
                    print(line, end="", flush=True)
            ran = re.search(r"test cases:\s*(\d+)", output)
            self.skipped |= "skipped: " in output
            if process.wait() != 0 or not ran or ran[1] != "1":
                self.broken.append(name)
                print(f"{program}: {name}: exit code {process.returncode}\n{output}", file=sys.stderr)
        open(log, "a").close()
        with open(log) as f:
            self.lines = [json.loads(line) for line in f]


def row_text(row, campaign, trial):
    faults = [line for line in campaign if row.campaign and row.campaign(line["fault"], line["point"])]
    runs = trial.lines if trial else []
    # Campaigns log one line per fault, other tests one per started run.
    number = sum(line.get("count", 1) for line in faults) + round(sum(line.get("share", line.get("count", 0)) for line in runs))
    broken = sum(1 for line in faults if line["wrong"]) + (len(trial.broken) if trial else 0)
    worlds = sorted({line["world"] for line in faults + runs if line["world"] > 1})
    longest = max((line["ms"] for line in faults + runs if "ms" in line), default=None)
    cells = [row.fault, row.promise, ", ".join(map(str, worlds)) or "-", f"{number}" if number else "-",
             "-" if longest is None else f"{longest / 1e3:.1f} s", "skipped here" if trial and trial.skipped else str(broken)]
    return "| " + " | ".join(cells) + " |", broken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--only", choices=("runs", "saves", "others"), nargs="+", default=["runs", "saves", "others"])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--markdown", metavar="FILE", help="also write the table to this file")
    parser.add_argument("--check", action="store_true")
    o = parser.parse_args()
    missing = list(missing_tests())
    if missing or o.check:
        sys.exit("\n".join(missing) if missing else 0)

    broken, campaign, tried = 0, [], set(o.only)
    with tempfile.TemporaryDirectory() as folder:
        for part, heads in (("runs", "runs | not named by all | other exit code | lost | late | worst time | withheld"),
                            ("saves", "points | lost | mixed | wrong culprit | other result | late | worst time")):
            if part not in tried:
                continue
            print(f"\n| fault | {heads} |\n" + "| --- " * (heads.count("|") + 2) + "|", flush=True)
            trial = Trial(o.build, CAMPAIGNS[part], folder, o.jobs, show=True)
            broken += len(trial.broken)
            campaign += [line for line in trial.lines if "fault" in line]
        table = ["| fault | promise | ranks | runs | longest | broken |", "| --- | --- | --- | --- | --- | --- |"]
        print("\n" + "\n".join(table), flush=True)
        for row in ROWS:
            trial = Trial(o.build, row.tests, folder, o.jobs) if "others" in tried and row.tests else None
            if not trial and not any(row.campaign and row.campaign(line["fault"], line["point"]) for line in campaign):
                continue
            text, wrong = row_text(row, campaign, trial)
            broken += wrong
            table.append(text)
            print(text, flush=True)
    if o.markdown:
        with open(o.markdown, "w") as f:
            f.write("\n".join(table) + "\n")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
