#!/usr/bin/env python3
"""Saves small models by PyTorch, accelerate, Lightning, transformers and PEFT in every sharded layout that they have, on 1 to 4
ranks, and compares tessera's consolidation with what the live model and optimizer hold.

    pip install torch transformers accelerate lightning peft safetensors zstandard
    python tools/check_sources.py BUILD_DIR [--ranks 1 2 3 4] [--layouts TEXT ...] [--also PYTHON ...] [--keep FOLDER]

Each case trains a Llama or GPT-2 (tied embeddings) by one step of AdamW, saves it, and checks that
- weights, and moments where the layout names them, have the bits that the ranks gathered from the live model and optimizer, and
  hyperparameters are those of its two groups;
- transformers opens the Hugging Face export strictly, with the logits of that model; in the Python of --also, too;
- a layout that cannot be read is refused with the reason, and nothing is written.
Layouts that the installed versions lack or fail to save are left out. Prints a table in Markdown; exit code 1 if a check fails.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard

MODELS = {
    "llama": dict(model_type="llama", vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False),
    "gpt2": dict(model_type="gpt2", vocab_size=61, n_positions=32, n_embd=20, n_layer=2, n_head=4),
}
LAYOUTS = {}  # name -> (function, numbers of ranks, models, what is expected)
LIVE = "live.safetensors.golden"
NOT_SAVED = "not saved by these versions"
MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad")


def layout(name, ranks=(1, 2, 3, 4), models=tuple(MODELS), moments=True, refused="", needs=lambda: True):
    """The decorated function saves a model as this layout. `refused`: part of the reason why tessera can't read it."""
    def add(function):
        with contextlib.suppress(ImportError):
            if needs():
                LAYOUTS[name] = (function, ranks, models, moments, refused)
        return function
    return add


def make(kind, dtype):
    settings = dict(MODELS[kind])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def step(model):
    """One step of AdamW with gradients that need no forward pass."""
    decays, others = [], []
    for name, p in model.named_parameters():  # FSDP1's have one dim
        (others if any(part in name for part in ("norm", "ln_", "bias")) else decays).append(p)
    optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}],
                                  lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for p in model.parameters():
        p.grad = p.detach() * 2
    optimizer.step()
    return optimizer


def gather(model, optimizer, folder, prefix=""):
    """Writes the whole weights and moments of the live model, from the first rank's memory."""
    options = StateDictOptions(full_state_dict=True)
    live = {k.removeprefix(prefix): v for k, v in get_model_state_dict(model, options=options).items()}
    if optimizer:
        whole = get_optimizer_state_dict(model, optimizer, options=options)
        groups = [({k: g[k] for k in SETTINGS}, sorted(name.removeprefix(prefix) for name in g["params"])) for g in whole["param_groups"]]
        if not dist.is_initialized() or dist.get_rank() == 0:
            (folder / "groups.json").write_text(json.dumps(groups))
        for name, state in whole["state"].items():
            live.update({f"{kind}/{name.removeprefix(prefix)}": state[kind] for kind in MOMENTS})
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file({k: v.detach().clone().contiguous() for k, v in live.items()}, folder / LIVE)
    return model, optimizer


def fsdp2(kind, dtype, folder, mesh=None):
    model = make(kind, dtype)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers if kind == "llama" else model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return gather(model, step(model), folder)


