#!/usr/bin/env python3
"""Writes fixtures/ with PyTorch on the CPU: sharded checkpoints and their expected contents.

usage: make_fixtures.py [NAME ...]

Needs torch (written with 2.15.0) and safetensors; accelerate needs accelerate, zstd needs zstandard. Each fixture is saved by several processes over
gloo. expected.safetensors next to it has the whole tensors by their names in the checkpoint, written by the first rank from
memory, not read back.
"""

import json
import os
import pathlib
import shutil
import sys
import types

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ROOT = pathlib.Path(__file__).resolve().parent / "fixtures"


def ramp(*shape, dtype=torch.float32, start=0.0):
    """Values that are unique per position."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) * 0.25 + start).reshape(shape).to(dtype)


def flatten(state, prefix=""):
    """Whole tensors of nested dicts, by their DCP names."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update(flatten(value, prefix + key + "."))
        elif isinstance(value, DTensor):
            found[prefix + key] = value.full_tensor().detach().clone().contiguous()
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value.detach().clone().contiguous()
    return found


def save(name, state, writer=None, **options):
    expected = flatten(state)  # a collective
    directory = ROOT / name
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    dist.barrier()
    writer = writer or dcp.FileSystemWriter(directory, sync_files=False, **options)
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        save_file(expected, directory / "expected.safetensors.golden")
    dist.barrier()
    return directory


class Conv1D(nn.Module):
    """y = x W + b with a [in, out] weight, as in GPT-2."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(ramp(n_in, n_out, start=n_out))
        self.bias = nn.Parameter(ramp(n_out, start=-n_in))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(width, 3 * width), "c_proj": Conv1D(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(width, 4 * width), "c_proj": Conv1D(4 * width, width)})


class Gpt2(nn.Module):
    def __init__(self, vocab=17, positions=6, width=4):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(positions, width),
                "h": nn.ModuleList([Block(width)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight


class Mlp(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 3, dtype=dtype)])
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(ramp(*p.shape, start=100 * i) / 16)

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))


def train_step(model, dtype=torch.float32):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return optimizer


def sharded_gpt2(world):
    """FSDP: indivisible sizes; a tied head stored separately."""
    model = Gpt2()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(ramp(*p.shape, start=10 * i) / 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return get_model_state_dict(model)


def add_gpt2_config(directory):
    if dist.get_rank() == 0:
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 17, "n_positions": 6,
                  "n_embd": 4, "n_layer": 1, "n_head": 2}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def gpt2(world):
    """FSDP, 3 ranks."""
    add_gpt2_config(save("fsdp-gpt2", {"model": sharded_gpt2(world)}))


def zstd(world):
    """PyTorch's extension that compresses every item; also tensors that are not row-major."""
    from torch.distributed.checkpoint._extension import ZStandard

    more = {**mixed_state(world), "transposed": ramp(4, 3).t(), "permuted": ramp(2, 3, 4).permute(2, 0, 1)}
    add_gpt2_config(save("zstd", {"model": sharded_gpt2(world), "more": more, "epoch": 3}, _extensions=[ZStandard()]))


def zstd_optimizer(world):
    """A compressed hyperparameter of over 256 KB: names of weights."""
    from torch.distributed.checkpoint._extension import ZStandard

    ones = torch.ones(2, 2)
    state = {"w": {"exp_avg": ones, "exp_avg_sq": ones, "step": torch.tensor(5.0)}}
    group = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.5,
             "params": ["w"] + [f"{'frozen.' * 1000}{i}" for i in range(32)]}
    save("zstd-optimizer", {"model": {"w": ones}, "optimizer": {"state": state, "param_groups": [group]}},
         _extensions=[ZStandard()])


