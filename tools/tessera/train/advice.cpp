#include "tools/tessera/train/advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::tools {

double usual_lr(std::int64_t parameters) {
  return std::clamp(0.003239 - 0.0001395 * std::log(static_cast<double>(parameters)), 3e-5, 1e-3);
}

std::vector<std::string> advice(const Config& config, std::int64_t parameters,
                                bool has_random_weights, int processors, int ranks) {
  std::vector<std::string> notes;
  if (config.train.steps <= config.optim.warmup_steps && config.optim.warmup_steps > 0)
    notes.push_back(
        fmt::format("note: the learning rate does not reach optim.lr: train.steps {} is not above "
                    "optim.warmup_steps {}",
                    config.train.steps, config.optim.warmup_steps));
  const double usual = usual_lr(parameters), times = config.optim.lr / usual;
  // Muon often takes more.
  const double most = config.optim.name == "muon" ? 100 : 20;
  if (has_random_weights && config.optim.lr > 0 && (times > most || times < 1.0 / 100))
    notes.push_back(fmt::format(
        "note: optim.lr {:g} is {} the rate that is usual for {:.3g} million weights, "
        "{:.1g}",
        config.optim.lr,
        times > 1 ? fmt::format("{:.0f} times", times) : fmt::format("1/{:.0f} of", 1 / times),
        static_cast<double>(parameters) / 1e6, usual));
  if (ranks > processors)
    notes.push_back(fmt::format("note: {} ranks share {} processor{}: fewer ranks would be as fast",
                                ranks, processors, processors == 1 ? "" : "s"));
  return notes;
}

}  // namespace tessera::tools
