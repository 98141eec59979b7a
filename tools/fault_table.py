#!/usr/bin/env python3
"""Every fault that a run must survive or name, tried: one table.

  fault_table.py BUILD_DIR [--only runs|saves|others ...] [--jobs N] [--markdown FILE]
  fault_table.py BUILD_DIR --check

runs and saves are the campaigns of tests/faults (their own tables are printed as they go, N of their runs go on at once); others
are the tests that show what campaigns do not, by their names. The table has a row for each fault:

  ranks    of the runs
  runs     that were tried, or bits flipped, or power cuts; of a test that is no campaign all runs that it makes, those to compare
           with included
  longest  from the fault until the last process was gone, without what the host of a virtual machine withheld; of a campaign
  broken   runs of a campaign, or tests, in which something was not as promised

--check only says whether all the tests are there. Exit code 0, or 1 if something is broken or missing; what cannot be tried here,
as networks without root, is said in its row and is no failure.
tools/faults.sh builds what this runs, and calls it.
"""
import argparse, collections, json, os, re, subprocess, sys, tempfile

Row = collections.namedtuple("Row", "fault promise campaign tests")
COMMIT = {"save/index-written", "save/renamed", "save/committed", "commit"}


def saves(point):
    return point.startswith("save") or point == "commit"


def kinds(*names):
    return lambda fault, point: fault in names


CAMPAIGNS = {
    "runs": [("faults/fault_tests", "a rank that fails at any point of a run is named by all others, in time")],
    "saves": [("faults/fault_tests", "whatever call of a save a rank is killed at, the old or the new checkpoint is whole"),
              ("faults/fault_tests", "whatever call of a save fails, rank and file are named and training goes on"),
              ("faults/fault_tests", "a rank that stands still in a save is named, and the former checkpoint stands"),
              ("faults/fault_tests", "the log of a save misses nothing: repeated, it gives what the run left"),
              ("faults/fault_tests", "whatever a power cut leaves of a save, the old or the new checkpoint is whole"),
              ("faults/fault_tests", "a save that leaves out a sync loses to a power cut")]}
