#!/usr/bin/env python3
"""Reads a tessera checkpoint into numpy arrays, following io/FORMAT.md. BF16 becomes float32.
usage: read_checkpoint.py CHECKPOINT [model | STATE, such as exp_avg]"""
import json, pathlib, sys
import numpy as np
from crc64 import crc64

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
          "I16": "<i2", "I8": "|i1", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"}
START = b'{\n "checksum": "crc64:'

def check(condition, message):
    if not condition:
        raise ValueError(message)

def read(path, begin, end, checksum, what):
    data = np.fromfile(path, np.uint8, end - begin, offset=begin).tobytes()
    check(crc64(data) == checksum, f"{path.name}: {what}: the checksum is wrong")
    return data

def read_index(path):
    text, at = (path / "index.json").read_bytes(), len(START)
    index = json.loads(text)
    check(index["format"] == "tessera-checkpoint", "index.json: not a tessera checkpoint")
    check(index["version"] <= 1, f"index.json: version {index['version']}, but this reader supports only version 1")
    right = text.startswith(START) and crc64(text[:at] + b"0" * 16 + text[at + 16:])
    check("checksum" in index or len(index) == 10, "index.json: unknown fields without a checksum")
    check(index.get("checksum", right) == right, "index.json: its checksum is wrong")
    for name, file in index["files"].items():
        check("/" not in name and (path / name).lstat().st_size == file["size"], f"{name}: wrong size")
        if "header" in file:
            read(path / name, 0, file["header"]["size"], file["header"]["checksum"], "header")
    return index

def read_tensor(path, name, tensor):
    shape, dtype = tensor["shape"], np.dtype(DTYPES[tensor["dtype"]])
    array, seen = np.empty(shape, dtype), np.zeros(shape, int)
    for chunk in tensor["chunks"]:
        box = chunk.get("box", {"offsets": [0] * len(shape), "shape": shape})
        where = (*(slice(offset, offset + n) for offset, n in zip(box["offsets"], box["shape"])), ...)
        first, last = chunk["elements"]
        what = f"tensor {name}, elements {first} to {last}"
        values = np.frombuffer(read(path / chunk["file"], *chunk["bytes"], chunk["checksum"], what), dtype)
        fits = len(values) == len(seen[where].flat[first:last]) == last - first
        check(fits and list(seen[where].shape) == box["shape"], f"{what}: a chunk that does not fit")
        array[where].flat[first:last] = values
        seen[where].flat[first:last] += 1
    check((seen == 1).all(), f"{name}: chunks do not cover every element once")
    line = f"{name}\n{tensor['dtype'].lower()}\n{shape}\n{crc64(array.tobytes())}\n"
    return (array.astype("<u4") << 16).view("<f4") if tensor["dtype"] == "BF16" else array, line

def load(path, section="model"):
    """{name: ndarray} of a section, its digest, and the index. Raises OSError, KeyError, ValueError."""
    index = read_index(path := pathlib.Path(path))
    part = index["sections"]["model" if section == "model" else "optimizer"]["tensors"]
    tensors = part if section == "model" else part[section]
    read = {name: read_tensor(path, name, tensors[name]) for name in sorted(tensors, key=str.encode)}
    digest = crc64("".join(line for _, line in read.values()).encode())
    return {name: array for name, (array, _) in read.items()}, digest, index

if __name__ == "__main__":
    try:
        tensors, digest, index = load(*sys.argv[1:] or sys.exit(__doc__))
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"read_checkpoint: {error}")
    for name, array in tensors.items():
        print(f"{name:<40} {array.dtype!s:<8} {list(array.shape)}")
    print(f"step {index['step']}, {len(tensors)} tensors, digest {digest}")
