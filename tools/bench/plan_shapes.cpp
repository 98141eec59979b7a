// Planned peak memory of a training step of Llama-3-8B and gemma-2b, for docs/memory.md:
//
//   tessera_plan_shapes [--ranks 8] [--device cuda|cpu] [--units POLICY] [--gather-ahead N]
//                       [--gradient f32|bf16] [--reduction f32|bf16]
//
// One JSON object per line: mode full, bf16 compute with f32 parameters, reduced gradients and
// moments, and micro-batch 1. plan_torch.py measures PyTorch FSDP2 on the same shapes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "comm/sharding/sharded_model.h"
#include "core/nn/layers.h"
#include "core/nn/unit.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/view.h"
#include "core/optim/adamw.h"
#include "train/plan.h"
#include "train/step.h"

namespace tessera::bench {
namespace {

struct Shape {
  const char* name;
  std::int64_t layers, width, heads, kv_heads, head_dim, hidden, vocab_size;
  bool tied;  // the head's weight is the embedding's
};

// config.json of meta-llama/Meta-Llama-3-8B and google/gemma-2b. Gemma's gate is GELU, which takes
// the same memory as SiLU.
constexpr Shape kShapes[] = {{"llama-8b", 32, 4096, 32, 8, 128, 14336, 128256, false},
                             {"gemma-2b", 18, 2048, 8, 1, 256, 16384, 256000, true}};

struct Block : nn::Module {
  nn::RmsNorm attention_norm;
  nn::Attention attention;
  nn::RmsNorm mlp_norm;
  nn::GatedMlp mlp;

  Block(nn::Module& parent, std::string_view name, const Shape& s)
      : Module(parent, name),
        attention_norm(*this, "attention_norm", s.width),
        attention(*this, "attention",
                  {.width = s.width,
                   .heads = s.heads,
                   .kv_heads = s.kv_heads,
                   .head_dim = s.head_dim,
                   .rotary = {.base = 500'000},
                   .bias = false}),
        mlp_norm(*this, "mlp_norm", s.width),
        mlp(*this, "mlp", {.width = s.width, .hidden = s.hidden, .bias = false}) {}
  Tensor operator()(const Tensor& x) const {
    const auto [sum, normed] = mlp_norm.add(x, attention(attention_norm(x)));
    return ops::add(sum, mlp(normed));
  }
};

struct Net : nn::Module {
  nn::Embedding embed;
  nn::List<Block> blocks;
  nn::RmsNorm norm;
  std::unique_ptr<nn::Embedding> head;

  explicit Net(const Shape& s)
      : embed(*this, "embed", s.vocab_size, s.width),
        blocks(*this, "blocks", s.layers, s),
        norm(*this, "norm", s.width) {
    if (!s.tied) head = std::make_unique<nn::Embedding>(*this, "head", s.vocab_size, s.width);
  }
  Tensor loss(const Tensor& tokens, const Tensor& targets, double scale) {
    Tensor x = nn::unit(embed, tokens);
    for (Block& block : blocks) x = nn::unit(block, std::move(x));
    const std::int64_t rows = tokens.numel();
    nn::Embedding& weights = head ? *head : embed;
    const auto last = [this, &weights, scale, rows](const Tensor& h, const Tensor& t) {
      const Tensor flat = ops::reshape(norm(h), {rows, h.dim(2)});
      return ops::linear_cross_entropy(flat, weights.weight, t, scale);
    };
    return nn::unit({&norm, &weights}, last, std::move(x), targets.alias({rows}, {1}, 0));
  }
};

void print_plan(const Shape& shape, std::int64_t seq_len, nn::Recompute recompute,
                const comm::ShardSpec& spec, DeviceType device, int ranks) {
  const auto program = [&](train::Rank& rank) {
    const comm::Mesh mesh(*rank.communicator);
    Net model(shape);
    model.set_recompute(recompute);
    comm::ShardedModel sharded(model, mesh, spec, rank.context);
    const optim::AdamW optimizer;
    sharded.load({});
    sharded.create_optimizer_state(optimizer);
    const auto batch = [&] {
      return Tensor::empty(rank.context, {1, seq_len}, DType::I32, MemoryCategory::Data, "batch");
    };
    const Tensor tokens = batch(), targets = batch();
    for (int number = 0; number < 2; ++number) {  // the first step learns the order of units
      train::Step step(sharded, {.step = number});
      step.micro_batch(0, [&] { return model.loss(tokens, targets, 1.0); });
      step.finish(optimizer, {.lr = 1e-4, .clip_norm = 1.0});
    }
  };
  const train::MemoryPlan plan =
      train::plan({.context = {.device = {device, 0}},
                   .backend = device == DeviceType::CUDA ? "nccl" : "shm",
                   .world_size = ranks},
                  program);
  std::string parts;
  for (std::size_t c = 0; c < plan.at_peak.size(); ++c)
    parts += fmt::format(", \"{}\": {}", memory_category_name(static_cast<MemoryCategory>(c)),
                         plan.at_peak[c]);
  fmt::print(
      "{{\"model\": \"{}\", \"seq\": {}, \"recompute\": \"{}\", \"peak_bytes\": {}, \"peak_at\": "
      "\"{}\"{}}}\n",
      shape.name, seq_len, recompute == nn::Recompute::None ? "none" : "block", plan.peak,
      plan.reached_at, parts);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;
  CLI::App app("Plan the memory of Llama-3-8B and gemma-2b");
  int ranks = 8;
  std::string device = "cuda", units = "block", gradient = "f32", reduction = "f32";
  comm::ShardSpec spec = comm::shard_spec("full");
  spec.compute = DType::BF16;
  app.add_option("--ranks", ranks, "Number of ranks")->capture_default_str();
  app.add_option("--device", device, "cuda or cpu")->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--units", units, "block, a size such as 50M, or patterns of module paths");
  app.add_option("--gather-ahead", spec.gather_ahead, "Units gathered in advance");
  app.add_option("--gradient", gradient, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--reduction", reduction, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}));
  CLI11_PARSE(app, argc, argv);
  spec.units = nn::parse_unit_policy(units);
  if (gradient == "bf16") spec.gradient = DType::BF16;
  if (reduction == "bf16") spec.reduction = DType::BF16;
  for (const bench::Shape& shape : bench::kShapes)
    for (const std::int64_t seq_len : {2048, 4096, 8192})
      for (const auto recompute : {nn::Recompute::None, nn::Recompute::Block})
        bench::print_plan(shape, seq_len, recompute, spec,
                          device == "cuda" ? DeviceType::CUDA : DeviceType::CPU, ranks);
}