def tensor_parallel(kind, dtype, folder, fsdp=False):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make(kind, dtype)
    world = dist.get_world_size()
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.model.layers:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        parallelize_module(block, grid["tp"], {
            "self_attn.q_proj": columns, "self_attn.k_proj": columns, "self_attn.v_proj": columns, "self_attn.o_proj": rows,
            "mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows})
    if fsdp:
        for block in model.model.layers:
            fully_shard(block, mesh=grid["dp"])
        fully_shard(model, mesh=grid["dp"])
    else:  # other weights would be plain tensors
        from torch.distributed._tensor import Replicate, distribute_tensor

        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if not hasattr(p, "placements"):
                    module.register_parameter(name, torch.nn.Parameter(distribute_tensor(p.detach(), grid["tp"], [Replicate()])))
    return gather(model, step(model), folder)


def fsdp1(kind, dtype, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make(kind, dtype), use_orig_params=True, device_id=torch.device("cpu"))
    return gather(model, step(model), folder)


def save_dcp(model, optimizer, folder, save=dcp.save):
    result = save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "shards")
    if hasattr(result, "result"):
        result.result()


def save_ranks(state, folder, name="model_world_size_{1}_rank_{0}.pt"):
    (folder / "shards").mkdir(exist_ok=True)
    torch.save(state, folder / "shards" / name.format(dist.get_rank(), dist.get_world_size()))


@layout("FSDP2, `dcp.save`")
def _(kind, dtype, folder):
    save_dcp(*fsdp2(kind, dtype, folder), folder)


@layout("FSDP2, `dcp.async_save`", ranks=(2, 3))
def _(kind, dtype, folder):
    save_dcp(*fsdp2(kind, dtype, folder), folder, dcp.async_save)


def zstandard():
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard.is_available()


@layout("FSDP2, `dcp.save`, compressed by ZStandard", needs=zstandard)
def _(kind, dtype, folder):
    from torch.distributed.checkpoint._extension import ZStandard

    writer = dcp.FileSystemWriter(folder / "shards", _extensions=[ZStandard()])
    save_dcp(*fsdp2(kind, dtype, folder), folder, lambda state, checkpoint_id: dcp.save(state, storage_writer=writer))


@layout("FSDP2, one state dict without keys", ranks=(2, 3))
def _(kind, dtype, folder):
    model, optimizer = fsdp2(kind, dtype, folder)
    dcp.save({**get_model_state_dict(model), **get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))}, checkpoint_id=folder / "shards")


