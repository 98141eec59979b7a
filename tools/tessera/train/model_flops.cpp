#include "tools/tessera/train/model_flops.h"

#include "core/base/kernel_rates.h"
#include "tools/tessera/train/memory_plan.h"

namespace tessera::tools {

double model_flops_per_token(const Config& config, const models::Arch& arch) {
  // A step of one row on one rank, planned without recomputation, and with an optimizer that has no products.
  Config one = config;
  one.train.global_batch = one.train.micro_batch = 1;
  one.train.recompute = "none";
  one.optim.name = "adamw";
  one.shard.mode = "none";
  one.shard.offload = "none";
  one.shard.check_replicas_every = 0;
  one.checkpoint.every = 0;
  const KernelRates rates;
  const RankPlan plan =
      plan_rank(one, arch, 0, 1, {.backend = "single", .evaluates = false, .rates = &rates});
  double flops = 0;
  for (const auto& [name, kernel] : plan.time.kernels)
    // One of the five products of its backward pass recomputes the scores.
    flops += kernel.work.flops * (name == "attention_backward" ? 4.0 / 5 : 1.0);
  return flops / static_cast<double>(plan.tokens);
}

double peak_flops(std::string_view device, std::string_view precision) {
  struct Peak {
    std::string_view name;
    double bf16, fp32;  // TFLOP per second; float32 without TF32; 0: not known
  };
  // Names that contain others come first. A part of a GPU (MIG) has an unknown part of the peak.
  static constexpr Peak kPeaks[] = {
      {" MIG ", 0, 0},       {"GB200", 2500, 0}, {"B200", 2250, 0},
      {"H200 NVL", 835, 60}, {"H200", 989, 67},  {"H100 PCIe", 756, 51},
      {"H100 NVL", 835, 60}, {"H100", 989, 67},  {"A100", 312, 19.5},
  };
  for (const Peak& peak : kPeaks)
    if (device.find(peak.name) != device.npos)
      return (precision == "fp32" ? peak.fp32 : peak.bf16) * 1e12;
  return 0;
}

double mfu_per_rate(const Config& config, const models::Arch& arch, std::string_view device,
                    std::int64_t devices) {
  const double peak = peak_flops(device, config.train.precision) * static_cast<double>(devices);
  return peak > 0 ? model_flops_per_token(config, arch) / peak : 0;
}

}  // namespace tessera::tools
