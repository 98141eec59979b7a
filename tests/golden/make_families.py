#!/usr/bin/env python3
"""Makes families/*.json from tiny random models of transformers, for tests/models/families_test.cpp.

    pip install torch transformers
    python tests/golden/make_families.py [FAMILY...]

A case has a config.json, tokens and targets, and what transformers computes in float64: logits of
the first row, loss, greedy tokens, and of each gradient its norm and two products with fixed
vectors. Weights are a function of the tensor's name and the element's number (see numbers()), so
they need not be stored.
"""
import json
import pathlib
import sys

import numpy as np
import torch
import transformers

BATCH, LENGTH, GREEDY = 2, 14, 64


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def numbers(key, count):
    """Uniform numbers in [-1, 1), multiples of 2^-23: splitmix64 of FNV-1a(key) + index."""
    with np.errstate(over="ignore"):
        x = np.uint64(fnv1a(key)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0


def weight(name, shape):
    value = numbers(name, int(np.prod(shape)))
    if len(shape) == 1 and name.endswith("norm.weight"):
        value = 1.0 + 0.25 * value
    elif len(shape) == 1:
        value = 0.25 * value
    else:
        value = 0.35 * value
    return torch.tensor(value.astype(np.float32).reshape(shape), dtype=torch.float64)


def on_disk(model, name, tensor):
    """(name, part) of a parameter or its gradient as files hold it: experts are stored one by one."""
    mixtral = model.config.model_type == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, tensor
        return
    prefix, kind = name.rsplit(".", 1)
    for i, expert in enumerate(tensor):
        parts = zip(names[:2], expert.chunk(2)) if kind == "gate_up_proj" else [(names[2], expert)]
        for part, value in parts:
            yield f"{prefix}.{i}.{part}.weight", value


def decode(model, text):
    """Greedy continuation; None if two logits are so close that either order would be right.

    Ends where frequencies would depend on the length, because they then differ from those of cached keys."""
    config, count = model.config, GREEDY
    kind = config.rope_parameters.get("rope_type")
    if kind in ("dynamic", "longrope"):
        first = config.max_position_embeddings if kind == "dynamic" else config.original_max_position_embeddings
        count = first - len(text)
    with torch.no_grad():
        for _ in range(count):
            best = torch.topk(model(torch.tensor([text]), use_cache=False).logits[0, -1], 2)
            if best.values[0] - best.values[1] < 1e-4:
                return None
            text = text + [int(best.indices[0])]
    return text


def case(label, config):
    # Eager attention, because the other kinds lack soft caps.
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for stored, part in on_disk(model, name, parameter):
                part.copy_(weight(stored, tuple(part.shape)))
    assert not tied or model.lm_head.weight is model.get_input_embeddings().weight

    vocab = config.vocab_size
    ids = lambda key: ((numbers(key, BATCH * LENGTH) + 1) / 2 * vocab).astype(int).reshape(BATCH, LENGTH)
    tokens, targets = ids("tokens"), ids("targets")
    out = model(torch.tensor(tokens), use_cache=False)
    logits = out.logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    if getattr(config, "output_router_logits", False):
        loss = loss + config.router_aux_loss_coef * out.aux_loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        for stored, part in on_disk(model, name, parameter.grad):
            g = part.numpy().ravel()
            gradients[stored] = [float(f"{x:.9g}") for x in (np.linalg.norm(g), g @ numbers("a " + stored, g.size),
                                                             g @ numbers("b " + stored, g.size))]
    greedy = next(text for start in range(LENGTH - 3) if (text := decode(model, tokens[0, start:start + 3].tolist())))
    config_json = json.loads(config.to_json_string(use_diff=False))
    for key in [k for k in config_json if k.startswith("_") or k in ("transformers_version",)]:
        del config_json[key]
    # What says nothing about a text model.
    config_json = {k: v for k, v in config_json.items() if k in KEEP or k in config.__class__.__annotations__}
    return {
        "label": label,
        "config": config_json,
        "tokens": tokens.tolist(),
        "targets": targets.tolist(),
        "logits": [[float(f"{x:.7g}") for x in row] for row in logits[0].tolist()],
        "loss": loss.item(),
        "gradients": gradients,
        "greedy": greedy,
    }


KEEP = {"architectures", "model_type", "rope_parameters", "head_dim", "dtype", "tie_word_embeddings", "num_experts", "num_local_experts"}
BASE = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
            num_key_value_heads=1, max_position_embeddings=96, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def rope(kind, **more):
    return dict(rope_type=kind, rope_theta=more.pop("theta", 10000.0), **more)


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=8.0, beta_slow=1.0)
LONG = dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 2.0, 3.0, 4.0])


