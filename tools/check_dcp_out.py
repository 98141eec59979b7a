#!/usr/bin/env python3
"""Trains small models by tessera (Llama, and GPT-2 with its tied head), exports them, and resumes them by PyTorch.

    pip install torch transformers safetensors
    python tools/check_dcp_out.py BUILD_DIR [--ranks 2 4] [--keep FOLDER]

tessera trains on 2 ranks (CPU, fp32, AdamW) on the same batch in each step, and goes on after the exported checkpoint. Checks that
- FSDP2 (fully_shard, gloo) on each number of ranks resumes model and optimizer from `--format dcp --what all`, in one file and cut into
  many, with groups by list and by name: the losses of the next steps are tessera's to 1e-5;
- the state dicts of `--format bin --what all` open by torch.load(weights_only=True, mmap=True), with CRC-32s that zipfile verifies;
  transformers opens the directory strictly, torch.optim.AdamW loads optimizer.bin, and the losses are tessera's to 1e-5;
- tessera makes the same model.safetensors, byte for byte, of its checkpoint and of both exports, and the same optimizer.safetensors of
  a Distributed Checkpoint and of one that it made from that;
- of a Distributed Checkpoint of PyTorch, for each family without experts, optimizer.bin has the bits, numbers, names and
  hyperparameters of the optimizer's state_dict();
- a run of FSDP2 with two groups of other rates and decays, saved by PyTorch in each form of its state dicts, goes on from
  `--format dcp` and `--format bin` with the losses that it had itself.
Prints a table; exit code 1 if a check fails.
"""
import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import zipfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from transformers import AutoConfig, AutoModelForCausalLM

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before 2.6
    from torch.distributed._composable.fsdp import fully_shard

VOCAB, WIDTH, ROWS, STEP, STEPS = 97, 32, 4, 6, 9
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "smollm3", "nanochat")
TOLERANCE = 1e-5
FORMS = ("dcp", "dcp-flat", "state.pt", "state-flat.pt")


def make_tokens(file):
    ids = torch.randint(VOCAB, (ROWS * WIDTH + 1,), generator=torch.Generator().manual_seed(5))
    file.write_bytes(struct.pack(f"<{len(ids)}H", *ids.tolist()))
    return ids


def rows_of(ids):
    return torch.stack([ids[i * WIDTH:(i + 1) * WIDTH + 1] for i in range(ROWS)])


def loss_of(model, rows):
    logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def new_model(folder):
    torch.manual_seed(123)  # other weights than the exported ones
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), torch_dtype=torch.float32)


def groups_of(model, split):
    parameters = list(model.parameters())
    if not split:
        return parameters
    return [{"params": [p for p in parameters if p.dim() >= 2]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def foreign_groups(model):
    parameters = list(model.named_parameters())
    return [{"params": [p for name, p in parameters if "norm" not in name], "weight_decay": 0.3},
            {"params": [p for name, p in parameters if "norm" in name], "lr": 2e-2, "betas": (0.7, 0.9), "weight_decay": 0.0}]


def leave():
    """Ends a worker at once: PyTorch's threads sometimes abort one that exits normally."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def save_foreign(rank, world, store, folder, ids):
    """Trains by FSDP2, saves the state in each form, and goes on."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = tiny_model("llama", VOCAB)
    if rank == 0:
        model.config.save_pretrained(folder)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(foreign_groups(model), lr=5e-3, betas=(0.8, 0.95), eps=1e-6)
    steps(model, optimizer, ids, rank, world, STEP)
    for form in FORMS:
        options = StateDictOptions(flatten_optimizer_state_dict="flat" in form, full_state_dict=form.endswith("pt"), cpu_offload=form.endswith("pt"))
        state = {"model": get_model_state_dict(model, options=options),
                 "optimizer_state_dict" if form.endswith("pt") else "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        if not form.endswith("pt"):
            dcp.save(state, checkpoint_id=folder / form)
        elif rank == 0:
            torch.save(state, folder / form)
    losses = steps(model, optimizer, ids, rank, world, STEPS - STEP)
    if rank == 0:
        torch.save(losses, folder / "losses.golden")
    leave()


def steps(model, optimizer, ids, rank, world, count):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, rows_of(ids).chunk(world)[rank])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def resume(rank, world, store, folder, ids, flat, out, groups=None):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    model = new_model(folder)
    for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model) if groups else groups_of(model, split=True), lr=123.0, betas=(0.1, 0.2), eps=1.0, weight_decay=9.0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    losses = steps(model, optimizer, ids, rank, world, STEPS - STEP)
    if rank == 0:
        torch.save(losses, out)
    leave()


def resume_foreign_bin(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(foreign_groups(model), lr=123.0)
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))
    return steps(model, optimizer, ids, 0, 1, STEPS - STEP)


