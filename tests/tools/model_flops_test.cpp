#include "tools/tessera/train/model_flops.h"

#include <doctest/doctest.h>

#include "models/arch.h"
#include "models/presets.h"
#include "tools/tessera/train/setup.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

constexpr std::int64_t kLength = 256;

Config config_of_rows() {
  Config config;
  config.data.train = {"tokens.bin"};
  config.model.seq_len = kLength;
  return config;
}

models::Arch gpt2() {
  models::Arch arch = models::arch_of_preset("gpt2-124m");
  arch.seq_len = kLength;
  return arch;
}

// 6 N + 6 L C T, of the weights that are in products: not those of norms, biases and positions.
double by_formula(const models::Arch& arch) {
  const auto width = static_cast<double>(arch.n_embd), layers = static_cast<double>(arch.n_layer);
  const double weights = 12 * layers * width * width + static_cast<double>(arch.vocab_size) * width;
  return 6 * weights + 6 * layers * width * static_cast<double>(kLength);
}

}  // namespace

TEST_CASE("the operations of a step are 6 N + 6 L C T per token, without recomputation") {
  Config config = config_of_rows();
  const double flops = model_flops_per_token(config, gpt2());
  CHECK(flops == doctest::Approx(by_formula(gpt2())).epsilon(0.01));
  config.train.recompute = "block";
  config.train.precision = "bf16";
  config.train.global_batch = 24;
  config.optim.name = "muon";
  CHECK(model_flops_per_token(config, gpt2()) == flops);
}

TEST_CASE("gradients of frozen weights do not count") {
  Config config = config_of_rows();
  config.optim.freeze = {"*mlp*"};
  // The products of the MLPs' weight gradients: 2 of 6 per weight.
  const models::Arch arch = gpt2();
  const double mlps = 8.0 * static_cast<double>(arch.n_layer * arch.n_embd * arch.n_embd);
  CHECK(model_flops_per_token(config, arch) ==
        doctest::Approx(by_formula(arch) - 2 * mlps).epsilon(0.01));
}

TEST_CASE("model FLOPs utilization is known where the device's peak is") {
  Config config = config_of_rows();
  const models::Arch arch = gpt2();
  CHECK(peak_flops("NVIDIA H100 80GB HBM3, compute capability 9.0", "bf16") == 989e12);
  CHECK(peak_flops("NVIDIA H100 80GB HBM3, compute capability 9.0", "bf16-true") == 989e12);
  CHECK(peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12);
  CHECK(peak_flops("NVIDIA H200", "fp32") == 67e12);
  CHECK(peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") == 0);
  CHECK(peak_flops("NVIDIA GeForce GTX 1080", "bf16") == 0);
  CHECK(mfu_per_rate(config, arch, "cpu", 1) == 0);

  config.train.precision = "bf16";
  const double one = mfu_per_rate(config, arch, "NVIDIA H100 80GB HBM3", 1);
  // Half of the peak.
  const double tokens_per_s = 0.5 * 989e12 / model_flops_per_token(config, arch);
  CHECK(one * tokens_per_s == doctest::Approx(0.5));
  CHECK(mfu_per_rate(config, arch, "NVIDIA H100 80GB HBM3", 8) == doctest::Approx(one / 8));
}
