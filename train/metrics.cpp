#include "train/metrics.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace tessera::train {
namespace {

double number_or_nan(const nlohmann::json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>()
                                                   : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, std::int64_t resume_step)
    : lines_(std::move(path), [&](const auto& line) { return keep(line, resume_step); }) {}

bool MetricsWriter::keep(const nlohmann::json& line, std::int64_t resume_step) {
  const auto step = line["step"].get<std::int64_t>();
  const bool evaluation = line.contains("val_loss");
  if (resume_step == 0 || step > resume_step || (step == resume_step && !evaluation)) return false;
  if (evaluation && !evaluated_.insert(step).second) return false;
  if (evaluation)
    val_.push_back({step, number_or_nan(line, "val_loss")});
  else
    train_.push_back({step, number_or_nan(line, "loss")});
  return true;
}

void MetricsWriter::write(nlohmann::ordered_json& line) {
  const auto seconds = [](auto since) { return std::chrono::duration<double>(since).count(); };
  line["time"] = seconds(std::chrono::system_clock::now().time_since_epoch());
  line["elapsed_s"] = seconds(std::chrono::steady_clock::now() - start_);
  lines_.write(line);
}

void MetricsWriter::write_step(const StepMetrics& m) {
  require<InternalError>(train_.empty() || m.step > train_.back().step,
                         "metrics of step {} after those of step {}", m.step,
                         train_.empty() ? 0 : train_.back().step);
  nlohmann::ordered_json line = {{"step", m.step},
                                 {"loss", m.loss},
                                 {"grad_norm", m.grad_norm},
                                 {"lr", m.lr},
                                 {"epoch", m.epoch},
                                 {"tokens", m.tokens},
                                 {"step_ms", m.step_ms},
                                 {"tokens_per_s", m.tokens_per_s},
                                 {"memory_bytes", m.memory_bytes}};
  if (m.mfu) line["mfu"] = *m.mfu;
  if (m.skipped) line["skipped"] = true;
  write(line);
  train_.push_back({m.step, m.loss});
}

void MetricsWriter::write_evaluation(std::int64_t step, double val_loss) {
  if (!evaluated_.insert(step).second) return;
  nlohmann::ordered_json line = {{"step", step}, {"val_loss", val_loss}};
  write(line);
  val_.push_back({step, val_loss});
}

}  // namespace tessera::train
