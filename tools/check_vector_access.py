#!/usr/bin/env python3
"""Checks in PTX that memory-bound kernels move 16 bytes at a time.

    tools/check_vector_access.py kernels/cuda/expected_code.txt FILE.ptx...

Fails if no basic block of a kernel has as many 128-bit loads or stores of global memory as the table says, if a block accesses 4
adjacent elements one by one, or if a row of the table fits no kernel.
"""
import collections
import re
import subprocess
import sys

ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s.*\[(%\w+)(?:\+(-?\d+))?\]")
NAMES = {"ld": "loads", "st": "stores"}


def read_table(path):
    """Rows of (part of a kernel's name, expected loads, expected stores)."""
    with open(path) as file:
        rows = [line.split(None, 3) for line in file if line[0].isdigit()]
    return [(part.strip(), int(loads), int(stores)) for _, loads, stores, part in rows]


def read_kernels(path):
    """Yields name and basic blocks of each kernel."""
    with open(path) as file:
        text = subprocess.run(["c++filt"], stdin=file, capture_output=True, text=True, check=True).stdout
    for entry in re.split(r"^.*\.entry ", text, flags=re.M)[1:]:
        name, _, body = entry.partition("\n")
        name = re.sub(r"tessera::(kernels::(cuda::)?)?|\(anonymous namespace\)::", "", name.rstrip("("))
        yield name, re.split(r"^\$\w+:|\sbra\s", body.split("\n}")[0], flags=re.M)


def problems(blocks, expected):
    """@param expected  128-bit accesses, by kind"""
    most = {kind: 0 for kind in expected}
    for block in blocks:
        wide = collections.Counter()
        single = set()
        for kind, elements, bits, base, offset in ACCESS.findall(block):
            if int(elements or 1) * int(bits) == 128:
                wide[kind] += 1
            elif not elements:
                single.add((kind, int(bits) // 8, base, int(offset or 0)))
        most = {kind: max(most[kind], wide[kind]) for kind in most}
        for kind, size, base, offset in single:
            if all((kind, size, base, offset + i * size) in single for i in range(4)):
                yield f"{NAMES[kind]} 4 adjacent elements of {size} bytes one by one"
    for kind, count in expected.items():
        if most[kind] < count:
            yield f"{most[kind]} 128-bit {NAMES[kind]} in a basic block, not {count}"


def main(table, *files):
    kernels = [kernel for path in files for kernel in read_kernels(path)]
    found = []
    for part, loads, stores in read_table(table):
        fitting = [kernel for kernel in kernels if part in kernel[0]]
        if not fitting:
            found.append(f"{part}: no such kernel; was it renamed?")
        for name, blocks in fitting:
            found += [f"{name}: {problem}" for problem in problems(blocks, {"ld": loads, "st": stores})]
    for line in dict.fromkeys(found):
        print(line)
    print(f"{len(kernels)} kernels in {len(files)} files, {len(found)} problems; expected: {table}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
