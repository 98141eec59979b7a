#!/usr/bin/env python3
"""Writes fixtures/torch-2.1 with PyTorch 2.1: FSDP's ShardedTensor, and the first DTensor.

Each tensor is 0, 1, ... 14 in shape [5, 3], on two ranks that hold 3 and 2 rows.
"""

import os
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._tensor import DeviceMesh, Shard, distribute_tensor
from torch.distributed.checkpoint import FileSystemWriter, save_state_dict

OUT = pathlib.Path(__file__).resolve().parent / "fixtures" / "torch-2.1"


def run(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29777", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", list(range(world)))
    whole = torch.arange(15.0).reshape(5, 3)
    mine = whole[rank * 3 : (rank + 1) * 3].clone()
    sharded = init_from_local_shards([LocalShard.from_tensor_and_offsets(mine, [rank * 3, 0], rank)], 5, 3)
    state = {
        "model": {
            "dtensor": distribute_tensor(whole, mesh, [Shard(0)]),
            "sharded": sharded,
            "whole": whole.bfloat16(),
        },
        "epoch": 3,
    }
    save_state_dict(state, FileSystemWriter(OUT))
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.startswith("2.1."), torch.__version__
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    mp.spawn(run, (2,), nprocs=2)
