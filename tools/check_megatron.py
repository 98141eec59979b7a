#!/usr/bin/env python3
"""Saves small models by Megatron-core on the CPU, and compares them with what tessera makes of them for Hugging Face.

    python tools/check_megatron.py BUILD_DIR --megatron PYTHON [PYTHON ...] [--families NAME ...] [--keep FOLDER]

Needs transformers; each PYTHON has another version of megatron-core (tried: 0.9.0, 0.12.3, 0.16.1). For every family below checks that
- transformers opens the exported model strictly, with the logits of Megatron's GPTModel;
- checkpoints of other numbers of ranks (tensors, pipeline, experts) and other forms of names export the same bits;
- moments of the distributed optimizer are those in Megatron's tensors, with rows in another order.
Prints a table; exit code 1 if a check fails. Takes some minutes.
"""
import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
import torch.overrides

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False)
EXPERTS = dict(num_experts_per_tok=2)
# family -> config.json
CONFIGS = {
    "gpt2": dict(architectures=["GPT2LMHeadModel"], n_embd=32, n_layer=4, n_head=4, vocab_size=100, n_positions=64),
    "llama": dict(SIZES, architectures=["LlamaForCausalLM"]),
    "mistral": dict(SIZES, architectures=["MistralForCausalLM"], sliding_window=None, num_key_value_heads=1),
    "qwen2": dict(SIZES, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True),
    "qwen3": dict(SIZES, architectures=["Qwen3ForCausalLM"], head_dim=16),
    "phi3": dict(SIZES, architectures=["Phi3ForCausalLM"], pad_token_id=0),
    "mixtral": dict(SIZES, **EXPERTS, architectures=["MixtralForCausalLM"], num_local_experts=4),
    "qwen3_moe": dict(SIZES, **EXPERTS, architectures=["Qwen3MoeForCausalLM"], head_dim=16, num_experts=4, moe_intermediate_size=48,
                      norm_topk_prob=True),
}
IDS = torch.arange(20).view(1, 20) * 5 % 100


def padded(config):
    """Rows of the embedding."""
    return config["vocab_size"] + 28


class OnCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def without_gpu():
    """Makes Megatron-core run on the CPU: it has no switch for that."""
    import numpy
    numpy.product = numpy.prod
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.is_current_stream_capturing = lambda *args, **kwargs: False
    torch.cuda.Stream = lambda *args, **kwargs: None
    histc = torch.histc  # counts integers on a GPU only
    torch.histc = lambda values, *args, **kwargs: histc(values.float(), *args, **kwargs).to(values.dtype)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (kind(self, *args, **kwargs) if args or kwargs else
                                                       "torch.cuda." + kind(self).rpartition(".")[2])
    OnCpu().__enter__()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import experts, moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 does not define it without TransformerEngine
        moe_utils.te_general_gemm = None
    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    if hasattr(experts, "gg"):
        experts.gg.assert_grouped_gemm_is_available = lambda: None


def megatron_model(family, config, tp, pp, ep, grouped, dtype):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.transformer_config import TransformerConfig
    moe = "num_experts_per_tok" in config
    norm = family in ("qwen3", "qwen3_moe")
    hidden = config.get("hidden_size") or config["n_embd"]
    layers, heads = config.get("num_hidden_layers") or config["n_layer"], config.get("num_attention_heads") or config["n_head"]
    options = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, use_cpu_initialization=True, params_dtype=dtype,
                   pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                   expert_model_parallel_size=ep, sequence_parallel=moe and tp > 1, hidden_dropout=0.0, attention_dropout=0.0,
                   init_method_std=0.2, gradient_accumulation_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
                   masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False, qk_layernorm=norm)
    if family == "gpt2":
        options.update(normalization="LayerNorm", add_bias_linear=True, activation_func=lambda x: F.gelu(x, approximate="tanh"))
    else:
        options.update(normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, ffn_hidden_size=config["intermediate_size"],
                       num_query_groups=config["num_key_value_heads"], layernorm_epsilon=1e-5, add_qkv_bias=family == "qwen2")
    if "head_dim" in config:
        options.update(kv_channels=config["head_dim"])
    if moe:
        options.update(num_moe_experts=4, moe_router_topk=2, moe_router_load_balancing_type="none", moe_grouped_gemm=grouped,
                       moe_token_dispatcher_type="allgather" if ep == 1 else "alltoall")
    options = TransformerConfig(**options)
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    more = {"normalization": options.normalization} if "normalization" in known else {}
    if "moe_use_legacy_grouped_gemm" in known and grouped:
        more["moe_use_legacy_grouped_gemm"] = True
    spec = get_gpt_layer_local_spec(options.num_moe_experts, grouped, norm, **more)
    if family != "gpt2" and not more:  # old versions have no RMSNorm without Apex or TransformerEngine
        class Norm(torch.nn.RMSNorm):
            def __init__(self, config, hidden_size, eps=1e-5, **more):
                super().__init__(hidden_size, eps)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        transformer_block.LayerNormImpl = transformer_block.LNImpl = Norm
        if norm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = Norm
    torch.manual_seed(7)
    model = GPTModel(options, spec, vocab_size=padded(config), max_sequence_length=64, pre_process=parallel_state.is_pipeline_first_stage(),
                     post_process=parallel_state.is_pipeline_last_stage(), rotary_base=10000,
                     share_embeddings_and_output_weights=config.get("tie_word_embeddings", True),
                     position_embedding_type="learned_absolute" if family == "gpt2" else "rope")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # norms and biases too
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return options, model


