#!/usr/bin/env python3
"""Writes fixtures/ by Megatron-core on the CPU: checkpoints, and expected.safetensors.golden with the Hugging Face model of each.

    python make_fixtures.py PYTHON OLD_PYTHON

Written with megatron-core 0.16.1 and 0.9.0 in the two, torch and safetensors. The model is made from Megatron's tensors, as torch reads
them, by tools/check_megatron.py.
"""
import argparse
import json
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent / "fixtures"
sys.path.insert(0, str(ROOT.parents[3] / "tools"))
import check_megatron as check  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

SIZES = dict(hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=10,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0)
GPT2 = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=8, n_layer=1, n_head=4, vocab_size=10, n_positions=64)
LLAMA = dict(SIZES, model_type="llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
QWEN = dict(SIZES, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], head_dim=4, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=6, norm_topk_prob=True, tie_word_embeddings=False)
HEADS = dict(num_attention_heads=4, num_query_groups=2, group_query_attention=True)
# name -> Python, config.json, iteration of a run (none: the checkpoint alone), settings of check_megatron.save_rank
FIXTURES = {
    "gpt2": (1, GPT2, 4, dict(family="gpt2", tp=2, args=dict(num_attention_heads=4))),
    "llama": (0, dict(LLAMA, num_hidden_layers=1), 3, dict(family="llama", dp=2, sharding="fully_reshardable", args=HEADS, bare=True)),
    "old-llama": (1, LLAMA, None, dict(family="llama", pp=2, bare=True)),
    "qwen3-moe": (1, QWEN, None, dict(family="qwen3_moe", ep=2, grouped=True, args=HEADS, bare=True)),
}
KINDS = {"llama": (None, "exp_avg", "exp_avg_sq")}


def main():
    shutil.rmtree(ROOT, ignore_errors=True)
    cases = {}
    for name, (python, config, iteration, case) in FIXTURES.items():
        out = ROOT / name / f"iter_{iteration:07}" if iteration else ROOT / name
        cases.setdefault(python, {})[name] = dict(case, config=config, out=str(out), whole=f"{ROOT}/{name}.pt")
    for python, some in cases.items():
        _, failed = check.run_megatron(sys.argv[1 + python], some)
        if failed:
            sys.exit(f"{failed} failed")
    for name, (_, config, iteration, _) in FIXTURES.items():
        whole = ROOT / f"{name}.pt"
        state = torch.load(whole)
        whole.unlink()
        expected = {}
        for kind in KINDS.get(name, (None,)):
            expected.update(check.reference(state, config, kind))
        save_file(expected, ROOT / name / "expected.safetensors.golden")
        (ROOT / name / "config.json").write_text(json.dumps(config))
        if iteration:
            (ROOT / name / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    for switch in ("apply_layernorm_1p", "rotary_interleaved"):
        torch.save({"args": argparse.Namespace(**HEADS, **{switch: True})}, ROOT / f"{switch}.pt")
    vocabulary = dict(padded_vocab_size=80, make_vocab_size_divisible_by=16, tensor_model_parallel_size=2)
    torch.save({"args": argparse.Namespace(**HEADS, **vocabulary)}, ROOT / "padded_vocab_size.pt")


if __name__ == "__main__":
    main()
