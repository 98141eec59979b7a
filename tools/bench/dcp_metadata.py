#!/usr/bin/env python3
"""Writes a PyTorch Distributed Checkpoint of any size whose files of data are sparse.

    dcp_metadata.py OUT --layers 126 --ranks 1024     # 405B with Adam: 3.5 million chunks
    dcp_metadata.py --check                           # needs PyTorch: compares with its own pickle

The `.metadata` has the opcodes that torch writes for the same save of FSDP2: each tensor is sharded
over all ranks in dim 0. The data are holes, so the tensors cannot be read.
"""

import argparse
import os
import struct

WIDTH, FFN = 16384, 53248
LAYER = {
    "self_attn.q_proj.weight": (WIDTH, WIDTH),
    "self_attn.k_proj.weight": (1024, WIDTH),
    "self_attn.v_proj.weight": (1024, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (FFN, WIDTH),
    "mlp.up_proj.weight": (FFN, WIDTH),
    "mlp.down_proj.weight": (WIDTH, FFN),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
}
METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def tensors(layers):
    """name -> shape, of a Llama and both moments of Adam."""
    model = {"model.embed_tokens.weight": (128256, WIDTH), "model.norm.weight": (WIDTH,)}
    model["lm_head.weight"] = (128256, WIDTH)
    for layer in range(layers):
        model |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    all_of = {f"model.{name}": shape for name, shape in model.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        all_of |= {f"optimizer.state.{name}.{moment}": shape for name, shape in model.items()}
    return all_of


def chunks(shape, ranks):
    """(rank, offsets, sizes) of the parts that FSDP2 makes."""
    rows = -(-shape[0] // ranks)
    for rank in range(-(-shape[0] // rows)):
        first = rank * rows
        yield rank, (first, *[0] * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


def places(shapes, ranks):
    """(rank, name, offsets, begin, bytes): data are written rank by rank."""
    for rank in range(ranks):
        begin = 0
        for name, shape in shapes.items():
            rows = -(-shape[0] // ranks)
            if rank * rows >= shape[0]:
                continue
            count = min(rows, shape[0] - rank * rows)
            size = 4 * count * (shape[1] if len(shape) > 1 else 1) + 1500  # and the archive
            yield rank, name, (rank * rows, *[0] * (len(shape) - 1)), begin, size
            begin += size


class Pickler:
    """The opcodes of pickle's protocol 4, as CPython writes them for objects that are not shared."""

    def __init__(self, file):
        self.file, self.frame, self.memo, self.count = file, bytearray(), {}, 0
        file.write(b"\x80\x04")

    def put(self, data, values=0):
        self.frame += data
        self.count += values

    def flush(self, least=1 << 16):
        if len(self.frame) >= least:
            self.file.write(b"\x95" + struct.pack("<Q", len(self.frame)) + self.frame)
            self.frame = bytearray()

    def get(self, key):
        index = self.memo[key]
        self.put(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))

    def memoize(self, key=None):
        if key is not None:
            self.memo[key] = self.count
        self.put(b"\x94", 1)

    def text(self, text, key=None):
        data = text.encode()
        self.put(b"\x8c" + bytes([len(data)]) + data)
        self.memoize(key)

    def key(self, text):  # a string that all objects share
        self.get(text) if text in self.memo else self.text(text, text)

    def name(self, module, name, shared=True):
        if (module, name) in self.memo:
            return self.get((module, name))
        self.key(module) if shared else self.text(module, module)
        self.key(name)
        self.put(b"\x93")
        self.memoize((module, name))

    def integer(self, n):
        if n < 256:
            self.put(b"K" + bytes([n]))
        elif n < 1 << 16:
            self.put(b"M" + struct.pack("<H", n))
        elif n < 1 << 31:
            self.put(b"J" + struct.pack("<i", n))
        else:
            data = n.to_bytes(n.bit_length() // 8 + 1, "little")
            self.put(b"\x8a" + bytes([len(data)]) + data)

    def tuple(self, items):  # of integers
        for item in items:
            self.integer(item)
        self.put({1: b"\x85", 2: b"\x86"}[len(items)])
        self.memoize()

    def size(self, dims):
        # copyreg makes a name of its own for the module of torch.Size, as for each reduction.
        self.name("torch", "Size", shared=False)
        self.tuple(dims)
        self.put(b"\x85")
        self.memoize()
        self.put(b"R")
        self.memoize()

    def object(self, module, name):  # followed by its fields, then "ub"
        self.name(module, name)
        self.put(b")\x81")
        self.memoize()
        self.put(b"}")
        self.memoize()
        self.put(b"(")


def batches(items, size=1000):
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def write_properties(p):
    p.name(METADATA, "TensorProperties")
    p.put(b")\x81")
    p.memoize()
    p.put(b"(")
    p.name("torch", "float32")
    if "layout" in p.memo:
        p.get("layout")
    else:
        p.name("torch.serialization", "_get_layout")
        p.text("torch.strided")
        p.put(b"\x85")
        p.memoize()
        p.put(b"R")
        p.memoize("layout")
    p.put(b"\x89")
    if "encoding" in p.memo:
        p.get("encoding")
    else:
        p.name(METADATA, "_MEM_FORMAT_ENCODING")
        p.integer(0)
        p.put(b"\x85")
        p.memoize()
        p.put(b"R")
        p.memoize("encoding")
    p.put(b"\x89")
    p.tuple((1,))
    p.put(b"t")
    p.memoize()
    p.put(b"b")


def write_metadata(file, shapes, ranks):
    p = Pickler(file)
    p.object(METADATA, "Metadata")
    p.key("state_dict_metadata")
    p.put(b"}")
    p.memoize()
    for batch in batches(shapes.items()):
        p.put(b"(")
        for name, shape in batch:
            p.text(name)
            p.object(METADATA, "TensorStorageMetadata")
            p.key("properties")
            write_properties(p)
            p.key("size")
            p.size(shape)
            p.key("chunks")
            p.put(b"]")
            p.memoize()
            for part in batches(chunks(shape, ranks)):
                p.put(b"(")
                for _, offsets, sizes in part:
                    p.object(METADATA, "ChunkStorageMetadata")
                    p.key("offsets")
                    p.size(offsets)
                    p.key("sizes")
                    p.size(sizes)
                    p.put(b"ub")
                p.put(b"e")
                p.flush()
            p.put(b"ub")
        p.put(b"u")
    p.key("planner_data")
    p.put(b"N")
    p.key("storage_data")
    p.put(b"}")
    p.memoize()
    last = None
    for batch in batches(places(shapes, ranks)):
        p.put(b"(")
        for rank, name, offsets, begin, size in batch:
            p.object(METADATA, "MetadataIndex")
            p.key("fqn")
            p.text(name)
            p.key("index")
            p.integer(rank)
            p.key("offset")
            p.size(offsets)
            p.put(b"ub")
            p.object(FILESYSTEM, "_StorageInfo")
            p.key("relative_path")
            p.text(f"__{rank}_0.distcp", "path") if rank != last else p.get("path")
            last = rank
            p.key("offset")
            p.integer(begin)
            p.key("length")
            p.integer(size)
            p.put(b"ub")
        p.put(b"u")
        p.flush()
    p.key("storage_meta")
    p.put(b"N")
    p.key("version")
    p.put(b"Nub.")
    p.flush(0)


def check():
    """Compares the opcodes with those of torch's own objects."""
    import io
    import pickle
    import pickletools

    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    shapes, ranks = tensors(1), 3
    state = {}
    for name, shape in shapes.items():
        state[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties.create_from_tensor(torch.empty(1)),
            torch.Size(shape),
            [
                metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for _, offsets, sizes in chunks(shape, ranks)
            ],
        )
    storage = {}
    results = {rank: [] for rank in range(ranks)}
    for rank, name, offsets, begin, size in places(shapes, ranks):
        index = metadata.MetadataIndex(name, torch.Size(offsets), rank)
        results[rank].append((index, (begin, size)))
    for rank, entries in results.items():
        path = f"__{rank}_0.distcp"
        infos = [(i, filesystem._StorageInfo(path, *place)) for i, place in entries]
        # Rank 0 receives the results of each rank as a pickle.
        storage |= dict(pickle.loads(pickle.dumps(infos)))
    real = pickle.dumps(metadata.Metadata(state, None, storage), protocol=4)
    made = io.BytesIO()
    write_metadata(made, shapes, ranks)

    def opcodes(data):
        return [(op.name, arg) for op, arg, _ in pickletools.genops(data) if op.name != "FRAME"]

    a, b = opcodes(real), opcodes(made.getvalue())
    for i, (x, y) in enumerate(zip(a, b)):
        assert x == y, f"opcode {i}: torch has {x}, this has {y}; before: {a[i - 5:i]}"
    assert len(a) == len(b), (len(a), len(b))
    print(f"{len(a)} opcodes are equal")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?")
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--check", action="store_true", help="compare the format with torch's")
    options = parser.parse_args()
    if options.check:
        check()
    if not options.out:
        return
    shapes = tensors(options.layers)
    os.makedirs(options.out)
    ends = {}
    for rank, _, _, begin, size in places(shapes, options.ranks):
        ends[rank] = begin + size
    for rank, end in ends.items():
        with open(f"{options.out}/__{rank}_0.distcp", "wb") as file:
            file.truncate(end)
    with open(f"{options.out}/.metadata", "wb") as file:
        write_metadata(file, shapes, options.ranks)
    count = sum(1 for shape in shapes.values() for _ in chunks(shape, options.ranks))
    size = os.path.getsize(f"{options.out}/.metadata")
    print(f"{len(shapes)} tensors, {count} chunks, {size} bytes of .metadata")


if __name__ == "__main__":
    main()
