#!/usr/bin/env python3
"""Trains LoRA on 200 conversations by tessera, on two ranks, and by PEFT from the same adapters, and compares.

    pip install torch transformers peft
    python tools/fetch_smollm2.py smollm2
    python tools/check_lora.py BUILD_DIR smollm2 [--steps 24]

Both take the same conversations in each step, and divide the loss by its tokens. Checks that the loss of 40 other conversations
falls, and is the same within 1%; that PEFT opens tessera's adapters, and transformers the merged model, with that loss.
Exit code 1 if a check fails. Takes some minutes with SmolLM2-135M.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import peft
import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
ROW, ROWS, RATE = 256, 4, 5e-4
THINGS = ["lamp", "ladder", "teapot", "bicycle", "compass", "violin", "hammer", "kettle", "anchor", "mirror"]
PLACES = ["cellar", "attic", "garage", "kitchen", "library", "harbor", "garden", "studio"]


def conversations(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        thing, place, shelf = draw.choice(THINGS), draw.choice(PLACES), draw.randrange(10, 100)
        question = draw.choice([f"Where is the {thing} of the {place}?", f"Find the {thing} that belongs to the {place}."])
        yield {"messages": [{"role": "user", "content": f"{question} It has number {shelf}."},
                            {"role": "assistant", "content": f"{place.upper()}/{shelf}: {thing}. Ask at desk {shelf % 7}."}]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=24)
    o = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="check-lora-"))

    def tessera(*words, **kwargs):
        done = subprocess.run([str(o.build / "bin/tessera"), *map(str, words)], capture_output=True, text=True, **kwargs)
        assert done.returncode == 0, done.stderr
        return done.stdout

    files = {}
    for name, count in dict(train=200, held=40).items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(c) + "\n" for c in conversations(count, name)))

    def rendered(name):
        lines = tessera("data", "render", files[name], "--tokenizer", o.model, "--row", 0, "--json").splitlines()
        return [json.loads(line) for line in lines]

    data = {name: rendered(name) for name in files}

    def loss(model, batch):
        """Sum of losses of conversations, and number of tokens with loss."""
        total, count = 0.0, 0
        for c in batch:
            ids, mask = torch.tensor(c["tokens"]), torch.tensor(c["has_loss"], dtype=torch.bool)
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
            targets = torch.where(mask[1:], ids[1:], -100)
            total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int(mask[1:].sum())
        return total, count

    def held_loss(model):
        model.eval()
        with torch.no_grad():
            total, count = loss(model, data["held"])
        return total.item() / count

    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32)
    before = held_loss(base)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    model.save_pretrained(folder / "start")

    keys = {"model.init_from": o.model, "lora.init_from": folder / "start", "data.train": files["train"], "data.val": files["held"],
            "data.order": "sequential", "model.seq_len": ROW, "train.global_batch": ROWS, "train.steps": o.steps, "train.device": "cpu",
            "train.eval_every": 0, "optim.lr": RATE, "optim.warmup_steps": 0, "optim.schedule": "constant", "optim.beta2": 0.99,
            "optim.weight_decay": 0.1, "checkpoint.every": o.steps, "run.out": folder / "run"}
    tessera("train", "--nproc", 2, *(f"--{k}={v}" for k, v in keys.items()))

    # The rows of data.order sequential: conversations in order, each in the next row if this one has no room.
    rows, room = [], 0
    for c in data["train"]:
        length = len(c["tokens"]) - 1
        if length > room:
            rows.append([])
            room = ROW
        rows[-1].append(c)
        room -= length
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)
    theirs = []
    for step in range(o.steps):
        batch = [c for i in range(ROWS) for c in rows[(step * ROWS + i) % len(rows)]]
        count = sum(sum(c["has_loss"][1:]) for c in batch)
        value = 0.0
        for c in batch:
            total, _ = loss(model, [c])
            (total / count).backward()
            value += total.item() / count
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(value)
    after = held_loss(model)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if "loss" in line]
    print(f"training loss, first and last step: tessera {ours[0]:.4f} {ours[-1]:.4f}, PEFT {theirs[0]:.4f} {theirs[-1]:.4f}; largest "
          f"difference {max(abs(a - b) / b for a, b in zip(ours, theirs)):.2%}")

    tessera("consolidate", folder / "run", folder / "adapters")
    tessera("consolidate", folder / "run", folder / "merged", "--merge-lora")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32)
    losses = {
        "PEFT": after,
        "tessera": [line["val_loss"] for line in lines if "val_loss" in line][-1],
        "tessera's adapters in PEFT": held_loss(peft.PeftModel.from_pretrained(fresh, folder / "adapters")),
        "tessera's merged model in transformers": held_loss(transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")),
    }
    print(f"held-out loss: {before:.4f} before; " + ", ".join(f"{k} {v:.4f}" for k, v in losses.items()))
    wrong = [k for k, v in losses.items() if not v < 0.9 * before or abs(v - after) > 0.01 * after]
    print(f"FAILED: {', '.join(wrong)}" if wrong else "all within 1% of PEFT")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
