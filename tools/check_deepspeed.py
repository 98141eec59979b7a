#!/usr/bin/env python3
"""Trains small models by DeepSpeed on the CPU, and compares tessera's consolidation with DeepSpeed's own.

    pip install torch transformers safetensors; DS_BUILD_OPS=0 pip install deepspeed
    python tools/check_deepspeed.py BUILD_DIR [--ranks 1 2 3 4] [--dtypes fp32 bf16 fp16] [--keep FOLDER]

For ZeRO stages 1, 2 and 3, every number of ranks, dtype and model below, and for further settings, checks that
- weights have the bits of get_fp32_state_dict_from_zero_checkpoint (buffers keep their dtype, which DeepSpeed widens; ZeRO-1's frozen
  parameters, which DeepSpeed leaves out, have those of the saved module);
- float32 weights, exp_avg and exp_avg_sq have the bits that the ranks gathered from the live optimizer;
- transformers opens the exported model strictly, with the logits of the model that has DeepSpeed's consolidated weights.
Prints a table; exit code 1 if a check fails. Takes some minutes.
"""
import argparse
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

LIVE = "live.safetensors.golden"
GPT2 = dict(model_type="gpt2", vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=3)
LLAMA = dict(model_type="llama", vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, fewer elements than ranks, shared and frozen parameters, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.norm = nn.LayerNorm(7)
        self.deep = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 7)])
        self.scale = nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.randn(3, 1, 7))
        self.frozen = nn.Linear(7, 11)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(7) / 3)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.arange(6) % 2 == 0)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids):
        x = self.embed(ids % 13)
        x = self.norm(x - self.mean.to(x.dtype)) * self.scale + self.cube.sum((0, 1))
        x = self.deep[1](torch.relu(self.deep[0](x))) + self.frozen(x).sum(-1, keepdim=True)
        return self.head(x)


def hugging_face(config):
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))


# What else changes the layout of the files: name -> (stage, dtype, settings of ZeRO, other settings)
SETTINGS = {
    "bf16_optimizer": (1, "bf16", {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "elastic": (2, "bf16", {"elastic_checkpoint": True}, {}),
    "round_robin": (2, "bf16", {"round_robin_gradients": True}, {}),
    "aligned": (2, "bf16", {"parameter_alignment": True}, {}),
    "subgroups": (3, "bf16", {"sub_group_size": 40}, {}),
}
# name -> (model, config.json, two parameter groups)
MODELS = {"gpt2": (lambda: hugging_face(GPT2), GPT2, False), "llama": (lambda: hugging_face(LLAMA), LLAMA, True), "odd": (Odd, None, True)}


def groups_of(model, two):
    trained = [p for p in model.parameters() if p.requires_grad]
    if not two:
        return trained
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]


def train(folder, model, two_groups, stage, dtype, zero={}, more={}):
    """Trains and saves; the first rank also saves what all ranks gather from the live optimizer, as live.safetensors.golden."""
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage, **zero}, **more,
                "bf16": {"enabled": dtype == "bf16"}, "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 4}}
    optimizer = torch.optim.AdamW(groups_of(model, two_groups), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(2):
        torch.manual_seed(100 * step + dist.get_rank())
        out = engine(torch.randint(0, 61, (2, 8)))
        out = out if isinstance(out, torch.Tensor) else out.logits
        engine.backward(out.float().square().mean())
        engine.step()
    engine.save_checkpoint(str(folder))
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # linked before the state of later groups existed
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    gather = {"": deepspeed.utils.safe_get_full_fp32_param}
    for kind in ("exp_avg", "exp_avg_sq"):
        gather[kind + "/"] = lambda p, kind=kind: deepspeed.utils.safe_get_full_optimizer_state(p, kind)
    live = {}
    for name, p in model.named_parameters():
        if p.requires_grad and stage > 0 and not zero.get("round_robin_gradients"):
            live.update({prefix + name: get(p).clone() for prefix, get in gather.items()})
    if zero.get("round_robin_gradients"):  # for which those of DeepSpeed (0.19.8) take parts of other parameters
        for params, part in zip(engine.optimizer.round_robin_bit16_groups, engine.optimizer.single_partition_of_fp32_groups):
            for prefix in gather:
                mine = engine.optimizer.optimizer.state[part][prefix[:-1]] if prefix else part.data
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                whole, sizes = torch.cat(parts), [p.numel() for p in params]
                for p, value in zip(params, whole[: sum(sizes)].split(sizes)):
                    live[prefix + engine.param_names[p]] = value.view(p.shape).clone()
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in live.items()}, folder / LIVE)
    engine.destroy()
    dist.barrier()