def resume_bin(folder, ids):
    for file in folder.glob("*.bin"):
        assert zipfile.ZipFile(file).testzip() is None, file
        torch.load(file, weights_only=True, mmap=True)
    model, info = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    model.train()
    optimizer = torch.optim.AdamW(groups_of(model, split=False), lr=123.0)
    saved = torch.load(folder / "optimizer.bin", weights_only=True)
    assert saved["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    optimizer.load_state_dict(saved)
    one = optimizer.param_groups[0]  # the file has one group; tessera's weight decay leaves out tensors of one dim
    rest = [p for p in one["params"] if p.dim() < 2]
    one["params"] = [p for p in one["params"] if p.dim() >= 2]
    optimizer.param_groups.append({**one, "params": rest, "weight_decay": 0.0})
    return steps(model, optimizer, ids, 0, 1, STEPS - STEP)


def tiny_model(family, vocabulary=64):
    if family == "gpt2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
    else:
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     max_position_embeddings=64)
        sizes |= {} if family == "phi3" else dict(head_dim=8)
        sizes |= dict(attention_bias=True, mlp_bias=True) if family in ("llama", "smollm3") else {}
    config = AutoConfig.for_model(family, vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes)
    model = AutoModelForCausalLM.from_config(config).float()
    model.config.architectures = [type(model).__name__]
    return model


def save_family(family, folder):
    """Saves a model of PyTorch after a step. Returns names of its parameters, and the optimizer's state dict."""
    model = tiny_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    model.config.save_pretrained(folder)
    return [name for name, _ in model.named_parameters()], optimizer.state_dict()


