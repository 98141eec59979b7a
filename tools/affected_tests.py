#!/usr/bin/env python3
"""Selects the unit tests of changed files, for tools/test.sh --quick.

usage: tools/affected_tests.py BUILD_DIR STAMP

Prints the ctest names of the tests of files newer than STAMP. tests/ mirrors the tree: kernels/cpu/norm.cpp is tested by
tests/kernels/*norm*_test.cpp; without such a test, by all tests of the closest folder that has tests. Prints all tests if STAMP
is missing or build files changed.
"""
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def unit_tests(build):
    """{source file in tests/: ctest name}"""
    listing = subprocess.run(["ctest", "--test-dir", build, "-L", "^unit$", "--show-only=json-v1"],
                             capture_output=True, text=True, check=True).stdout
    tests = {}
    for test in json.loads(listing)["tests"]:
        folder = next(p["value"] for p in test["properties"] if p["name"] == "WORKING_DIRECTORY")
        folder = pathlib.Path(folder).relative_to(pathlib.Path(build).resolve())
        file = folder / f"{test['name'].split('.', 1)[-1]}.cpp"
        if (ROOT / file).exists():
            tests[file.as_posix()] = test["name"]
    return tests


def mirrored(path, tests):
    if path.as_posix() in tests:
        return {tests[path.as_posix()]}
    folder = path.parent if path.parts[0] == "tests" else "tests" / path.parent
    if path.parts[0] != "tests":
        top = f"tests/{path.parts[0]}/"
        named = {name for file, name in tests.items() if file.startswith(top) and path.stem in pathlib.Path(file).stem}
        if named:
            return named
    while folder != pathlib.PurePath("."):
        inside = {name for file, name in tests.items() if file.startswith(f"{folder.as_posix()}/")}
        if inside:
            return inside
        folder = folder.parent
    return set()


def main():
    build, stamp = sys.argv[1], pathlib.Path(sys.argv[2])
    tests = unit_tests(build)
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    since = stamp.stat().st_mtime if stamp.exists() else 0
    changed = [pathlib.PurePath(name) for name in names
               if (ROOT / name).exists() and (ROOT / name).stat().st_mtime > since]
    if since == 0 or any(path.name in ("CMakeLists.txt", "CMakePresets.json") or path.suffix == ".cmake" for path in changed):
        affected = set(tests.values())
    else:
        code = [path for path in changed if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
        affected = set().union(*(mirrored(path, tests) for path in code))
    print("\n".join(sorted(affected)))


if __name__ == "__main__":
    main()