def config_of(folder):
    """Not in the run's directory, where it would make tessera write its own names of tensors."""
    return folder.with_name(folder.name + ".config.json")


def cases(o, world):
    """Folder, model, setting, and what train() takes."""
    for stage in (1, 2, 3):
        for dtype in o.dtypes:
            for model in MODELS:
                yield f"{model}-{stage}-{world}-{dtype}", model, "", (stage, dtype)
    for setting, values in SETTINGS.items():
        yield f"{setting}-{world}", "odd", setting, values


def worker(rank, world, root, o):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29750 + world), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")
    import logging

    logging.disable(logging.WARNING)
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slow on some CPUs, but right
    for name, model, _, settings in cases(o, world):
        make, config, two = MODELS[model]
        torch.manual_seed(1)
        folder = root / name
        folder.mkdir(exist_ok=True)
        train(folder, make(), two, *settings)
        if config and rank == 0:
            config_of(folder).write_text(json.dumps(config))
    dist.destroy_process_group()


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def check(tessera, folder, config):
    """Number of compared weights and moments, and what differs."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    live = load_file(folder / LIVE)
    theirs = {name: value for name, value in live.items() if "/" not in name}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if not folder.name.startswith("bf16_optimizer"):  # DeepSpeed's script refuses it
            theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    for file in folder.glob("*/mp_rank_00_model_states.pt"):
        for name, value in torch.load(file, weights_only=False)["module"].items():
            theirs.setdefault(name, value)

    def run(out, *more):
        done = subprocess.run([tessera, "consolidate", folder, outputs / out, "--overwrite", *more], capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    outputs = folder.with_name(folder.name + ".out")

    failed = run("flat", "--format", "safetensors", "--what", "all", "--strip", "none")
    if failed:
        return 0, 0, failed
    ours = {}
    for file in (outputs / "flat").glob("*.safetensors"):
        ours.update(load_file(file))
    def differs(name, value):
        got = ours.get(name)
        return got is None or not same_bits(got if got.dtype == value.dtype else got.to(value.dtype), value)

    # DeepSpeed widens buffers to float32; both keep the dtype of frozen parameters.
    wrong = [name for values in (theirs, live) for name, value in values.items() if differs(name, value)]
    wrong += set(ours) - set(theirs) - set(live)
    if config:
        import transformers

        wrong += filter(None, [run("hf", "--config", config_of(folder))])
        if not wrong:
            ids = torch.arange(12)[None] % config["vocab_size"]
            expected = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float().eval()
            expected.load_state_dict(theirs)
            got, report = transformers.AutoModelForCausalLM.from_pretrained(outputs / "hf", dtype=torch.float32, output_loading_info=True)
            wrong += [f"{k}: {v}" for k, v in report.items() if v]
            with torch.no_grad():
                if not torch.equal(expected(ids).logits, got.eval()(ids).logits):
                    wrong.append("logits")
    return len(theirs), sum("/" in name for name in live), ", ".join(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the checkpoints, reused if they are there")
    o = parser.parse_args()
    root = o.keep or pathlib.Path(tempfile.mkdtemp(prefix="check-deepspeed-"))
    root.mkdir(exist_ok=True)
    for world in o.ranks:
        if not all((root / name / LIVE).exists() for name, *_ in cases(o, world)):
            mp.spawn(worker, (world, root, o), nprocs=world)

    import deepspeed
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'model':6} stage ranks dtype setting        weights moments  result")
    failures = 0
    for world in o.ranks:
        for name, model, setting, (stage, dtype, *_) in cases(o, world):
            weights, moments, wrong = check(o.build / "bin/tessera", root / name, MODELS[model][1])
            failures += bool(wrong)
            print(f"{model:6} {stage:5} {world:5} {dtype:5} {setting:14} {weights:7} {moments:7}  {wrong or 'same bits'}", flush=True)
    print(f"FAILED: {failures}" if failures else "all same")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