def files_of(folder, pattern):
    return {file.name: file.read_bytes() for file in sorted(folder.glob(pattern))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--keep", type=pathlib.Path, help="work in this folder")
    args = parser.parse_args()
    temporary = None if args.keep else tempfile.TemporaryDirectory()
    work = args.keep or pathlib.Path(temporary.name)
    work.mkdir(parents=True, exist_ok=True)
    failed = []

    def report(name, text, good):
        print(f"{'ok  ' if good else 'FAIL'} {name:<44} {text}", flush=True)
        if not good:
            failed.append(name)

    def tessera(*words):
        done = subprocess.run([args.build / "bin/tessera", *map(str, words)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"tessera {' '.join(map(str, words))}: exit {done.returncode}\n{done.stderr}")

    for family in FAMILIES:
        names, expected = save_family(family, work / f"family-{family}")
        tessera("consolidate", work / f"family-{family}", work / f"bin-{family}", "--format", "bin", "--what", "all", "--overwrite")
        found = torch.load(work / f"bin-{family}/optimizer.bin", weights_only=True)
        same = found["state"].keys() == expected["state"].keys() and found["param_groups"][0]["param_names"] == names
        same = same and all(torch.equal(found["state"][i][kind], value)
                            for i, state in expected["state"].items() for kind, value in state.items())
        ours = found["param_groups"][0]
        same = same and all(ours[key] == value and type(ours[key]) is type(value) for key, value in expected["param_groups"][0].items())
        report(f"{family}, optimizer.bin of PyTorch's state", f"{len(names)} parameters are equal", same)

    ids = make_tokens(work / "tokens.bin")
    foreign, store = work / "foreign", (work / "store").absolute()
    foreign.mkdir(exist_ok=True)
    store.unlink(missing_ok=True)
    mp.spawn(save_foreign, (2, store, foreign, ids), nprocs=2)
    theirs = torch.load(foreign / "losses.golden")
    for form in FORMS:
        found = {}
        for kind in ("dcp", "bin"):
            folder = work / f"foreign-{kind}-{form}"
            tessera("consolidate", foreign / form, folder, "--config", foreign, "--format", kind, "--what", "all", "--overwrite")
            if kind == "bin":
                found[kind] = resume_foreign_bin(folder, ids)
            for flat in (False, True) if kind == "dcp" else ():
                store.unlink(missing_ok=True)
                mp.spawn(resume, (2, store, folder, ids, flat, work / "losses.pt", foreign_groups), nprocs=2)
                found[f"dcp{', flat' if flat else ''}"] = torch.load(work / "losses.pt")
        for kind, losses in found.items():
            most = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
            report(f"FSDP2 with two groups, {form} -> {kind}", f"largest difference of {len(theirs)} losses {most:.1e}", most <= TOLERANCE)

    for name in ("llama", "gpt2"):
        run = work / f"run-{name}"
        model = {"model.n_kv_head": 2, "model.n_inner": 48} if name == "llama" else {}
        model = {"model.arch": name, "model.n_layer": 2, "model.n_head": 4, "model.n_embd": 32, **model,
                 "model.vocab_size": VOCAB, "model.seq_len": WIDTH, "data.train": work / "tokens.bin", "data.order": "sequential", "train.steps": STEPS, "train.global_batch": ROWS,
                 "train.eval_every": 0, "train.device": "cpu", "optim.lr": 3e-3, "optim.schedule": "constant",
                 "optim.warmup_steps": 0, "optim.clip_norm": 0, "optim.weight_decay": 0.2, "checkpoint.every": 3,
                 "checkpoint.keep": 9, "run.out": run}
        tessera("train", "--nproc", 2, *[word for key, value in model.items() for word in (f"--{key}", value)])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        ours = [next(line["loss"] for line in lines if line["step"] == step and "loss" in line) for step in range(STEP, STEPS)]

        def compare(what, losses):
            most = max(abs(a - b) for a, b in zip(losses, ours, strict=True))
            report(f"{name}, {what}", f"largest difference of {len(ours)} losses {most:.1e} (last {losses[-1]:.6f})", most <= TOLERANCE)

        def consolidate(source, out, *words):
            tessera("consolidate", source, work / out, "--overwrite", *words)
            return work / out

        for cut, words in (("one file", ()), ("many files", ("--max-shard-size", "8000"))):
            folder = consolidate(run, f"dcp-{name}", "--step", STEP, "--format", "dcp", "--what", "all", *words)
            count = len(list(folder.glob("*.distcp")))
            for world in args.ranks:
                for flat in (False, True):
                    out = work / "losses.pt"
                    store = (work / "store").absolute()
                    store.unlink(missing_ok=True)
                    mp.spawn(resume, (world, store, folder, ids, flat, out), nprocs=world)
                    compare(f"FSDP2, {world} ranks, {count} files{', flat' if flat else ''}", torch.load(out))
            hf = consolidate(run, f"hf-{name}", "--step", STEP)
            again = consolidate(folder, f"hf2-{name}")
            same = files_of(hf, "*.safetensors") == files_of(again, "*.safetensors")
            report(f"{name}, dcp -> hf, {cut}", "model.safetensors is equal", same)
            state = consolidate(folder, f"state-{name}", "--what", "optimizer")
            saved = consolidate(folder, f"dcp2-{name}", "--format", "dcp", "--what", "all")
            state2 = consolidate(saved, f"state2-{name}", "--what", "optimizer")
            same = files_of(state, "*.safetensors") == files_of(state2, "*.safetensors")
            report(f"{name}, dcp -> dcp, {cut}", "optimizer.safetensors is equal", same)
            folder = consolidate(run, f"bin-{name}", "--step", STEP, "--format", "bin", "--what", "all", *words)
            compare(f"bin, {len(list(folder.glob('pytorch_model*.bin')))} files", resume_bin(folder, ids))
            again = consolidate(folder, f"hf3-{name}")
            same = files_of(hf, "*.safetensors") == files_of(again, "*.safetensors")
            report(f"{name}, bin -> hf, {cut}", "model.safetensors is equal", same)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
