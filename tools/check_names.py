#!/usr/bin/env python3
"""Saves tiny models of transformers as sharded checkpoints by FSDP2 on two ranks, under the wrappers that training programs add,
exports them by `tessera consolidate`, and opens the exports strictly: no missing or unexpected tensor, and equal logits.

    pip install torch transformers peft
    python tools/check_names.py BUILD_DIR [--also PYTHON] [FAMILY ...]

--also opens each export with another Python too, such as one with transformers 4. A family whose directory written by
save_pretrained does not open there, or gives other logits, is left out there. Prints a table. Exit code 1 if a check fails.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.utils.logging.disable_progress_bar()
BASE = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
WITH_HEAD_DIM = dict(BASE, head_dim=8)
FAMILIES = {
    "gpt2": dict(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None),
    "llama": BASE,
    "llama, tied": dict(BASE, tie_word_embeddings=True),
    "mistral": BASE,
    "qwen2": BASE,
    "qwen3": WITH_HEAD_DIM,
    "gemma": WITH_HEAD_DIM,
    "gemma2": WITH_HEAD_DIM,
    "gemma3_text": WITH_HEAD_DIM,
    "phi3": BASE,
    "olmo2": BASE,
    "olmo3": BASE,
    "smollm3": BASE,
    "nanochat": BASE,
    "mixtral": dict(BASE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(WITH_HEAD_DIM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]),
    "olmoe": dict(BASE, num_experts=4, num_experts_per_tok=2),
    "gpt_neox": {k: v for k, v in BASE.items() if k != "num_key_value_heads"},  # unknown to tessera: with --like
    "deepseek_v3": dict(BASE, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
                        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=24, num_key_value_heads=4),
}
UNKNOWN = {"gpt_neox": ["--rename", "s/lm_head\\.weight$/embed_out.weight/"], "deepseek_v3": []}  # and further options
# Names of each wrapper's weights, and whether they are under the key "model".
LAYOUTS = {
    "flat": ("", False),
    "key model": ("", True),
    "Lightning": ("model.", True),
    "attribute net": ("net.", False),
    "DDP": ("module.", False),
    "PEFT": ("base_model.model.", False),
    "nested": ("state.model.transformer_lm._forward_module.", False),
    "compiled": ("_orig_mod.", True),
}
ROWS = torch.tensor([[(7 * i * i + 3 * i + j) % 61 for i in range(20)] for j in range(2)])


def make(kind):
    config = AutoConfig.for_model(kind.split(",")[0], **FAMILIES[kind])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model):
    with torch.no_grad():
        return model(ROWS, use_cache=False).logits.float()


def save(rank, folder, kinds):
    """One of two ranks: shards each model, and saves it in each layout."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29677", RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for kind in kinds:
        model = make(kind)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        sum((p.to_local() ** 2).sum() for p in model.parameters()).backward()
        optimizer.step()  # moments, and unchanged weights, as the rate is 0
        weights = get_model_state_dict(model)
        moments = get_optimizer_state_dict(model, optimizer)["state"]
        for layout, (prefix, keyed) in LAYOUTS.items():
            state = {prefix + name: tensor for name, tensor in weights.items()}
            if keyed:
                state = {"model": state, "step": 1}
            state["optimizer"] = {"state": {prefix + name: value for name, value in moments.items()}}
            dcp.save(state, checkpoint_id=folder / kind / layout)
    dist.destroy_process_group()


OPEN = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
rows = torch.tensor(json.loads(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32, output_loading_info=True)
        wrong = [f"{k}: {v}" for k, v in info.items() if v]
        with torch.no_grad():
            logits = model.eval()(rows, use_cache=False).logits.float()
        print(json.dumps({"wrong": "; ".join(wrong)[:300], "logits": logits.flatten().tolist()}))
    except Exception as error:
        print(json.dumps({"wrong": f"{type(error).__name__}: {error}"[:300]}))
"""


def open_all(python, paths):
    words = [str(python), "-c", OPEN, json.dumps(ROWS.tolist()), *map(str, paths)]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--also", type=pathlib.Path)
    o = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="check-names-") as name:
        return check(o, pathlib.Path(name))


def check(o, folder):
    torch.multiprocessing.spawn(save, (folder, o.families), nprocs=2)
    failed = 0
    pythons = [sys.executable] + ([o.also] if o.also else [])
    for kind in o.families:
        model = make(kind)
        expected, results, paths = logits(model), {}, {}
        model.save_pretrained(folder / kind / "theirs")
        path = folder / kind / "theirs/config.json"
        config = json.loads(path.read_text())
        if "num_local_experts" in config:  # the key of transformers 4
            path.write_text(json.dumps({"num_experts": config["num_local_experts"], **config}))
        theirs = transformers.modeling_utils.load_state_dict(folder / kind / "theirs/model.safetensors")
        config = ["--like" if kind in UNKNOWN else "--config", folder / kind / "theirs", *UNKNOWN.get(kind, [])]
        for layout in LAYOUTS:
            out = folder / kind / f"{layout} out"
            words = [o.build / "bin/tessera", "consolidate", folder / kind / layout, out, *config]
            ran = subprocess.run(list(map(str, words)), capture_output=True, text=True)
            results[layout] = [] if ran.returncode == 0 and not ran.stderr else [ran.stderr.strip()[:400]]
            if ran.returncode:
                continue
            paths[layout] = out
            found = transformers.modeling_utils.load_state_dict(out / "model.safetensors")
            if found.keys() != theirs.keys():
                results[layout].append(f"names differ: {sorted(found.keys() ^ theirs.keys())[:4]}")
            elif not all(torch.equal(found[k], v) for k, v in theirs.items()):
                results[layout].append("values differ")
            words += ["--what", "optimizer"]
            words[3] = folder / kind / f"{layout} moments"
            ran = subprocess.run(list(map(str, words)), capture_output=True, text=True)
            if ran.returncode:
                results[layout].append(ran.stderr.strip()[:400])
                continue
            moments = transformers.modeling_utils.load_state_dict(words[3] / "optimizer.safetensors")
            for state in ("exp_avg", "exp_avg_sq"):
                names = {k.split("/", 1)[1] for k in moments if k.startswith(state + "/")}
                if names != theirs.keys() or any(moments[f"{state}/{k}"].shape != v.shape for k, v in theirs.items()):
                    results[layout].append(f"{state} differs: {sorted(names ^ theirs.keys())[:4]}")
        notes = ""
        for python in pythons:
            def problem(opened):
                if opened["wrong"]:
                    return f"{python}: {opened['wrong']}"
                difference = (torch.tensor(opened["logits"]) - expected.flatten()).abs().max().item()
                if not difference < 1e-4 * max(1.0, expected.abs().max().item() / 10):
                    return f"{python}: logits differ by {difference:.2e}"

            reference, *opened = open_all(python, [folder / kind / "theirs", *paths.values()])
            if problem(reference) and python != sys.executable:
                notes += f"  (not with {python}, as save_pretrained's own: {problem(reference).splitlines()[0][-90:]})"
                continue
            for layout, one in zip(paths, opened):
                results[layout] += [problem(one)] if problem(one) else []
        wrong = {layout: found for layout, found in results.items() if found}
        failed += len(wrong)
        print(f"{kind:14} {len(theirs):4} tensors  {len(results) - len(wrong)} of {len(results)} layouts{notes}", flush=True)
        for layout, found in wrong.items():
            print(f"    {layout}: " + "\n        ".join(found))
    print(f"{failed} failed" if failed else "all opened, without a missing or unexpected tensor, and with equal logits")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