@layout("HSDP, `dcp.save`", ranks=(4,))
def _(kind, dtype, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    save_dcp(*fsdp2(kind, dtype, folder, mesh), folder)


@layout("TP, `dcp.save`", ranks=(2,), models=("llama",))
def _(kind, dtype, folder):
    save_dcp(*tensor_parallel(kind, dtype, folder), folder)


@layout("FSDP2 x TP, `dcp.save`", ranks=(4,), models=("llama",))
def _(kind, dtype, folder):
    save_dcp(*tensor_parallel(kind, dtype, folder, True), folder)


@layout("FSDP1, `dcp.save`", ranks=(2, 3, 4))
def _(kind, dtype, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model, optimizer = fsdp1(kind, dtype, folder)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    dcp.save({"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}, checkpoint_id=folder / "shards")


def hf_writer():
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return "save_distributed" in HuggingFaceStorageWriter.__init__.__code__.co_varnames


@layout("FSDP2, `HuggingFaceStorageWriter`, sharded", ranks=(2, 3, 4), models=("llama",), moments=False, needs=hf_writer)
def _(kind, dtype, folder):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    model, _ = fsdp2(kind, dtype, folder)
    dcp.save(get_model_state_dict(model), storage_writer=HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True))


@layout("FSDP2, a file per rank (verl, SkyRL)", moments=False)
def _(kind, dtype, folder):
    save_ranks(fsdp2(kind, dtype, folder)[0].state_dict(), folder)


@layout("HSDP, a file per rank", ranks=(4,), moments=False)
def _(kind, dtype, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    save_ranks(fsdp2(kind, dtype, folder, mesh)[0].state_dict(), folder)


@layout("FSDP2 x TP, a file per rank", ranks=(4,), models=("llama",), moments=False)
def _(kind, dtype, folder):
    save_ranks(tensor_parallel(kind, dtype, folder, True)[0].state_dict(), folder)


@layout("FSDP1, a file per rank (verl)", ranks=(2, 3, 4), moments=False)
def _(kind, dtype, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model, _ = fsdp1(kind, dtype, folder)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    save_ranks(model.state_dict(), folder)


@layout("FSDP1, `LOCAL_STATE_DICT` per rank", ranks=(2,), refused="LOCAL_STATE_DICT")
def _(kind, dtype, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(make(kind, dtype), device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    save_ranks(model.state_dict(), folder)


@layout("FSDP2, whole state dict by `torch.save`", ranks=(2, 3), moments=False)
def _(kind, dtype, folder):
    model, _ = fsdp2(kind, dtype, folder)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({"model": state, "step": 1}, folder / "shards.pt")
    dist.barrier()


def accelerated(kind, dtype, folder, version, form, **options):
    """By accelerate's functions that write the shards of Accelerator.save_state, which itself allows FSDP on GPUs alone."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    PartialState(cpu=True)  # for its log
    more = {"fsdp_version": version} if version == 2 else {}
    plugin = FullyShardedDataParallelPlugin(state_dict_type=form, use_orig_params=True, **more)
    accelerator = types.SimpleNamespace(num_processes=dist.get_world_size(), process_index=dist.get_rank(), is_main_process=dist.get_rank() == 0,
                                        wait_for_everyone=dist.barrier, is_fsdp2=version == 2)
    model, optimizer = (fsdp1 if version == 1 else fsdp2)(kind, dtype, folder)
    save_fsdp_model(plugin, accelerator, model, folder / "shards", **options)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder / "shards")


def accelerate_2():
    import accelerate

    return int(accelerate.__version__.split(".")[0]) >= 1 and int(accelerate.__version__.split(".")[1]) >= 6 and torch.__version__ >= "2.6"


@layout("accelerate, FSDP1, `SHARDED_STATE_DICT`", ranks=(2, 3), needs=lambda: __import__("accelerate"))
def _(kind, dtype, folder):
    accelerated(kind, dtype, folder, 1, "SHARDED_STATE_DICT")


# PyTorch 2.15 writes exp_avg_sq as exp_avg, too, if the state is on CPUs.
@layout("accelerate, FSDP1, `FULL_STATE_DICT`", ranks=(2,), moments=False, needs=lambda: __import__("accelerate"))
def _(kind, dtype, folder):
    accelerated(kind, dtype, folder, 1, "FULL_STATE_DICT")


@layout("accelerate, FSDP2, `SHARDED_STATE_DICT`", ranks=(2, 3), needs=accelerate_2)
def _(kind, dtype, folder):
    accelerated(kind, dtype, folder, 2, "SHARDED_STATE_DICT")


@layout("accelerate, FSDP2, `FULL_STATE_DICT`", ranks=(2,), needs=accelerate_2)
def _(kind, dtype, folder):
    accelerated(kind, dtype, folder, 2, "FULL_STATE_DICT")


def accelerate_without_dcp():
    from accelerate.utils import save_fsdp_model

    return "use_dcp" in save_fsdp_model.__code__.co_varnames


@layout("accelerate, FSDP2, a file per rank", ranks=(2, 3), moments=False, needs=accelerate_without_dcp)
def _(kind, dtype, folder):
    accelerated(kind, dtype, folder, 2, "SHARDED_STATE_DICT", use_dcp=False)


def lightning_module(kind, dtype, attribute):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            setattr(self, attribute, make(kind, dtype))

        def training_step(self, batch, _):
            return getattr(self, attribute)(batch).logits.float().square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    return Module()


def lightning_fit(kind, dtype, folder, strategy, attribute="model"):
    import logging

    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = lightning_module(kind, dtype, attribute)
    world = dist.get_world_size() if dist.is_initialized() else 1
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", devices=world, strategy=strategy, logger=False, enable_progress_bar=False,
                                enable_model_summary=False, callbacks=[ModelCheckpoint(dirpath=folder, filename="shards", every_n_train_steps=1)])
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(8 * 16).reshape(16, 8) % 61, batch_size=2))
    gather(trainer.strategy.model, trainer.optimizers[0], folder, prefix=attribute + ".")


def has_lightning():
    return __import__("lightning")


for form, has_moments in (("sharded", True), ("full", False)):
    @layout(f"Lightning, FSDPStrategy, {form}", ranks=(2, 3), moments=has_moments, needs=has_lightning)
    def _(kind, dtype, folder, form=form):
        from lightning.pytorch.strategies import FSDPStrategy
        from torch.distributed.fsdp import FullyShardedDataParallel

        class OnCpu(FSDPStrategy):  # Lightning allows FSDP on GPUs alone, PyTorch on CPUs too
            root_device = torch.device("cpu")

        wrapped = FullyShardedDataParallel.__init__

        def on_cpu(*args, **options):
            wrapped(*args, **{**options, "device_id": torch.device("cpu")})

        with mock.patch.object(FullyShardedDataParallel, "__init__", on_cpu):
            lightning_fit(kind, dtype, folder, OnCpu(state_dict_type=form, process_group_backend="gloo"))


@layout("Lightning, one process, `.ckpt`", ranks=(1,), moments=False, needs=has_lightning)
def _(kind, dtype, folder):
    lightning_fit(kind, dtype, folder, "auto", "net")


@layout("transformers, `save_pretrained`, safetensors in parts", ranks=(1,), moments=False)
def _(kind, dtype, folder):
    model, _ = gather(make(kind, dtype), None, folder)
    model.save_pretrained(folder / "shards", max_shard_size="10KB")


@layout("transformers 4, `pytorch_model.bin`, whole", ranks=(1,), moments=False, needs=lambda: transformers.__version__ < "5")
def _(kind, dtype, folder):
    gather(make(kind, dtype), None, folder)[0].save_pretrained(folder / "shards", safe_serialization=False)


@layout("transformers 4, `pytorch_model.bin`, in parts", ranks=(1,), moments=False, needs=lambda: transformers.__version__ < "5")
def _(kind, dtype, folder):
    gather(make(kind, dtype), None, folder)[0].save_pretrained(folder / "shards", safe_serialization=False, max_shard_size="10KB")


@layout("transformers, `Trainer`", ranks=(1,), moments=False, needs=lambda: __import__("accelerate"))
def _(kind, dtype, folder):
    model = make(kind, dtype)
    rows = [dict(input_ids=torch.arange(8), labels=torch.arange(8))]
    settings = transformers.TrainingArguments(str(folder), max_steps=1, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    transformers.Trainer(model, settings, train_dataset=rows).train()
    gather(model, None, folder)
    (folder / "checkpoint-1").rename(folder / "shards")


def cases(o, world):
    for name, (_, ranks, models, *_) in LAYOUTS.items():
        if world in ranks and (not o.layouts or any(text in name for text in o.layouts)):
            for kind in models:
                for dtype in ("float32", "bfloat16"):
                    yield name, kind, dtype, f"{list(LAYOUTS).index(name)}-{world}-{kind}-{dtype}"


def worker(rank, world, root, todo):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + 7 * os.getppid() % 20000), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      LOCAL_WORLD_SIZE=str(world), NODE_RANK="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for name, kind, dtype, key in todo:
        folder = root / key
        folder.mkdir(exist_ok=True)
        dist.barrier()
        try:
            LAYOUTS[name][0](kind, getattr(torch, dtype), folder)
        except BaseException as error:  # such as CheckpointException
            import traceback

            (folder / "not saved").write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        dist.barrier()
        (folder / "saved").touch()
    dist.destroy_process_group()


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


OPEN = """
import json, pathlib, sys, torch, transformers
from safetensors.torch import load_file
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
ids = torch.arange(12)[None]
for folder in map(pathlib.Path, sys.argv[1:]):
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", torch_dtype=torch.float32, output_loading_info=True)
        wrong = [f"{k}: {v}" for k, v in info.items() if v]
        theirs = transformers.AutoModelForCausalLM.from_config(model.config).float().eval()
        live = {k: v.float() for k, v in load_file(folder / "live.safetensors.golden").items() if "/" not in k}
        missing, extra = theirs.load_state_dict(live, strict=False)
        wrong += [k for k in missing if k != "lm_head.weight" or not model.config.tie_word_embeddings]
        with torch.no_grad():
            if not torch.equal(theirs(ids).logits, model.eval()(ids).logits):
                wrong.append("logits")
        print(json.dumps("; ".join(wrong)))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"[:300]))
"""


def open_all(python, folders):
    ran = subprocess.run([str(python), "-c", OPEN, *map(str, folders)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('"')]


def check(tessera, folder, moments, refused):
    """What differs; "" if nothing does."""
    if not (folder / "saved").exists():
        return NOT_SAVED + ": the process crashed"
    if (folder / "not saved").exists():
        return NOT_SAVED + ": " + (folder / "not saved").read_text().splitlines()[0][:80]
    source = next(p for p in map(folder.joinpath, ("shards", "shards.pt", "shards.ckpt")) if p.exists())
    config = folder / "config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text((folder / "config.json").read_text())

    def run(out, *more):
        words = [tessera, "consolidate", source, folder / out, "--overwrite", "--config", config, *more]
        ran = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        return ran.stderr.strip() if ran.returncode else ""

    failed = run("hf")
    if refused:
        return "" if refused in failed and not (folder / "hf").exists() else f"expected a refusal with {refused}, got: {failed or 'exit code 0'}"
    if failed:
        return failed
    live = load_file(folder / LIVE)
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    wanted = {k: v for k, v in live.items() if "/" not in k and not (tied and k == "lm_head.weight")}
    ours = {}
    for file in (folder / "hf").glob("*.safetensors"):
        ours.update(load_file(file))
    wrong = sorted(wanted.keys() ^ ours.keys()) + [k for k in wanted if k in ours and not same_bits(ours[k], wanted[k])]
    if moments:
        failed = run("moments", "--what", "optimizer")
        if failed:
            return failed
        wanted, ours = {k: v for k, v in live.items() if "/" in k and not (tied and k.endswith("/lm_head.weight"))}, {}
        for file in (folder / "moments").glob("*.safetensors"):
            ours.update({k: v for k, v in load_file(file).items() if k.split("/")[0] in MOMENTS})
        wrong += sorted(wanted.keys() ^ ours.keys()) + [k for k in wanted if k in ours and not same_bits(ours[k], wanted[k])]
        failed = run("optimizer", "--format", "bin", "--what", "optimizer")
        if failed:
            return failed
        state = torch.load(folder / "optimizer/optimizer.bin", weights_only=True)
        ours = [[{k: g.get(k) for k in SETTINGS}, sorted(g["param_names"])] for g in state["param_groups"]]
        if json.dumps(sorted(ours, key=str)) != json.dumps(sorted(json.loads((folder / "groups.json").read_text()), key=str)):
            wrong.append(f"hyperparameters: {str(ours)[:100]}")
    return ", ".join(wrong[:4])


def versions():
    import importlib.metadata

    for name in ("torch", "transformers", "accelerate", "lightning", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name).split('+')[0]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--layouts", nargs="+", help="only those whose name has one of these texts")
    parser.add_argument("--also", type=pathlib.Path, nargs="+", default=[], help="further Pythons that open the exports")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the checkpoints, reused if it is there")
    o = parser.parse_args()
    root = o.keep or pathlib.Path(tempfile.mkdtemp(prefix="check-sources-"))
    found = {}
    for world in o.ranks:
        root.mkdir(exist_ok=True)
        for name in dict.fromkeys(name for name, *_ in cases(o, world)):
            for _ in range(3):  # PyTorch 2.4 sometimes crashes
                todo = [case for case in cases(o, world) if case[0] == name and not (root / case[3] / "saved").exists()]
                if todo:  # in processes of their own: libraries change global state
                    with contextlib.suppress(mp.ProcessExitedException):
                        mp.spawn(worker, (world, root, todo), nprocs=world)
        for name, kind, dtype, key in cases(o, world):
            (root / key).mkdir(exist_ok=True)
            (root / key / "config.json").write_text(json.dumps(make(kind, torch.float32).config.to_dict()))
            found[key] = (name, world, check(o.build / "bin/tessera", root / key, *LAYOUTS[name][3:]))
    opened = [key for key, (name, _, wrong) in found.items() if not wrong and not LAYOUTS[name][4]]
    for python in [pathlib.Path(sys.executable), *o.also]:
        for key, wrong in zip(opened, open_all(python, [root / key for key in opened])):
            if wrong:
                found[key] = (*found[key][:2], f"{python}: {wrong}")

    print(f"{', '.join(versions())}:\n\n| layout | ranks | cases | compared | result |\n| --- | --- | --- | --- | --- |")
    failures = left_out = 0
    for name, (_, _, _, moments, refused) in LAYOUTS.items():
        rows = [(world, wrong) for layout_name, world, wrong in found.values() if layout_name == name]
        wrong = {wrong: None for _, wrong in rows if wrong}
        failures += sum(bool(wrong) and not wrong.startswith(NOT_SAVED) for _, wrong in rows)
        left_out += sum(wrong.startswith(NOT_SAVED) for _, wrong in rows)
        if rows:
            print(f"| {name} | {' '.join(sorted({str(w) for w, _ in rows}))} | {len(rows)} | {'-' if refused else 'weights, moments' if moments else 'weights'} | "
                  f"{'; '.join(wrong) if wrong else f'refused: {refused}' if refused else 'same bits'} |")
    print(f"\n{len(found) - failures - left_out} of {len(found) - left_out} cases as expected")
    if not o.keep and not failures:
        shutil.rmtree(root)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