def cases(family):
    t = transformers
    make = {
        "llama": (t.LlamaConfig, [
            ("grouped queries, untied", dict(tie_word_embeddings=False)),
            ("tied, biases, llama3 scaling", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
            ("linear scaling, as many heads", dict(num_key_value_heads=3, rope_parameters=rope("linear", factor=3.0))),
            ("dynamic scaling beyond its positions", dict(max_position_embeddings=10, rope_parameters=rope("dynamic", factor=2.0))),
            ("yarn, wide heads", dict(head_dim=12, rope_parameters=YARN)),
        ]),
        "mistral": (t.MistralConfig, [
            ("window shorter than the text", dict(sliding_window=5)),
            ("no window", dict(sliding_window=None, num_attention_heads=4, num_key_value_heads=2)),
            ("wide heads, tied", dict(head_dim=16, sliding_window=9, tie_word_embeddings=True)),
        ]),
        "qwen2": (t.Qwen2Config, [
            ("biases, tied", dict(tie_word_embeddings=True)),
            ("window on the last layers", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
            ("yarn", dict(rope_parameters=YARN)),
        ]),
        "qwen3": (t.Qwen3Config, [
            ("norms of queries and keys, wide heads", dict(head_dim=12)),
            ("tied, biases", dict(head_dim=8, attention_bias=True, tie_word_embeddings=True)),
            ("window", dict(head_dim=6, use_sliding_window=True, sliding_window=6, max_window_layers=2)),
        ]),
        "gemma": (t.GemmaConfig, [
            ("one head of keys", dict(head_dim=8)),
            ("wide heads", dict(head_dim=16, num_key_value_heads=3)),
            ("untied", dict(head_dim=8, tie_word_embeddings=False, rope_parameters=rope("default", theta=500.0))),
        ]),
        "gemma2": (t.Gemma2Config, [
            ("soft caps, alternating windows", dict(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=20)),
            ("without caps", dict(head_dim=10, sliding_window=6, attn_logit_softcapping=None, final_logit_softcapping=None, num_hidden_layers=4)),
            ("published caps", dict(head_dim=8, sliding_window=40)),
        ]),
        "gemma3": (t.Gemma3TextConfig, [
            ("two ropes", dict(head_dim=8, sliding_window=5, num_hidden_layers=4, layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"])),
            ("linear scaling of full layers", dict(head_dim=8, sliding_window=4, num_hidden_layers=6, query_pre_attn_scalar=10,
             rope_parameters={"full_attention": rope("linear", theta=1e6, factor=4.0), "sliding_attention": rope("default")})),
            ("soft cap of logits", dict(head_dim=12, sliding_window=7, final_logit_softcapping=4.0)),
        ]),
        "phi3": (t.Phi3Config, [
            ("fused projections", dict()),
            ("half of a head turns, window", dict(hidden_size=48, sliding_window=6, rope_parameters=dict(rope("default"), partial_rotary_factor=0.5))),
            ("longrope, beyond the original positions", dict(original_max_position_embeddings=10, rope_parameters=rope("longrope", original_max_position_embeddings=10, **LONG))),
            ("longrope, within them", dict(original_max_position_embeddings=48, rope_parameters=rope("longrope", original_max_position_embeddings=48, **LONG))),
        ]),
        "olmo2": (t.Olmo2Config, [
            ("norms after", dict()),
            ("biases", dict(attention_bias=True, num_key_value_heads=3)),
            ("tied", dict(tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=2)),
        ]),
        "olmo3": (t.Olmo3Config, [
            ("three windows to one", dict(num_hidden_layers=4, sliding_window=4)),
            ("yarn of full layers", dict(num_hidden_layers=4, sliding_window=5,
             rope_parameters={"full_attention": YARN, "sliding_attention": rope("default")})),
            ("full layers alone", dict(layer_types=["full_attention"] * 3)),
        ]),
        "smollm3": (t.SmolLM3Config, [
            ("every second layer without rope", dict(num_hidden_layers=4, no_rope_layer_interval=2)),
            ("biases, untied", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
            ("windows", dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=5, no_rope_layers=[1, 0, 1, 0])),
        ]),
        "mixtral": (t.MixtralConfig, [
            ("two experts of four", dict(num_local_experts=4, num_experts_per_tok=2)),
            ("one of five, window, auxiliary loss", dict(num_local_experts=5, num_experts_per_tok=1, sliding_window=5,
             output_router_logits=True, router_aux_loss_coef=0.5, num_hidden_layers=2)),
            ("three of eight, tied", dict(num_local_experts=8, num_experts_per_tok=3, tie_word_embeddings=True, num_hidden_layers=2)),
        ]),
        "qwen3_moe": (t.Qwen3MoeConfig, [
            ("two experts of four", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8)),
            ("a dense layer, three of eight, renormalized, auxiliary loss", dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
             norm_topk_prob=True, mlp_only_layers=[1], head_dim=12, output_router_logits=True, router_aux_loss_coef=0.5)),
            ("experts in every second layer, one of five, window, tied", dict(num_experts=5, num_experts_per_tok=1, moe_intermediate_size=16,
             decoder_sparse_step=2, num_hidden_layers=4, head_dim=6, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6)),
        ]),
        "olmoe": (t.OlmoeConfig, [
            ("two experts of four", dict(num_experts=4, num_experts_per_tok=2, num_key_value_heads=3, num_hidden_layers=2)),
            ("three of five, renormalized", dict(num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, num_hidden_layers=2)),
            ("one of eight, auxiliary loss", dict(num_experts=8, num_experts_per_tok=1, output_router_logits=True, num_hidden_layers=2)),
        ]),
        "nanochat": (t.NanoChatConfig, [
            ("weightless norms", dict()),
            ("as many heads, strong cap", dict(num_key_value_heads=3, final_logit_softcapping=2.0)),
            ("tied", dict(tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=2)),
        ]),
    }[family]
    for label, changes in make[1]:
        yield case(label, make[0](**dict(BASE, **changes)))


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "olmo3", "smollm3",
            "nanochat", "mixtral", "qwen3_moe", "olmoe"]

if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:] or FAMILIES:
        out = {"transformers": transformers.__version__, "cases": list(cases(family))}
        file = pathlib.Path(__file__).parent / "families" / f"{family}.json"
        file.write_text(json.dumps(out, separators=(",", ":")) + "\n")
        print(file, file.stat().st_size)
