#include "core/nn/experts.h"

#include "core/nn/unit.h"
#include "core/ops/elementwise.h"
#include "core/ops/reduction.h"
#include "core/ops/shape.h"
#include "core/ops/softmax.h"
#include "core/ops/view.h"
#include "kernels/dispatch.h"

namespace tessera::nn {
namespace {

MlpOptions without_bias(MlpOptions options) {
  options.bias = false;
  return options;
}

}  // namespace

Experts::Experts(Module& parent, std::string_view name, const ExpertsOptions& o)
    : Module(parent, name),
      router(*this, "router",
             {.in = o.expert.width, .out = o.count, .bias = false, .init = o.expert.init}),
      experts(*this, "experts", o.count, without_bias(o.expert)),
      options_(o) {
  require(o.count >= 1 && o.per_token >= 1 && o.per_token <= o.count,
          "experts '{}': a token can't be routed to {} of {} experts", path(), o.per_token,
          o.count);
  require(o.expert.layout == ops::WeightLayout::OutIn,
          "experts '{}': weights must be stored [out, in]", path());
}

// Results of all experts on rows grouped by expert.
Tensor Experts::run(const Tensor& rows, const ops::Grouping& grouping) {
  const auto buffer = [&](std::int64_t width, std::string_view owner) {
    return Tensor::empty(rows.context(), {rows.dim(0), width}, rows.dtype(),
                         MemoryCategory::Activations, owner);
  };
  const Tensor hidden = buffer(experts[0].up.weight.tensor.dim(0), "experts.hidden");
  Tensor y = buffer(rows.dim(1), "experts");
  const auto part = [this, &grouping, hidden](std::int64_t first, std::int64_t end) {
    return [=, this](const Tensor& x, const Tensor& before) {
      std::vector<Tensor> up, down;
      for (std::int64_t i = first; i < end; ++i) {
        up.push_back(experts[i].up.weight);
        down.push_back(experts[i].down.weight);
      }
      return ops::expert_mlps(x, grouping, first, up, down, options_.expert.gate, hidden, before);
    };
  };
  UnitRuntime* const runtime = unit_runtime();
  bool alone = false;
  for (const GatedMlp& expert : experts)
    alone = alone || (runtime != nullptr && runtime->gathers_alone(expert));
  if (!alone) return part(0, experts.size())(rows, y);
  for (std::int64_t i = 0; i < experts.size(); ++i)
    y = unit({&experts[i]}, part(i, i + 1), rows, y);
  return y;
}

Experts::Result Experts::operator()(const Tensor& x) {
  const std::vector<Tensor> results =
      recompute_mlp(*this, {x}, [this](std::span<const Tensor> inputs) {
        const Tensor& in = inputs[0];
        const std::int64_t width = in.shape().back();
        const Tensor tokens = ops::reshape(in, {in.numel() / width, width});
        const DType wide = kernels::accumulator_dtype(in.dtype());
        const Tensor probabilities = ops::softmax(ops::cast(router(tokens), wide));
        const Tensor chosen = ops::top_k(probabilities, options_.per_token);
        Tensor weights = ops::gather(probabilities, 1, chosen);
        if (options_.renormalize) weights = weights / ops::sum(weights, 1, true);
        const ops::Grouping grouping = ops::group_by_expert(chosen, options_.count, wide);
        const Tensor rows = run(ops::spread_rows(tokens, grouping), grouping);
        return std::vector<Tensor>{
            ops::reshape(ops::collect_rows(rows, weights, grouping), in.shape()),
            ops::sum(probabilities, 0), grouping.counts};
      });
  return {results[0], results[1], results[2].detach()};
}

}  // namespace tessera::nn
