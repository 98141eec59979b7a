#!/usr/bin/env python3
"""PyTorch part of consolidate.py.

  consolidate_torch.py make-dcp MODEL.safetensors DIR WORLD     saves the weights as a Distributed Checkpoint of WORLD ranks
  consolidate_torch.py make-merge MODEL.safetensors DIR WORLD   saves each rank's part of every weight, flat, with torch.save
  consolidate_torch.py dcp DIR FILE                             dcp_to_torch_save
  consolidate_torch.py merge DIR FILE                           loads all parts, concatenates them, and saves the whole
"""
import glob, json, os, struct, sys

import torch

from common import free_port


def tensors(path):
    """Yields (name, view of the mapped file) for each weight; F32 only."""
    with open(path, "rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(length))
    size = os.path.getsize(path) - 8 - length
    data = torch.from_file(path, shared=False, size=8 + length + size, dtype=torch.uint8)[8 + length:]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32"
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(torch.float32).reshape(entry["shape"])


def save_dcp_rank(rank, path, folder, world, port):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state = {}
    for name, whole in tensors(path):
        parts = whole.chunk(world, dim=0)  # like FSDP
        mine = parts[rank].clone() if rank < len(parts) else whole[:0].clone()
        state[name] = DTensor.from_local(mine, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    dcp.save({"model": state}, checkpoint_id=folder)
    dist.destroy_process_group()


def main():
    what, *words = sys.argv[1:]
    if what == "make-dcp":
        path, folder, world = words
        torch.multiprocessing.spawn(save_dcp_rank, (path, folder, int(world), free_port()), nprocs=int(world))
    elif what == "make-merge":
        path, folder, world = words
        os.makedirs(folder)
        for rank in range(int(world)):
            flat, shapes = {}, {}
            for name, whole in tensors(path):
                parts = whole.reshape(-1).chunk(int(world))
                flat[name] = parts[rank].clone() if rank < len(parts) else torch.empty(0)
                shapes[name] = whole.shape
            torch.save({"flat": flat, "shapes": shapes}, f"{folder}/zero_pp_rank_{rank}.pt")
    elif what == "dcp":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        dcp_to_torch_save(*words)
    elif what == "merge":
        folder, out = words
        ranks = [torch.load(name, weights_only=True) for name in sorted(glob.glob(f"{folder}/*.pt"))]
        merged = {name: torch.cat([rank["flat"][name] for rank in ranks]).view(shape)
                  for name, shape in ranks[0]["shapes"].items()}
        torch.save(merged, out)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
