#!/usr/bin/env python3
"""Writes libraries to link with, so that the result runs with an older glibc than this system's.

    c++ $(tools/older_glibc.py OUT 2.28) ...

Programs are bound to the newest version of each function that glibc has when they are linked. The libraries in OUT
define the functions of this system's glibc in the newest version up to the given one, and no code. Younger functions are
compiled from older_glibc.cpp beside this file. Prints flags for the linker.
"""

import re
import subprocess
import sys
from pathlib import Path


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removeprefix("GLIBC_").split(".")))


def symbols_of(library: str, newest: tuple[int, ...]) -> dict[str, tuple[str, str, int]]:
    """Version, type and size of each symbol."""
    listed = subprocess.run(["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True)
    found: dict[str, tuple[str, str, int]] = {}
    for line in listed.stdout.splitlines():
        row = re.match(r" *\d+: \w+ +(\w+) (\w+) +\w+ +\w+ +(\w+) (\w+)@@?(GLIBC_[\d.]+)$", line)
        if not row or row[3] == "UND" or row[2] == "TLS" or number(row[5]) > newest:
            continue
        size, kind, _, name, version = row.groups()
        if name not in found or number(found[name][0]) < number(version):
            found[name] = version, kind, int(size, 0)
    return found


def build(soname: str, symbols: dict[str, tuple[str, str, int]], out: Path) -> None:
    lines, names = [], {}
    for name, (version, kind, size) in symbols.items():
        section, kind = (".bss", "object") if kind == "OBJECT" else (".text", "function")
        lines += [section, f".globl {name}", f".type {name}, @{kind}", f".size {name}, {size}", f"{name}: .skip {max(size, 1)}"]
        names.setdefault(version, []).append(name)
    versions = "".join(f"{version} {{ {'; '.join(names[version])}; }};\n" for version in sorted(names, key=number))
    (out / "stub.s").write_text("\n".join(lines) + '\n.section .note.GNU-stack, ""\n')
    (out / "stub.map").write_text(versions)
    subprocess.run(["cc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", *([f"-Wl,--version-script={out}/stub.map"] if versions else []),
                    out / "stub.s", "-o", out / soname], check=True)


def main() -> None:
    out, newest = Path(sys.argv[1]).resolve(), number(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)

    def path_of(name: str) -> str:
        return subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()

    for soname in ("libc.so.6", "libm.so.6"):
        build(soname, symbols_of(path_of(soname), newest), out)
    # Up to 2.33, part of libc.so.6 was in these. A symbol is found in any library that is loaded.
    for soname in ("libpthread.so.0", "libdl.so.2", "librt.so.1"):
        build(soname, {}, out)
    source = Path(__file__).resolve().with_suffix(".cpp")
    subprocess.run(["c++", "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-c", source, "-o", out / "younger.o"], check=True)
    subprocess.run(["ar", "rcs", out / "libyounger.a", out / "younger.o"], check=True)
    (out / "libc.so").write_text(f"GROUP ( {out}/libc.so.6 {out}/libyounger.a {path_of('libc_nonshared.a')} AS_NEEDED ( {path_of('ld-linux-x86-64.so.2')} ) )\n")
    (out / "libm.so").write_text(f"INPUT ( {out}/libm.so.6 )\n")
    print(f"-L{out} -Wl,--wrap=__libc_start_main,--allow-shlib-undefined,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -l:librt.so.1")


if __name__ == "__main__":
    main()
