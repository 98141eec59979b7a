#!/usr/bin/env python3
"""PyTorch part of consolidate.py.

  consolidate_torch.py make LAYOUT MODEL DIR WORLD   saves the weights of a Hugging Face directory as WORLD ranks would: dcp, hf
                                                     (torch's HuggingFaceStorageWriter), verl or deepspeed (ZeRO-3, with AdamW's state)
  consolidate_torch.py merge LAYOUT DIR OUT          makes a whole model of them, with the layout's own program
"""
import json, os, pathlib, struct, subprocess, sys

import torch

from common import free_port


def header(path):
    """Entries of a safetensors file, and the offset of its data."""
    with open(path, "rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        entries = json.loads(f.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def tensors(path):
    """Yields (name, view of the mapped file) for each weight; F32 only."""
    entries, start = header(path)
    data = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)[start:]
    for name, entry in entries.items():
        assert entry["dtype"] == "F32"
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(torch.float32).reshape(entry["shape"])


def sharded(path, rank, world):
    """The state dict of a rank, with DTensors like FSDP2's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    state = {}
    for name, whole in tensors(path):
        parts = whole.chunk(world, dim=0)
        mine = parts[rank].clone() if rank < len(parts) else whole[:0].clone()
        state[name] = DTensor.from_local(mine, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    return state


def train_deepspeed(model, folder):
    os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    import deepspeed
    import transformers
    deepspeed.init_distributed("gloo", verbose=False)
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model)).bfloat16()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4), config=settings)
    engine.backward(engine(torch.arange(8)[None]).logits.float().square().mean())
    engine.step()
    engine.save_checkpoint(folder)


def save_rank(rank, layout, model, folder, world, port):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    if layout == "deepspeed":
        train_deepspeed(model, folder)
        return
    dist.init_process_group("gloo")
    state = sharded(f"{model}/model.safetensors", rank, world)
    if layout == "dcp":
        dcp.save({"model": state}, checkpoint_id=folder)
    elif layout == "hf":
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    else:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()


def make(layout, model, folder, world):
    torch.multiprocessing.spawn(save_rank, (layout, model, folder, int(world), free_port()), nprocs=int(world))
    target = pathlib.Path(folder)
    config = json.loads(pathlib.Path(model, "config.json").read_text())
    if layout == "verl":
        (target / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": int(world)}))
        target = target / "huggingface"
        target.mkdir()
        config["architectures"] = ["GPT2ForCausalLM"]  # its merger knows the kind of a model by the end of this name
    (target / "config.json").write_text(json.dumps(config))


def merge(layout, folder, out):
    if layout == "dcp":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        dcp_to_torch_save(folder, out)
    elif layout.startswith("hf"):
        from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
        names = {name: 1 for file in pathlib.Path(folder).glob("*.safetensors") for name in header(file)[0]}
        os.mkdir(out)
        consolidate_safetensors_files(folder, out, fqn_to_index_mapping=names, num_threads=int(layout[2:]))
    elif layout == "deepspeed":
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
        convert_zero_checkpoint_to_fp32_state_dict(folder, out)
    else:
        sys.exit(subprocess.call([sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", folder,
                                  "--target_dir", out]))


if __name__ == "__main__":
    {"make": make, "merge": merge}[sys.argv[1]](*sys.argv[2:])
