#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/nn/parameter.h"
#include "models/arch.h"

namespace tessera::test {

/// Reference values of a small GPT-2, made with PyTorch in float64 (tests/golden/README.md).
struct Golden {
  std::string folder;
  models::Arch config;
  std::int64_t batch = 0, seq = 0, steps = 0;
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, clip_norm = 0;
  std::vector<double> loss, grad_norm;  ///< per step; norms before clipping
  std::vector<std::int32_t> tokens;
  std::map<std::string, std::vector<float>> weights;    ///< by internal name
  std::map<std::string, std::vector<float>> gradients;  ///< of step 0, unclipped
  std::map<std::string, std::vector<float>> after;      ///< weights, after all steps
  std::vector<float> logits;                            ///< [B, T, V] of step 0

  ParameterSource source() const;
  /// Tolerance on a weight after all steps: larger where gradients are exactly zero, since AdamW
  /// scales their rounding noise up to full steps.
  double tolerance(const std::string& weight) const {
    return folder.ends_with("gpt2-tiny") && weight.ends_with(".bias") ? 2e-3 : 5e-5;
  }
};

/// @param name  "gpt2-tiny" or "gpt2-odd"
Golden load_golden(const std::string& name);

/// ||actual - expected|| / ||expected||, in double.
double relative_error(const std::vector<float>& actual, const std::vector<float>& expected);

}  // namespace tessera::test
