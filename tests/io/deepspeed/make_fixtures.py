#!/usr/bin/env python3
"""Writes fixtures/ with DeepSpeed on the CPU: checkpoints and their expected contents.

Needs deepspeed (written with 0.19.8), torch, transformers and safetensors. expected.safetensors.golden in each has the weights and
moments (exp_avg/NAME) that the ranks gathered from the live optimizer, DeepSpeed's own consolidation of others, and buffers and
weights without ZeRO as the module had them.
"""
import json
import os
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent / "fixtures"
sys.path.insert(0, str(ROOT.parents[3] / "tools"))
import check_deepspeed as check  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

GPT2 = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=61, n_positions=8, n_embd=4, n_layer=1, n_head=2)
# name -> ranks, model, two groups, settings of train()
FIXTURES = {
    "none": (1, check.Odd, False, (0, "fp32")),
    "zero1": (2, check.Odd, True, (1, "bf16", {}, {"data_types": {"grad_accum_dtype": "fp32"}})),
    "zero2": (3, check.Odd, True, (2, "bf16")),
    "zero3": (2, check.Odd, True, (3, "fp16", {"sub_group_size": 40})),
    "zero3-gpt2": (2, lambda: check.hugging_face(GPT2), False, (3, "fp32")),
}


def run(rank, name, port):
    ranks, make, two_groups, settings = FIXTURES[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    import deepspeed

    deepspeed.init_distributed("gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(1)
    check.train(ROOT / name, make(), two_groups, *settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for i, name in enumerate(FIXTURES):
        folder = ROOT / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mp.spawn(run, (name, 29850 + i), nprocs=FIXTURES[name][0])
        expected = load_file(folder / check.LIVE)
        (folder / check.LIVE).unlink()
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder)) if name in ("zero2", "zero3", "zero3-gpt2") else {}
        state = torch.load(sorted(folder.glob("*/*model_states.pt"))[0], weights_only=False)
        theirs.update({k: v for k, v in state["module"].items() if k in state["buffer_names"]})
        for key, value in {**state["module"], **theirs}.items():
            expected.setdefault(state["shared_params"].get(key, key) if state["shared_params"] else key, value)
        for key, of in (state["shared_params"] or {}).items():
            expected[key] = expected[of]
        # Tied tensors are written twice.
        save_file({k: v.clone().contiguous() for k, v in expected.items()}, folder / "expected.safetensors.golden")
        for script in folder.glob("*.py"):
            script.unlink()
        if name == "zero3-gpt2":
            (folder / "config.json").write_text(json.dumps(GPT2, indent=2) + "\n")
