#!/usr/bin/env python3
"""Reads a tessera checkpoint into numpy arrays: io/FORMAT.md as a program. BF16 becomes float32.
usage: read_checkpoint.py CHECKPOINT [model | exp_avg | exp_avg_sq]"""
import json, math, pathlib, stat, sys
import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
          "I16": "<i2", "I8": "|i1", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"}
START = b'{\n "checksum": "crc64:'
ONE, POLYNOMIAL = 1 << 63, 0xC96C5795D7870F42  # reflected: bit 63 is x^0

def check(condition, message):
    if not condition:
        raise ValueError(message)

def times(a, b):  # product modulo the polynomial; a: an int, or an array of uint64
    product = a * 0
    for bit in range(63, -1, -1):
        product, a = product ^ a * (b >> bit & 1), (a >> 1) ^ (a & 1) * POLYNOMIAL
    return product

def power(n):  # x^(8n)
    result, square = ONE, ONE >> 8
    for bit in range(n.bit_length()):
        result, square = times(result, square) if n >> bit & 1 else result, times(square, square)
    return result

SHIFTED = times(np.arange(256, dtype=np.uint64), ONE >> 8)  # a byte that leaves the remainder

def crc64(data):  # by many lanes at once, joined two by two; zeros in front change nothing
    lanes = 4 << len(data).bit_length() // 2
    length = -(-len(data) // lanes)
    padded = np.frombuffer(bytes(lanes * length - len(data)) + data, np.uint8)
    crc, step = np.zeros(lanes, np.uint64), power(length)
    for column in np.ascontiguousarray(padded.reshape(lanes, length).T):
        crc = (crc >> 8) ^ SHIFTED[(crc ^ column) & 255]
    while crc.size > 1:
        crc, step = times(crc[0::2], step) ^ crc[1::2], times(step, step)
    return f"crc64:{int(crc[0]) ^ times(2**64 - 1, power(len(data))) ^ (2**64 - 1):016x}"

def read(path, begin, end, checksum, what):
    with open(path, "rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    check(crc64(data) == checksum, f"{path.name}: {what}: the checksum is wrong")
    return data

def unique(pairs):
    check(len(dict(pairs)) == len(pairs), "index.json: a key stands twice in one object")
    return dict(pairs)

def read_index(path):
    text = (path / "index.json").read_bytes()
    index, at = json.loads(text.decode("utf-8"), object_pairs_hook=unique), len(START)
    check(index["format"] == "tessera-checkpoint", "index.json: no tessera checkpoint")
    check(index["version"] <= 1, f"index.json: this reader knows version 1, not {index['version']}")
    if "checksum" in index:
        right = text.startswith(START) and crc64(text[:at] + b"0" * 16 + text[at + 16:])
        check(index["checksum"] == right, "index.json: its checksum is wrong")
    else:
        check(len(index) == 10, "index.json: an unknown field, and no checksum")
    check(not path.resolve().name.endswith(".tmp"), f"{path} is an attempt to save a checkpoint")
    for name, file in index["files"].items():
        status = (path / name).lstat()
        check("/" not in name and stat.S_ISREG(status.st_mode), f"{name}: no regular file in {path}")
        check(status.st_size == file["size"], f"{name}: wrong size")
        if "header" in file:
            read(path / name, 0, file["header"]["size"], file["header"]["checksum"], "header")
    return index

def read_tensor(path, files, name, tensor):
    shape, dtype, boxes = tensor["shape"], np.dtype(DTYPES[tensor["dtype"]]), {}
    for chunk in tensor["chunks"]:
        box = chunk.get("box", {"offsets": [0] * len(shape), "shape": shape})
        boxes.setdefault((tuple(box["offsets"]), tuple(box["shape"])), []).append(chunk)
    array, seen = np.empty(shape, dtype), np.zeros(shape, int)
    for (offsets, extent), chunks in boxes.items():
        flat, position = np.empty(math.prod(extent), dtype), 0
        for chunk in sorted(chunks, key=lambda chunk: chunk["elements"]):
            (first, last), (begin, end) = chunk["elements"], chunk["bytes"]
            check(chunk["file"] in files, f"{name}: {chunk['file']} is not among the files")
            check(first == position and (last - first) * dtype.itemsize == end - begin, f"{name}: a gap")
            what = f"tensor {name}, elements {first} to {last}"
            flat[first:last] = np.frombuffer(read(path / chunk["file"], begin, end, chunk["checksum"], what), dtype)
            position = last
        where = tuple(slice(offset, offset + n) for offset, n in zip(offsets, extent))
        check(position == flat.size and seen[where].shape == extent, f"{name}: a box is not filled")
        array[where], seen[where] = flat.reshape(extent), seen[where] + 1
    check((seen == 1).all(), f"{name}: chunks do not cover every element once")
    line = f"{name}\n{tensor['dtype'].lower()}\n{shape}\n{crc64(array.tobytes())}\n"
    return (array.astype("<u4") << 16).view("<f4") if tensor["dtype"] == "BF16" else array, line

def load(path, section="model"):
    """{name: ndarray} of a section, its digest, and the index. Raises OSError, KeyError, ValueError."""
    index = read_index(path := pathlib.Path(path))
    sections = index["sections"]
    tensors = (sections["model"] if section == "model" else sections["optimizer"])["tensors"]
    tensors = tensors if section == "model" else tensors[section]
    read = {name: read_tensor(path, index["files"], name, tensors[name]) for name in sorted(tensors, key=str.encode)}
    digest = crc64("".join(line for _, line in read.values()).encode())
    return {name: array for name, (array, _) in read.items()}, digest, index

if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        tensors, digest, index = load(*sys.argv[1:])
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"read_checkpoint: {sys.argv[1]}: {error}")
    for name, array in tensors.items():
        print(f"{name:<40} {array.dtype!s:<8} {list(array.shape)}")
    print(f"step {index['step']}, {len(tensors)} tensors, digest {digest}")
