#!/usr/bin/env python3
"""Writes fixtures/ with PyTorch on the CPU: files that each rank, or one process, saved by torch.save.

usage: make_fixtures.py NAME...

`seeds` writes inputs of the fuzz target saved_state.

Needs torch and safetensors; fsdp1 needs accelerate, lightning needs lightning. The committed ones are of torch 2.15.0,
and fsdp2-old of torch 2.6.0. Ranks are processes over gloo. expected.safetensors.golden has the whole tensors, written
from memory.
"""

import dataclasses
import io
import json
import pathlib
import shutil
import sys
import zipfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROOT = pathlib.Path(__file__).resolve().parent / "fixtures"
SEEDS = pathlib.Path(__file__).resolve().parents[2] / "fuzz" / "seeds" / "saved_state"


def ramp(*shape, dtype=torch.float32, start=0.0):
    """Values that are unique per position."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) * 0.25 + start).reshape(shape).to(dtype)


class Mlp(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up = nn.Linear(3, 7, dtype=dtype)
        self.down = nn.Linear(7, 3, bias=False, dtype=dtype)
        self.register_buffer("count", torch.arange(3))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(ramp(*p.shape, start=64 * i))


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().contiguous()


def save(name, state, file, expected=None):
    """Saves the state of this rank; the first writes `expected`, or else the whole tensors of the state."""
    expected = expected or {key: whole(value) for key, value in state.items()}
    directory = ROOT / name
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        save_file(expected, directory / "expected.safetensors.golden")
    dist.barrier()
    torch.save(state, directory / file)
    dist.barrier()


def rank_name(world):
    return f"model_world_size_{world}_rank_{dist.get_rank()}.pt"


def fsdp2(name, world):
    """As verl saves FSDP2: 3 ranks, uneven parts; the model's configuration in a folder."""
    model = Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    save(name, model.state_dict(), rank_name(world))
    if dist.get_rank() == 0:
        directory = ROOT / name
        (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}) + "\n")
        (directory / "huggingface").mkdir()
        (directory / "huggingface" / "config.json").write_text(json.dumps({"model_type": "mlp"}) + "\n")


def mesh(name, world):
    """4 ranks on 2-dimensional meshes: FSDP after tensor parallelism, two axes on one dim, replicas, bf16."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = Mlp(torch.bfloat16)
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["fsdp"])
    state = {key: value for key, value in model.state_dict().items() if key != "count"}
    placements = {
        "both": [Shard(0), Shard(0)],
        "cross": [Shard(1), Shard(0)],
        "replica": [Replicate(), Shard(0)],
        "copy": [Replicate(), Replicate()],
    }
    for i, (key, each) in enumerate(placements.items()):
        state[key] = distribute_tensor(ramp(5, 3, start=100 * i), grid, each)
    save(name, state, rank_name(world))


def fsdp1(name, world):
    """As accelerate saves FSDP1 without DCP: 2 ranks, ShardedTensors."""
    from accelerate.utils.constants import FSDP_MODEL_NAME

    model = Mlp()
    expected = {key: whole(value) for key, value in model.state_dict().items()}
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    save(name, model.state_dict(), f"{FSDP_MODEL_NAME}_0_rank{dist.get_rank()}.bin", expected)


@dataclasses.dataclass
class Settings:
    lr: float
    paths: list


def lightning(name, _):
    """A full checkpoint of Lightning: hyperparameters of any class, optimizer state by number."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self, settings):
            super().__init__()
            self.save_hyperparameters()
            self.model = Mlp()

        def training_step(self, batch, _):
            return self.model.down(self.model.up(batch)).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.25)

    directory = ROOT / name
    shutil.rmtree(directory, ignore_errors=True)
    module = Module(Settings(0.25, [pathlib.Path("data"), 1 << 100, {1, 2}]))
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[ModelCheckpoint(dirpath=directory, filename="last")])
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2, 3), batch_size=2))
    save_file({key: whole(value) for key, value in module.model.state_dict().items()},
              directory / "expected.safetensors.golden")


def seeds(_, world):
    """Pickles of rank 1 for the fuzz target saved_state, in which each storage has 16 bytes."""
    from torch.distributed._shard import sharded_tensor

    rank = dist.get_rank()
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = nn.Sequential(nn.Linear(2, 8, bias=False))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=grid["fsdp"])
    part = sharded_tensor.Shard.from_tensor_and_offsets(ramp(2, 2), [2 * rank, 0], rank)
    states = {
        "line": {"w": distribute_tensor(ramp(8, 2), line, [Shard(0)])},
        "grid": {"w": distribute_tensor(ramp(4, 4), grid, [Shard(1), Shard(0)]), **model.state_dict()},
        "sharded": {"w": sharded_tensor.init_from_local_shards([part], [8, 2])},
        "nested": {"state_dict": {"w": nn.Parameter(ramp(4))}, "args": Settings(0.5, [1 << 100, {1}]), "epoch": 1},
    }
    for key, state in states.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        if rank == 1:
            SEEDS.mkdir(parents=True, exist_ok=True)
            version = ".".join(torch.__version__.split(".")[:2])
            (SEEDS / f"{key}-{version}.pkl").write_bytes(zipfile.ZipFile(buffer).read("archive/data.pkl"))
    dist.barrier()


MAKERS = {"fsdp2": (fsdp2, 3), "fsdp2-old": (fsdp2, 3), "mesh": (mesh, 4), "fsdp1": (fsdp1, 2), "lightning": (lightning, 1),
          "seeds": (seeds, 4)}


def run(rank, name, world):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29533", rank=rank, world_size=world)
    MAKERS[name][0](name, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        maker, world = MAKERS[name]
        if world > 1:
            mp.spawn(run, args=(name, world), nprocs=world)
        else:
            maker(name, world)
