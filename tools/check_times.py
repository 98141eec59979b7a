#!/usr/bin/env python3
"""Shows where tools/test.sh spends time: compile seconds by folder, slowest objects, slowest tests.

usage: tools/check_times.py [--top N] [BUILD_DIR...]     (default: all of build/*)

Reads .ninja_log and tests*.xml of a build directory. Seconds are wall time of one job; with one job per
CPU they are close to CPU seconds. Objects from ccache count with the time of the cache hit.
"""
import argparse
import collections
import pathlib
import re
import xml.etree.ElementTree as xml


def compile_seconds(build):
    """{output: seconds of its newest build}"""
    seconds = {}
    log = build / ".ninja_log"
    for line in log.read_text().splitlines() if log.exists() else []:
        fields = line.split("\t")
        if len(fields) == 5:
            seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return seconds


def test_seconds(build):
    seconds = {}
    for report in sorted(build.glob("tests*.xml")):
        for case in xml.parse(report).iter("testcase"):
            seconds[case.get("name")] = float(case.get("time"))
    return seconds


def folder(output):
    """comm/control for comm/CMakeFiles/tessera_comm.dir/control/socket.cpp.o"""
    return re.sub(r"/?CMakeFiles/[^/]*\.dir", "", str(pathlib.PurePath(output).parent)) or "."


def table(title, rows, top):
    print(f"\n{title}")
    for name, value in sorted(rows.items(), key=lambda row: -row[1])[:top]:
        print(f"{value:9.1f} s  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=30, help="rows of each table (default 30)")
    parser.add_argument("builds", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    builds = arguments.builds or sorted(path.parent for path in pathlib.Path("build").glob("*/.ninja_log"))
    objects, tests, folders = {}, {}, collections.Counter()
    print(f"{'build':<12} {'outputs':>8} {'compile s':>10} {'tests':>6} {'test s':>8}")
    for build in builds:
        compiled, tested = compile_seconds(build), test_seconds(build)
        print(f"{build.name:<12} {len(compiled):8d} {sum(compiled.values()):10.1f} {len(tested):6d} "
              f"{sum(tested.values()):8.1f}")
        for output, seconds in compiled.items():
            objects[f"{build.name}: {output}"] = seconds
            folders[f"{build.name}: {folder(output)}"] += seconds
        tests.update({f"{build.name}: {name}": seconds for name, seconds in tested.items()})
    table("compile seconds by folder", folders, arguments.top)
    table("slowest objects", objects, arguments.top)
    table("slowest tests", tests, arguments.top)


if __name__ == "__main__":
    main()