def train(options, model, rank, sharding, vocabulary):
    from megatron.core import optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    if hasattr(optimizer.distrib_optimizer, "quantize_param_shard"):
        optimizer.distrib_optimizer.quantize_param_shard = lambda *args, **kwargs: None
    wrapped = DistributedDataParallel(options, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    adam = optimizer.get_megatron_optimizer(
        optimizer.OptimizerConfig(optimizer="adam", lr=1e-2, bf16=options.bf16, params_dtype=options.params_dtype,
                                  use_distributed_optimizer=True, clip_grad=0.0), [wrapped])
    for step in range(2):
        wrapped.zero_grad_buffer()
        ids = (IDS + rank + step) % vocabulary
        mask = torch.triu(torch.ones(1, 1, 20, 20, dtype=torch.bool), 1)
        wrapped(ids, torch.arange(20).view(1, 20), mask, labels=(ids + 1) % vocabulary).float().mean().backward()
        wrapped.finish_grad_sync()
        adam.step()
    state = model.sharded_state_dict()
    try:
        return adam.sharded_state_dict(state, metadata={"distrib_optim_sharding_type": sharding})
    except TypeError:
        return adam.sharded_state_dict(state, sharding_type=sharding)


def save_rank(rank, case, port):
    from megatron.core import dist_checkpointing, parallel_state
    tp, pp, ep, dp = (case.get(key, 1) for key in ("tp", "pp", "ep", "dp"))
    world = tp * pp * ep * dp
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    config = case.get("config") or CONFIGS[case["family"]]
    options, model = megatron_model(case["family"], config, tp, pp, ep, case.get("grouped", False), getattr(torch, case.get("dtype", "float32")))
    if "load" in case:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), case["load"]), strict=False)
    if "logits" in case:
        mask = torch.triu(torch.ones(1, 1, 20, 20, dtype=torch.bool), 1)
        with torch.no_grad():
            torch.save(model.eval()(IDS % config["vocab_size"], torch.arange(20).view(1, 20), mask), case["logits"])
    state = {"model": model.sharded_state_dict(metadata=case["metadata"]) if "metadata" in case else model.sharded_state_dict()}
    if "sharding" in case:
        state["optimizer"] = train(options, model, rank, case["sharding"], config["vocab_size"])
    prefix = case.get("prefix")
    if prefix:
        state["model"] = model.sharded_state_dict(prefix=prefix)
    if case.get("bare"):
        state["model"] = {key: value for key, value in state["model"].items() if "_extra_state" not in key}
        for tensors in state.get("optimizer", {}).get("param_state", {}).values():
            tensors.pop("param")
    if "args" in case:
        state["args"] = argparse.Namespace(**case["args"])
    dist_checkpointing.save(state, case["out"], ("torch_dist", 1))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save_all(cases):
    """Runs in Megatron's Python: saves each case, by as many processes as it has ranks."""
    without_gpu()
    import megatron.core
    import megatron.core.optimizer
    from megatron.core.models.gpt import gpt_model  # noqa: F401
    fork = multiprocessing.get_context("fork")
    failed = []
    for name, case in cases.items():
        pathlib.Path(case["out"]).mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = case.get("tp", 1) * case.get("pp", 1) * case.get("ep", 1) * case.get("dp", 1)
        ranks = [fork.Process(target=save_rank, args=(rank, case, port)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            failed.append(name)
        elif "whole" in case:
            torch.save(read_whole(case["out"]), case["whole"])
    print(json.dumps({"version": megatron.core.__version__, "failed": failed}))


def run_megatron(python, cases):
    """Saves cases by a Python that has Megatron-core. @return its version, and the names of failed cases"""
    done = subprocess.run([python, __file__, "--save", json.dumps(cases)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{python}: {done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if result["failed"]:
        print(done.stderr[-2000:])
    return result["version"], result["failed"]


def cases_of(root, families):
    """name -> case. Those without `logits` have the weights of the family's first."""
    cases = {}
    for family in families:
        moe = family in ("mixtral", "qwen3_moe")
        first = f"{family}/tp1"
        cases[first] = dict(family=family, out=f"{root}/{first}", logits=f"{root}/{family}.pt", whole=f"{root}/{family}-whole.pt")
        variants = {"tp2": dict(tp=2), "pp2": dict(pp=2), "tp2-pp2": dict(tp=2, pp=2), "by-number": dict(metadata={"non_homogeneous_layers": True})}
        if family == "mistral":
            del variants["tp2"], variants["tp2-pp2"]  # it has one group of heads
        if moe:
            variants = {"ep2": dict(ep=2), "ep2-pp2": dict(ep=2, pp=2), "grouped": dict(grouped=True), "grouped-ep2": dict(grouped=True, ep=2),
                        "singleton": dict(metadata={"singleton_local_shards": True})}
        for name, more in variants.items():
            cases[f"{family}/{name}"] = dict(family=family, out=f"{root}/{family}/{name}", load=cases[first]["out"], **more)
    if "llama" in families:
        cases["llama/module."] = dict(family="llama", out=f"{root}/llama/module", load=cases["llama/tp1"]["out"], prefix="module.")
    return cases


def reference(state, config, kind=None):
    """The Hugging Face model of Megatron's tensors, or one kind of its moments."""
    before = f"optimizer.state.{kind}." if kind else ""
    state = {name.removeprefix(before): tensor for name, tensor in state.items() if name.startswith(before) and (kind or "optimizer." not in name)}
    gpt2, layers = "n_layer" in config, config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    groups = config.get("num_key_value_heads", heads)
    result = {}

    def put(name, tensor):
        result[f"{kind}/{name}" if kind else name] = tensor

    names = {"embedding.word_embeddings": "transformer.wte" if gpt2 else "model.embed_tokens", "embedding.position_embeddings": "transformer.wpe",
             "output_layer": "lm_head", "decoder.final_layernorm": "transformer.ln_f" if gpt2 else "model.norm"}
    parts = {"self_attention.linear_proj": "attn.c_proj" if gpt2 else "self_attn.o_proj", "mlp.linear_fc2": "mlp.c_proj" if gpt2 else "mlp.down_proj",
             "self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm",
             "self_attention.linear_qkv.layer_norm": "ln_1" if gpt2 else "input_layernorm",
             "mlp.linear_fc1.layer_norm": "ln_2" if gpt2 else "post_attention_layernorm"}
    mixtral = "num_local_experts" in config
    moe = "block_sparse_moe" if mixtral else "mlp"
    parts["mlp.router"] = moe + ".gate"
    for name, stacked in state.items():
        module, _, last = name.replace("layer_norm_", "layer_norm.").rpartition(".")
        if module in names:
            put(f"{names[module]}.{last}", stacked[:config["vocab_size"]] if module in ("embedding.word_embeddings", "output_layer") else stacked)
            continue
        module = module.removeprefix("decoder.layers.")
        for layer in range(layers):
            block, tensor = f"transformer.h.{layer}." if gpt2 else f"model.layers.{layer}.", stacked[layer]
            turned = tensor.T if gpt2 and last == "weight" and tensor.dim() == 2 else tensor
            if module in parts:
                put(f"{block}{parts[module]}.{last}", turned)
            elif module == "self_attention.linear_qkv":
                grouped = tensor.unflatten(0, (groups, heads // groups + 2, -1))
                q, k, v = grouped[:, :-2].flatten(0, 2), grouped[:, -2].flatten(0, 1), grouped[:, -1].flatten(0, 1)
                if gpt2:
                    put(f"{block}attn.c_attn.{last}", torch.cat([q, k, v]).T if last == "weight" else torch.cat([q, k, v]))
                elif config["architectures"] == ["Phi3ForCausalLM"]:
                    put(f"{block}self_attn.qkv_proj.{last}", torch.cat([q, k, v]))
                else:
                    for letter, rows in zip("qkv", (q, k, v)):
                        put(f"{block}self_attn.{letter}_proj.{last}", rows)
            elif module == "mlp.linear_fc1":
                if gpt2 or config["architectures"] == ["Phi3ForCausalLM"]:
                    put(block + ("mlp.c_fc" if gpt2 else "mlp.gate_up_proj") + "." + last, turned)
                else:
                    for part, rows in zip(("gate", "up"), tensor.chunk(2)):
                        put(f"{block}mlp.{part}_proj.{last}", rows)
            elif module == "mlp.experts.experts.linear_fc1":
                for expert, both in enumerate(tensor):
                    for part, rows in zip(("w1", "w3") if mixtral else ("gate_proj", "up_proj"), both.chunk(2)):
                        put(f"{block}{moe}.experts.{expert}.{part}.{last}", rows)
            elif module == "mlp.experts.experts.linear_fc2":
                for expert, rows in enumerate(tensor):
                    put(f"{block}{moe}.experts.{expert}.{'w2' if mixtral else 'down_proj'}.{last}", rows)
            else:
                raise KeyError(name)
    return {name: tensor.contiguous() for name, tensor in result.items()}


def read_whole(folder):
    """Megatron's tensors, as torch reads them."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load
    reader = FileSystemReader(folder)
    state = {name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
             for name, entry in reader.read_metadata().state_dict_metadata.items() if hasattr(entry, "size")}
    load(state, storage_reader=reader)
    return state


def read(folder, stem="model"):
    from safetensors.torch import load_file
    tensors = {}
    for file in sorted(pathlib.Path(folder).glob(stem + "*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--megatron", nargs="+", required=True)
    parser.add_argument("--families", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--keep")
    arguments = parser.parse_args()
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tessera = str(pathlib.Path(arguments.build).resolve() / "bin" / "tessera")
    failures = 0
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(arguments.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        configs = {}
        for family, config in CONFIGS.items():
            configs[family] = root / f"{family}.json"
            root.mkdir(parents=True, exist_ok=True)
            configs[family].write_text(json.dumps(dict(config, model_type=family)))

        def consolidate(source, out, family, *more):
            done = subprocess.run([tessera, "consolidate", source, str(out), "--config", str(configs[family]), *more], capture_output=True, text=True)
            return done.stderr.strip() if done.returncode else ""

        def report(version, name, problem, note=""):
            nonlocal failures
            failures += bool(problem)
            print(f"{version:8} {name:24} {'FAILED ' + problem if problem else 'ok ' + note}", flush=True)

        for number, python in enumerate(arguments.megatron):
            cases = cases_of(root / str(number), arguments.families)
            version, failed = run_megatron(python, cases)
            for name, case in cases.items():
                family, out = case["family"], pathlib.Path(case["out"] + ".hf")
                if name in failed:
                    report(version, name, "Megatron did not save it")
                    continue
                problem = consolidate(case["out"], out, family)
                if problem or "logits" not in case:
                    first = pathlib.Path(f"{case['out'].rpartition('/')[0]}/tp1.hf")
                    report(version, name, problem or ("" if same(read(out), read(first)) else "other bits"), "the bits of tp1")
                    continue
                model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32,
                                                                                attn_implementation="eager")
                with torch.no_grad():
                    logits = model.eval()(IDS).logits
                expected = torch.load(case["logits"])[..., :100]
                error = ((logits - expected).abs().max() / expected.abs().max()).item()
                bad = {key: value for key, value in info.items() if value}
                problem = str(bad) if bad else "" if error < 1e-5 else f"logits differ by {error:.1e}"
                if not same(read(out), reference(torch.load(case["whole"]), CONFIGS[family])):
                    problem += " other weights"
                report(version, name, problem, f"logits within {error:.1e}, bits of Megatron's tensors")
            for dtype in ("float32", "bfloat16") if "llama" in arguments.families else ():
                for sharding in ("fully_reshardable", "fully_sharded_model_space"):
                    name = f"adam/{dtype}/{sharding}"
                    case = dict(family="llama", out=f"{root}/{number}/{name}", dp=2, dtype=dtype, sharding=sharding, whole=f"{root}/{number}/adam.pt")
                    version, failed = run_megatron(python, {name: case})
                    if failed:
                        print(f"{version:8} {name:24} not of this version")
                        continue
                    out = pathlib.Path(case["out"] + ".hf")
                    problem = consolidate(case["out"], out, "llama", "--what", "all")
                    if sharding == "fully_sharded_model_space":
                        report(version, name, "" if "flattened" in problem else "no error: " + problem, "refused")
                        continue
                    found = {} if problem else read(out, "optimizer")
                    state = torch.load(case["whole"])
                    expected = {**reference(state, CONFIGS["llama"], "exp_avg"), **reference(state, CONFIGS["llama"], "exp_avg_sq")}
                    found = {key: value for key, value in found.items() if key.startswith("exp_avg")}
                    report(version, name, problem or ("" if same(found, expected) else "other moments"), f"{len(expected)} moments")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save_all(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
