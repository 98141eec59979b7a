#!/usr/bin/env python3
"""Makes lora.json from tiny random models and adapters of PEFT, for tests/models/lora_test.cpp.

    pip install torch transformers peft
    python tests/golden/make_lora.py

A case has the config.json of the base, adapter_config.json, tokens and targets, and what PEFT computes in
float64: logits of the first row, loss, and of each gradient its norm and two products with fixed vectors.
Weights are functions of their names, see make_families.py.
"""
import json
import pathlib
import tempfile

import numpy as np
import peft
import torch
import transformers as t

from make_families import BASE, BATCH, LENGTH, numbers, weight


def rounded(value):
    return float(f"{value:.9g}")


def case(label, config, **settings):
    config._attn_implementation = "eager"
    base = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace(".base_layer", "").replace(".default", "")
            if ".lora_" not in name:
                name = name.removeprefix("base_model.model.")
            parameter.copy_(weight(name, tuple(parameter.shape)))
    vocab = config.vocab_size
    ids = lambda key: ((numbers(key, BATCH * LENGTH) + 1) / 2 * vocab).astype(int).reshape(BATCH, LENGTH)
    tokens, targets = ids("tokens"), ids("targets")
    logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = name.replace(".default", "")
        g = parameter.grad.numpy().ravel()
        gradients[name] = [rounded(x) for x in (np.linalg.norm(g), g @ numbers("a " + name, g.size),
                                                g @ numbers("b " + name, g.size))]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        adapter = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
    adapter["target_modules"] = sorted(adapter["target_modules"])
    config_json = json.loads(config.to_json_string(use_diff=False))
    return {
        "label": label,
        "config": {k: v for k, v in config_json.items() if not k.startswith("_") and k != "transformers_version"},
        "adapter": {k: v for k, v in adapter.items() if v},
        "shapes": {n.replace(".default", ""): list(p.shape) for n, p in model.named_parameters() if p.requires_grad},
        "tokens": tokens.tolist(),
        "targets": targets.tolist(),
        "logits": [[float(f"{x:.7g}") for x in row] for row in logits[0].tolist()],
        "loss": loss.item(),
        "gradients": gradients,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    small = dict(BASE, num_hidden_layers=2)
    cases = [
        case("some projections", t.LlamaConfig(**small), r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
        case("biases, all layers", t.Qwen2Config(**small), r=2, lora_alpha=3, target_modules="all-linear"),
        case("fused projections, rank-stabilized", t.Phi3Config(**small), r=3, lora_alpha=5, use_rslora=True,
             target_modules=["qkv_proj", "gate_up_proj", "o_proj"]),
        case("a rank and an alpha of their own", t.Gemma2Config(**dict(small, head_dim=8)), r=2, lora_alpha=2,
             target_modules=["k_proj", "up_proj"], rank_pattern={"up_proj": 3}, alpha_pattern={r"layers\.1\.mlp.up_proj": 7}),
        case("weights stored [in, out]", t.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=32), r=4,
             lora_alpha=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"]),
    ]
    file = pathlib.Path(__file__).parent / "lora.json"
    file.write_text(json.dumps({"peft": peft.__version__, "cases": cases}, separators=(",", ":")) + "\n")
    print(file, file.stat().st_size)