ROWS = [
    Row("a rank is killed in a step, in a collective, at the start, while loading", "3 s; all name it, the signal and the phase",
        lambda fault, point: fault == "kill" and not saves(point), []),
    Row("a rank is killed while it saves", "3 s; the former checkpoint stands",
        lambda fault, point: fault.startswith("kill") and saves(point) and point not in COMMIT,
        [("faults/fault_tests", "founding case: a save during which a rank dies or sleeps")]),
    Row("a rank is killed in the commit", "the old or the new checkpoint, never a mix",
        lambda fault, point: fault.startswith("kill") and point in COMMIT, []),
    Row("a rank ends by an abort or an exit of its own", "3 s; all name it, and how it ended", kinds("abort", "exit"), []),
    Row("the power is cut during a save", "the old or the new checkpoint, never a mix", kinds("power cut"), []),
    Row("only one rank is asked to save and stop", "all agree on it at the step's end", None,
        [("e2e/e2e_restart_tests", "SIGUSR1 of one rank stops all at the same step, with one checkpoint")]),
    Row("a rank is stopped", "5 s; all name it as stopped", kinds("stop"), []),
    Row("a rank hangs while its heart beats", "the deadline of what the others wait for; all name it", None,
        [("faults/fault_tests", "a rank that hangs while its heart beats is named at the deadline of the wait for it")]),
    Row("a rank is slow", "a warning names it; nobody is ended", None,
        [("faults/fault_tests", "a slow rank is named, and nobody is ended for it")]),
    Row("no space, or a file system that is read-only", "bytes needed and free are named; training goes on, or stops if so told",
        kinds("ENOSPC", "EROFS"),
        [("faults/fault_tests", "founding case: a save for which there is no space"),
         ("e2e/e2e_tests", "a rank that cannot write is named, and training goes on until it can"),
         ("e2e/e2e_tests", "after a save that failed a run goes on or stops, as it was told")]),
    Row("a call of a save fails, is interrupted, or does half", "rank and file are named; the former checkpoint stands",
        kinds("EIO", "EINTR", "short"), []),
    Row("a network file system shows files late", "waited for a second, then passed over by name", None,
        [("e2e/e2e_tests", "a shard that a network file system shows late is waited for, but not for long")]),
    Row("a bit of a checkpoint flips", "file and tensor are named; the checkpoint before is taken", None,
        [("io/io_checkpoint_tests", "every flipped bit is detected, with its file and tensor"),
         ("e2e/e2e_tests", "what one rank cannot read takes all ranks to the checkpoint before it")]),
    Row("two jobs have one run directory", "the second is refused, and told who holds it", None,
        [("e2e/e2e_tests", "a run directory belongs to one run, and to one job at a time")]),
    Row("NaN or Inf in a gradient", "rank and parameter are named before the update; skip, or stop", None,
        [("e2e/e2e_restart_tests", "a step that is not finite stops the run, and all ranks name the same"),
         ("e2e/e2e_restart_tests", "steps that are not finite are skipped, ten in a row at most")]),
    Row("a rank is out of memory", "3 s; request and ledger are printed, all name it", kinds("memory"),
        [("e2e/e2e_restart_tests", "a rank without memory ends all within 3 s, and all name it")]),
    Row("a run needs more memory than there is", "refused before it takes any, with what would help", None,
        [("faults/fault_tests", "founding case: a run that needs more memory than there is is refused before it takes any"),
         ("faults/fault_tests", "founding case: a precision that needs too much memory is told, with what would do")]),
    Row("another number of ranks when going on", "it goes on", None,
        [("e2e/e2e_tests", "a run saved by two, three or four ranks goes on with one to four")]),
    Row("the optimizer is to go on from weights alone", "one sentence: what to do", None,
        [("faults/fault_tests", "founding case: weights alone are saved, and a run goes on from them and is fine-tuned")]),
    Row("a rank is started otherwise than the others", "refused at the start; field and rank are named", None,
        [("tools/tools_fingerprint_tests", "a field of the configuration that one rank has differently is named, whichever it is"),
         ("tools/tools_fingerprint_tests", "version, build and device are compared, and all that differs is told at once"),
         ("faults/fault_tests", "founding case: a rank that would call in another order is refused at the start")]),
    Row("ranks call different collectives", "refused before data moves; all name the odd one", None,
        [("comm/comm_test", "processes that disagree all say so, before data move, and name the odd one"),
         ("comm/comm_test", "a mismatch of sizes ends in an error on all ranks, not in the end of the process")]),
    Row("a rank never comes to the start", "the deadline; arrived and missing ranks are named", None,
        [("faults/fault_tests", "founding case: a start to which one rank never comes"),
         ("e2e/e2e_tests", "a rank that never arrives is named at the deadline")]),
    Row("a rank comes late to the start", "it is waited for", None,
        [("faults/fault_tests", "a rank that comes late is waited for"),
         ("faults/fault_tests", "founding case: ranks that start in any order, some late, all meet")]),
    Row("a port is taken, or a former run's store is there", "both are passed over", None,
        [("faults/fault_tests", "ports that others hold, and a store of a former run, are passed over")]),
    Row("SIGTERM, of the launcher or of any rank", "agreed on at the step's end, saved, exit code 143", None,
        [("e2e/e2e_tests", "SIGTERM ends a run after a step with a checkpoint, and nothing is lost"),
         ("e2e/e2e_restart_tests", "a request to stop at any moment of the start is no failure of a rank")]),
    Row("hostile clients of the control port", "none joins, and the run is the same to the bit", None,
        [("e2e/e2e_tests", "hundreds of hostile clients during training: none joins, and the losses are the same"),
         ("comm/control/comm_control_test", "ten thousand hostile connections: none joins, none takes a rank's place or time")]),
    Row("a rank dies at the same place twice", "with --min-nproc the run goes on without it", None,
        [("faults/fault_tests", "a rank that dies twice at the same place is done without, and its checkpoint is not")]),
    Row("the launcher dies, or is stopped", "the ranks end, and say so", None,
        [("e2e/e2e_tests", "ranks do not outlive their launcher"),
         ("e2e/e2e_tests", "ranks whose launcher is stopped say so, all the same, and end")]),
    Row("the network is cut, lossy or slow", "all end and name who is cut off; what passes changes nothing", None,
        [("e2e/e2e_network_tests", "a rank whose network is cut is named by all others, and all end"),
         ("e2e/e2e_network_tests", "two ranks that no longer reach each other are named, by all"),
         ("e2e/e2e_network_tests", "two ranks that can't connect to each other are named, by all"),
         ("e2e/e2e_network_tests", "a rank that was never reached is missing, and learns so itself"),
         ("e2e/e2e_network_tests", "a network that is bad for a while changes nothing")])]


def listed(program):
    output = subprocess.run([program, "--list-test-cases"], capture_output=True, text=True, check=True).stdout
    return {" ".join(line.split()) for line in output.splitlines()}


def missing_tests(build):
    names = {}
    for program, name in [test for row in ROWS for test in row.tests] + sum(CAMPAIGNS.values(), []):
        if program not in names:
            path = f"{build}/tests/{program}"
            names[program] = listed(path) if os.path.exists(path) else set()
        if name not in names[program]:
            yield f"{program}: no test '{name}'"


class Trial:
    """Lines of a log, and what became of the tests that wrote it."""

    def __init__(self, build, tests, folder, jobs, show=False):
        self.broken, self.skipped, log = [], False, f"{folder}/{len(os.listdir(folder))}"
        variables = {"TESSERA_FAULT_LOG": log, "TESSERA_FAULT_POINTS": "all", "TESSERA_FAULT_JOBS": str(jobs), "TESSERA_BIT_FLIPS": "10000"}
        for program, name in tests:
            # A comma would end the pattern.
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
    # A campaign's runs are counted by their faults, those of other tests as they start.
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
    parser.add_argument("--markdown", metavar="FILE", help="where the table goes, beside standard output")
    parser.add_argument("--check", action="store_true")
    o = parser.parse_args()
    missing = list(missing_tests(o.build))
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