def wrapped(world):
    """FSDP of a compiled model with recomputation: wrapper prefixes in names; AdamW state; a count as bytes."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Mlp()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = train_step(model)
    # Like programs that save state_dict() of the wrapped modules.
    weights = {"_orig_mod." + name: value for name, value in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    moments = {name: state[i] for i, name in enumerate(weights)}
    save("fsdp-wrapped", {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-2}]}, "step": 1})


def titan(world):
    """torchtitan: weights at the root without prefix; flat optimizer state; bf16; two-dimensional sharding (HSDP and TP)."""
    model = Mlp(torch.bfloat16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for i, dim in enumerate((0, 1)):
        layer = model.layers[i]
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["tp"], [Shard(dim)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh["tp"], [Shard(0) if i == 0 else Replicate()]))
    fully_shard(model, mesh=mesh["dp"])
    state = {name: value for name, value in model.state_dict().items()}
    moments = {f"state.{name}.{kind}": torch.zeros_like(value) + 0.5
               for name, value in state.items() for kind in ("exp_avg", "exp_avg_sq")}
    save("torchtitan", {**state, "optimizer": moments, "lr_scheduler": {"last_epoch": 3},
                        "train_state": {"step": 3, "ntokens": 96}})


def mixed_state(world):
    mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows = lambda t: distribute_tensor(t, mesh, [Shard(0)])  # noqa: E731
    return {
        "uneven": rows(ramp(5, 3)),  # 2, 2, 1 and 0 rows
        "few": rows(ramp(2, 3, start=-1)),  # two ranks have no rows
        "columns": distribute_tensor(ramp(3, 7), mesh, [Shard(1)]),
        "tiles": distribute_tensor(ramp(5, 3, 6), grid, [Shard(0), Shard(2)]),
        "f64": rows(ramp(6, dtype=torch.float64) / 3),
        "f16": rows(ramp(6, 2, dtype=torch.float16)),
        "bf16": distribute_tensor(ramp(6, 2, dtype=torch.bfloat16), mesh, [Replicate()]),
        "i64": rows(ramp(9, dtype=torch.int64)),
        "i32": ramp(3, dtype=torch.int32),
        "i16": ramp(3, dtype=torch.int16),
        "i8": ramp(3, dtype=torch.int8),
        "u8": ramp(3, dtype=torch.uint8),
        "bool": ramp(3).bool(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


def mixed(world):
    """Every layout and dtype; two files per rank; bytes and lists among the tensors."""
    state = {"model": {**mixed_state(world), "u16": ramp(4, dtype=torch.uint16)}, "epoch": 3, "rng": [1, 2]}
    save("mixed", state, thread_count=2)


def safetensors(world):
    """DCP in safetensors form."""
    path = ROOT / "dcp-safetensors"
    save("dcp-safetensors", mixed_state(world), HuggingFaceStorageWriter(str(path), save_distributed=True))


def lightning(world):
    """Lightning's FSDPStrategy with state_dict_type="sharded": weights under "model", named by the module's attribute first;
    numbered optimizers; the rest in meta.pt."""
    model = Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = train_step(model)
    weights = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    state = get_optimizer_state_dict(model, optimizer)
    directory = save("lightning", {"model": weights, "optimizer_0": {"state": state["state"]}})
    if dist.get_rank() == 0:
        torch.save({"epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.4.0", "hyper_parameters": {}},
                   directory / "meta.pt")


def accelerate(world):
    """accelerate's save_state with FSDP2: a checkpoint for the model, and one for the optimizer."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    PartialState(cpu=True)
    directory, rank = ROOT / "accelerate", dist.get_rank()
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    model = Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = train_step(model)
    expected = flatten({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    run = types.SimpleNamespace(num_processes=world, process_index=rank, is_main_process=rank == 0, wait_for_everyone=dist.barrier, is_fsdp2=True)
    save_fsdp_model(plugin, run, model, directory)
    save_fsdp_optimizer(plugin, run, optimizer, model, directory)
    if rank == 0:
        save_file(expected, directory / "expected.safetensors.golden")


def strided(world):
    """Tensors that are not row-major, e.g. a tied transpose or a permuted kernel."""
    save("strided", {"transposed": ramp(4, 3).t(), "permuted": ramp(2, 3, 4).permute(2, 0, 1), "plain": ramp(2, 2)})


class Experts(nn.Module):
    """Mixtral's experts as transformers 5 holds them."""

    def __init__(self, count=4, width=4, inner=3):
        super().__init__()
        self.gate_up_proj = nn.Parameter(ramp(count, 2 * inner, width))
        self.down_proj = nn.Parameter(ramp(count, width, inner, start=1000))


class MixtralBlock(nn.Module):
    def __init__(self, width=4, kv=2):
        super().__init__()
        norm = lambda: nn.ParameterDict({"weight": ramp(width, start=7)})  # noqa: E731
        linear = lambda out, start: nn.ParameterDict({"weight": ramp(out, width, start=start)})  # noqa: E731
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = nn.ModuleDict({"q_proj": linear(width, 10), "k_proj": linear(kv, 20), "v_proj": linear(kv, 30),
                                        "o_proj": linear(width, 40)})
        self.mlp = nn.ModuleDict({"gate": linear(4, 50), "experts": Experts()})


def experts(world):
    """FSDP of a Mixtral with stacked experts, in an attribute net, with AdamW's moments."""
    model = nn.Module()  # FSDP takes no ModuleDict
    model.net = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": nn.ParameterDict({"weight": ramp(5, 4, start=-3)}),
                                                       "layers": nn.ModuleList([MixtralBlock()]),
                                                       "norm": nn.ParameterDict({"weight": ramp(4)})}),
                               "lm_head": nn.ParameterDict({"weight": ramp(5, 4, start=-90)})})
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    sum((p.to_local() ** 2).sum() for p in model.parameters()).backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    moments = {name: {"exp_avg": value["exp_avg"], "step": value["step"]} for name, value in state.items()
               if name.endswith(("experts.gate_up_proj", "lm_head.weight"))}
    directory = save("experts", {**get_model_state_dict(model), "optimizer": {"state": moments}})
    if dist.get_rank() == 0:
        config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 5, "hidden_size": 4,
                  "intermediate_size": 3, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                  "max_position_embeddings": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def refused(world):
    """dtypes that tessera does not support."""
    save("other-dtypes", {"weight": ramp(3), "u32": ramp(3, dtype=torch.uint32),
                          "f8": ramp(3).to(torch.float8_e4m3fn), "c64": torch.ones(2, dtype=torch.complex64)})


FIXTURES = {gpt2: 3, wrapped: 2, titan: 4, mixed: 4, safetensors: 4, lightning: 2, accelerate: 2, strided: 1, zstd: 4, refused: 1, experts: 3, zstd_optimizer: 1}


def run(rank, index, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29650 + index), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    list(FIXTURES)[index](world)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for i, (make, ranks) in enumerate(FIXTURES.items()):
        if len(sys.argv) == 1 or make.__name__ in sys.argv[1:]:
            mp.spawn(run, (i, ranks), nprocs=ranks)
