#include "tools/tessera/train/checkpoints.h"

#include <charconv>
#include <limits>

#include "io/checkpoint/find.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::optional<std::int64_t> parse_step(const fs::path& path, const std::string& text) {
  if (text == "latest") return std::nullopt;
  if (text != "best") {
    std::int64_t step = -1;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, step);
    require(error == std::errc{} && stop == end && step >= 0,
            "--step {}: expected latest, best, or a step's number", text);
    return step;
  }
  std::error_code error;
  require(!fs::exists(path / "index.json", error),
          "--step best chooses among the checkpoints of a run, and {} is one checkpoint",
          path.string());
  std::optional<std::int64_t> best;
  double lowest = std::numeric_limits<double>::infinity();
  for (const io::StepItem& entry : io::find_checkpoints(path)) {
    const auto loss = train::stored_val_loss(entry.path);
    if (!loss || !(*loss < lowest)) continue;
    best = entry.step;
    lowest = *loss;
  }
  require(
      best.has_value(),
      "--step best: no checkpoint of {} has a validation loss; train with checkpoint.keep_best, "
      "or name a step",
      path.string());
  return best;
}

bool saves_beside_training(const Config& config, std::int64_t step) {
  const std::int64_t every = config.checkpoint.every;
  return config.checkpoint.async == "on" && every > 0 &&
         step / every * every + every < config.train.steps;
}

}  // namespace tessera::tools
