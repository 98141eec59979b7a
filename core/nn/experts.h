#pragma once

#include <cstdint>
#include <string_view>

#include "core/nn/layers.h"
#include "core/ops/experts.h"

namespace tessera::nn {

struct ExpertsOptions {
  std::int64_t count = 0;      ///< at most 256
  std::int64_t per_token = 0;  ///< 1 to count
  bool renormalize = true;     ///< the weights of a token's experts sum to 1
  MlpOptions expert = {};      ///< without biases, weights [out, in]
};

/// A mixture of gated MLPs: each token is routed to the experts of highest probability, and none is
/// dropped. Probabilities and weights of experts are in f32 (f64 for f64).
/// Parameters: those of router, a Linear of width -> count, and of each expert, a GatedMlp.
///
/// Experts that a sharded run gathers alone (shard.units layers.*.mlp.experts.*) are run one by one.
class Experts : public Module {
 public:
  /// @throws InvalidArgument on numbers that do not fit
  Experts(Module& parent, std::string_view name, const ExpertsOptions& options);

  struct Result {
    Tensor y;              ///< shape and dtype of x
    Tensor probabilities;  ///< [count]: sums over tokens of the router's probabilities
    Tensor counts;         ///< [count]: tokens of each expert. No gradient
  };
  /// @param x  [..., width]
  Result operator()(const Tensor& x);

  Linear router;
  List<GatedMlp> experts;

 private:
  Tensor run(const Tensor& rows, const ops::Grouping& grouping);
  ExpertsOptions options_;
};

}  // namespace tessera::nn
