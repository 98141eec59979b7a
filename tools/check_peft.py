#!/usr/bin/env python3
"""Saves states of running models of PEFT, and merges them by `tessera consolidate --merge-lora` in one command.

    pip install torch transformers peft safetensors
    python tools/check_peft.py BUILD_DIR [--keep FOLDER]

For small models with LoRA (also rank-stabilized, and with patterns of ranks and alphas), saved by FSDP2 on two ranks and by torch.save,
with all weights or those of the adapters alone, checks that
- the merged weights have the bits of two commands: adapters in PEFT's format, and those merged;
- transformers opens the result strictly, with the logits of PEFT's merge_and_unload() to 1e-5;
- DoRA and modules_to_save are refused.
Prints a table; exit code 1 if a check fails.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
SIZES = dict(vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=32)
MODELS = {"llama": dict(SIZES, tie_word_embeddings=False), "qwen2": dict(SIZES, tie_word_embeddings=True),
          "phi3": dict(SIZES, tie_word_embeddings=False, pad_token_id=0),
          "gpt2": dict(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=4)}
SETTINGS = {
    "LoRA": dict(r=4, lora_alpha=6),
    "rank-stabilized": dict(r=4, lora_alpha=6, use_rslora=True),
    "patterns": dict(r=4, lora_alpha=6, rank_pattern={"down_proj": 2, "c_proj": 2}, alpha_pattern={"o_proj": 3, "c_fc": 3}),
}
REFUSED = {"DoRA": (dict(r=4, use_dora=True), "use_dora is set"), "modules_to_save": (dict(r=4, modules_to_save=["lm_head"]), "modules_to_save is set")}
IDS = torch.arange(20)[None]


def make(kind, settings, base):
    torch.manual_seed(1)
    if not (base / "config.json").exists():
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **MODELS[kind])).float().save_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def save_fsdp(rank, store, kind, settings, base, folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = make(kind, settings, base)
    inner = model.base_model.model
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in inner.transformer.h if kind == "gpt2" else inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="work in this folder")
    o = parser.parse_args()
    work = o.keep or pathlib.Path(tempfile.mkdtemp(prefix="check-peft-"))
    failed = []

    def tessera(*words):
        done = subprocess.run([o.build / "bin/tessera", "consolidate", *map(str, words), "--overwrite"], capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    def report(name, problem, text=""):
        print(f"{'FAIL' if problem else 'ok  '} {name:<48} {problem or text}", flush=True)
        if problem:
            failed.append(name)

    def weights(folder):
        return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}

    for kind in MODELS:
        base = work / kind / "base"
        for label, settings in {**SETTINGS, **{k: v for k, (v, _) in REFUSED.items()}}.items():
            root = work / kind / label
            states = root / "fsdp", root / "full" / "state.pt", root / "adapters" / "state.pt"
            for state in states:
                (state.parent if state.suffix else state).mkdir(parents=True, exist_ok=True)
            model = make(kind, settings, base)
            store = (root / "store").absolute()
            store.unlink(missing_ok=True)
            mp.spawn(save_fsdp, (store, kind, settings, base, states[0]), nprocs=2)
            torch.save(model.state_dict(), states[1])
            torch.save({k: v for k, v in model.state_dict().items() if "lora_" in k or "modules_to_save" in k}, states[2])
            for folder in (states[0], states[1].parent, states[2].parent):
                model.peft_config["default"].base_model_name_or_path = "elsewhere"
                model.peft_config["default"].save_pretrained(folder)
            config = base / "config.json"
            if label in REFUSED:
                said = tessera(states[1], root / "out", "--merge-lora", "--base", base)
                report(f"{kind}, {label}", "" if REFUSED[label][1] in said else f"not refused: {said}", "refused")
                continue
            with torch.no_grad():
                expected = model.merge_and_unload()(IDS).logits
            for state in states:
                place = state.parent if state.suffix else state
                name = f"{kind}, {label}, {state.relative_to(root)}"
                problem = tessera(state, root / "peft") or tessera(root / "peft", root / "twice", "--merge-lora", "--base", base)
                problem = problem or tessera(state, root / "once", "--merge-lora", "--base", base)
                if not problem and weights(root / "once") != weights(root / "twice"):
                    problem = "other bits than two commands"
                if not problem and place.name != "adapters":  # the base's weights are in the state
                    (place / "config.json").write_bytes(config.read_bytes())
                    problem = tessera(state, root / "own", "--merge-lora")
                    (place / "config.json").unlink()
                    if not problem and weights(root / "own") != weights(root / "once"):
                        problem = "other bits with the base in the state"
                if problem:
                    report(name, problem)
                    continue
                merged, info = transformers.AutoModelForCausalLM.from_pretrained(root / "once", torch_dtype=torch.float32, output_loading_info=True)
                with torch.no_grad():
                    most = (merged.eval()(IDS).logits - expected).abs().max().item()
                wrong = [f"{k}: {v}" for k, v in info.items() if v]
                report(name, "; ".join(wrong) or ("" if most <= 1e-5 else f"logits differ by {most}"), f"largest difference of logits {most:.1e}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
