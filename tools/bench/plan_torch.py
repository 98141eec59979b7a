#!/usr/bin/env python3
"""Peak memory of PyTorch FSDP2 for three of tessera's presets, on a machine without a GPU.

  plan_torch.py [--model llama-8b gemma-2b mistral-7b] [--seq 2048 4096 8192] [--recompute none block] [--ranks 8]
                [--units blocks torchtitan] [--lora RANK]

Runs training steps of rank 0 on fake tensors (no memory, no arithmetic) over a fake process group, the second under
torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker, which follows every storage. Needs PyTorch alone. The update
is not measured: a fused one allocates nothing beside parameters, gradients and state.

The setting: fully_shard with MixedPrecisionPolicy(bf16 parameters, f32 reduction), float32 AdamW, micro-batch 1, logits of the whole sequence widened to f32 for F.cross_entropy, as torchtitan does
(torchtitan/components/loss.py). --units blocks: one FSDP unit per block and the root, as PyTorch's FSDP2 tutorial;
torchtitan: embedding, and norm with head, are units of their own (torchtitan/models/llama3/infra/parallelize.py).
recompute block: non-reentrant activation checkpointing of every block. --lora: frozen weights in bf16, and float32
adapters of that rank on all linear layers of blocks, computed as in PEFT.

Fake tensors live on "cpu", whose eager operations save more than CUDA's in two places, so both are replaced by what
CUDA keeps: RMS norm saves its input and one float32 per row (aten::_fused_rms_norm), attention is the flash kernel,
which saves q, k, v, the output and one float32 per row and head, with grouped queries not repeated.
"""

import argparse
import json
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@dataclass
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool


SHAPES = {
    # config.json of meta-llama/Meta-Llama-3-8B, google/gemma-2b, mistralai/Mistral-7B-v0.1
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, False),
    "gemma-2b": Shape(18, 2048, 8, 1, 256, 16384, 256000, True),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32000, False),
}


class RmsNormFunction(torch.autograd.Function):
    """Allocates and saves what aten::_fused_rms_norm does on CUDA."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = x.new_empty(x.shape[:-1] + (1,), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return RmsNormFunction.apply(x, self.weight)


class FlashFunction(torch.autograd.Function):
    """Allocates and saves what aten::_scaled_dot_product_flash_attention does on CUDA."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def rotate(x, cis):  # torchtitan's apply_rotary_emb
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.attention_norm, self.mlp_norm = RmsNorm(s.width), RmsNorm(s.width)
        self.wq = nn.Linear(s.width, s.heads * s.head_dim, bias=False)
        self.wk = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.wv = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.wo = nn.Linear(s.heads * s.head_dim, s.width, bias=False)
        self.gate = nn.Linear(s.width, s.inner, bias=False)
        self.up = nn.Linear(s.width, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.width, bias=False)

    def forward(self, x, cis):
        batch, seq, _ = x.shape
        n = self.attention_norm(x)
        q = rotate(self.wq(n).view(batch, seq, -1, self.s.head_dim), cis)
        k = rotate(self.wk(n).view(batch, seq, -1, self.s.head_dim), cis)
        v = self.wv(n).view(batch, seq, -1, self.s.head_dim)
        out = FlashFunction.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.wo(out.transpose(1, 2).reshape(batch, seq, -1))
        n = self.mlp_norm(x)
        act = F.gelu(self.gate(n), approximate="tanh") if self.s.tied else F.silu(self.gate(n))
        return x + self.down(act * self.up(n))


class Net(nn.Module):
    def __init__(self, s, seq):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = RmsNorm(s.width)
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("cis", torch.ones(seq, 1, s.head_dim // 2, dtype=torch.complex64), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cis)
        return self.head(self.norm(x))


class Lora(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


def add_lora(model, rank):
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Lora(layer, rank))


def measure(shape, seq, recompute, units, ranks, lora=0):
    """Peak bytes of rank 0 by kind of tensor; "Total" is their sum."""
    mesh = init_device_mesh("cpu", (ranks,))
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16 if lora else torch.float32)
        model = Net(shape, seq)
        torch.set_default_dtype(torch.float32)
        if lora:
            add_lora(model, lora)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if recompute == "block":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(
                    block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)
        if units == "torchtitan" and not shape.tied:
            fully_shard(model.embed, mesh=mesh, mp_policy=policy)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        if units == "torchtitan" and not shape.tied:
            fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        tokens = torch.randint(0, shape.vocab, (1, seq))
        targets = torch.randint(0, shape.vocab, (1, seq))

        def backward():
            F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(0, 1)).backward()

        backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_external(optimizer)
        tracker.track_inputs((tokens, targets))
        with tracker:
            backward()
        (by_kind,) = tracker.get_tracker_snapshot("peak").values()
        return {str(getattr(kind, "value", kind)): size for kind, size in by_kind.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--seq", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--recompute", nargs="+", default=["none", "block"], choices=["none", "block"])
    parser.add_argument("--units", nargs="+", default=["blocks"], choices=["blocks", "torchtitan"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    for model in options.model:
        for seq in options.seq:
            for recompute in options.recompute:
                for units in options.units:
                    kinds = measure(SHAPES[model], seq, recompute, units, options.ranks, options.lora)
                    print(json.dumps({"torch": torch.__version__, "model": model, "seq": seq, "recompute": recompute,
                                      "lora": options.lora, "units": units, "peak_bytes": kinds["Total"], "by_kind": kinds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
