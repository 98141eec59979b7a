#include "tools/tessera/plan/rates.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"
#include "tools/tessera/train/model_flops.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kMostProfileBytes = std::int64_t{1} << 30;

// Seconds per byte, of gigabytes per second.
constexpr double byte_at(double gb_per_s) { return 1e-9 / gb_per_s; }
// Seconds per operation, of TFLOP per second.
constexpr double flop_at(double tflop_per_s) { return 1e-12 / tflop_per_s; }

// Kernels of the steps of profiles, and seconds between them.
struct Profile {
  std::vector<KernelTime> kernels;
  double gaps = 0;  // sum within steps; between them are evaluations and saves
};

void read_profile(const std::string& file, const std::map<std::string, std::string>& wanted,
                  Profile& profile) {
  const auto json = nlohmann::json::parse(io::read_file(file, kMostProfileBytes), nullptr,
                                          /*allow_exceptions=*/false);
  const auto not_one = [&] {
    return InvalidArgument(
        "{} is no profile of a training run: write one with train --train.profile FILE", file);
  };
  try {
    const auto& about = json.at("otherData");
    for (const auto& [key, value] : wanted) {
      const auto found = about.at(key).get<std::string>();
      require(found == value, "{} is the profile of a run with {} {}, and --time needs {} {}", file,
              key, found, key, value);
    }
    double end = 0;
    std::int64_t step = -1;  // of the kernel before
    for (const auto& event : json.at("traceEvents")) {
      if (!event.contains("args") || !event.at("args").contains("step")) continue;
      const auto& args = event.at("args");
      const double begin = event.at("ts").get<double>() * 1e-6;
      const KernelTime kernel = {.kernel = event.at("name"),
                                 .work = {.read = args.at("read"),
                                          .written = args.at("written"),
                                          .flops = args.at("flops")},
                                 .seconds = event.at("dur").get<double>() * 1e-6};
      if (kernel.seconds < 0 || kernel.work.read < 0 || kernel.work.written < 0 ||
          kernel.work.flops < 0 || begin < 0)
        throw not_one();
      if (args.at("step") == step) profile.gaps += std::max(0.0, begin - end);
      step = args.at("step");
      end = begin + kernel.seconds;
      profile.kernels.push_back(kernel);
    }
  } catch (const nlohmann::json::exception&) {
    throw not_one();
  }
  if (profile.kernels.empty()) throw not_one();
}

}  // namespace

DeviceRates h100_rates() {
  // Rows of the report in docs/gpu of 2026-11-26. Gaps between kernels: 1.1 ms in a step of 620. Products: least
  // squares over 16 shapes, which differ from it by up to 8%. Attention: B=64, T=1024, 12 heads of 64, deterministic.
  // The others: 65,536 rows of 768 or 3,072; cross-entropy 8,192 of 50,257. Kernels changed since (cross-entropy, norms'
  // gradients, dropout) are rows of the later report of 2026-11-27; layer norm's gradients with the residual's and sums.
  constexpr double kGap = 1.8e-6;
  const auto product = [](double tflop_per_s) {
    return KernelRate{.call = kGap,
                      .flop = flop_at(tflop_per_s),
                      .read = byte_at(10'260),
                      .written = byte_at(4'842)};
  };
  const auto bytes = [](double gb_per_s) {
    return KernelRate{.call = kGap, .read = byte_at(gb_per_s), .written = byte_at(gb_per_s)};
  };
  std::map<std::string, KernelRate, std::less<>> rates = {
      {"matmul", product(805)},
      {"matmul_gelu", product(700)},
      {"matmul_gelu_backward", product(670)},
      {"grouped_matmul", product(805)},
      {"grouped_gradient", product(805)},
      {"attention_forward", {.call = kGap, .flop = flop_at(345.1)}},
      {"attention_backward", {.call = kGap, .flop = flop_at(200.8)}},
      {"cross_entropy", bytes(2780)},
      {"add", bytes(2906)},
      {"sum_rows", bytes(2888)},
      {"gelu_forward", bytes(2736)},
      {"gelu_backward", bytes(2909)},
      {"layer_norm_forward", bytes(2770)},
      {"layer_norm_backward", bytes(2576)},
      {"rms_norm_forward", bytes(2792)},
      {"rms_norm_backward", bytes(2299)},
      {"embedding_forward", bytes(2824)},
      {"embedding_backward", bytes(1451)},
      {"cast", bytes(2900)},
      {"adamw", bytes(2860)},
      {"sum_of_squares", bytes(2909)},
      {"gated_forward", bytes(2993)},
      {"gated_backward", bytes(2978)},
      {"rotary", bytes(2827)},
      {"dropout", bytes(2752)},
  };
  return {.kernels = {rates, bytes(2800)},
          .links = {.in_host = 360e9, .between_hosts = 45e9},
          .peak_flops = peak_flops("H100", "bf16"),
          .name = "measured kernels of one H100 SXM, links of 360 and 45 GB/s unless given"};
}

DeviceRates rates_of_profiles(std::span<const std::string> files,
                              const std::map<std::string, std::string>& wanted) {
  Profile profile;
  for (const std::string& file : files) read_profile(file, wanted, profile);
  const double gap = profile.gaps / static_cast<double>(profile.kernels.size());
  DeviceRates rates = {.kernels = KernelRates::fit(profile.kernels, gap),
                       .name = "kernels of a profile"};
  rates.links.start = rates.links.step_in_host = rates.links.step_between_hosts = 0;
  return rates;
}

}  // namespace tessera::tools
