#include "tools/tessera/report/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::tools {
namespace {

double number_or_nan(const nlohmann::json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>()
                                                   : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, std::int64_t resume_step)
    : path_(std::move(path)) {
  keep_lines_before(resume_step);
  file_.reset(std::fopen(path_.c_str(), "ae"));
  require<IoError>(file_ != nullptr, "cannot open {}: {}", path_.string(), std::strerror(errno));
}

void MetricsWriter::keep_lines_before(std::int64_t resume_step) {
  std::ifstream old(path_);
  if (!old) return;
  std::string kept;
  for (std::string text; std::getline(old, text);) {
    const auto line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) continue;
    const auto step = line["step"].get<std::int64_t>();
    const bool save = line.contains("save_bytes");
    const bool evaluation = line.contains("val_loss");
    const bool training = !save && !evaluation;
    if (resume_step == 0 || step > resume_step || (step == resume_step && training)) continue;
    if (evaluation && !evaluated_.insert(step).second) continue;
    if (evaluation) val_.push_back({step, number_or_nan(line, "val_loss")});
    if (training) train_.push_back({step, number_or_nan(line, "loss")});
    kept += text + '\n';
  }
  old.close();
  io::write_file_atomically(path_, kept);
}

void MetricsWriter::write_step(const StepMetrics& m) {
  require<InternalError>(train_.empty() || m.step > train_.back().step,
                         "metrics of step {} after those of step {}", m.step,
                         train_.empty() ? 0 : train_.back().step);
  nlohmann::ordered_json line;
  line["step"] = m.step;
  line["loss"] = m.loss;
  line["grad_norm"] = m.grad_norm;
  line["lr"] = m.lr;
  line["tokens"] = m.tokens;
  line["step_ms"] = m.step_ms;
  line["tokens_per_s"] = m.tokens_per_s;
  line["memory_bytes"] = m.memory_bytes;
  write_line(line.dump());
  train_.push_back({m.step, m.loss});
}

void MetricsWriter::write_evaluation(std::int64_t step, double val_loss) {
  if (!evaluated_.insert(step).second) return;
  nlohmann::ordered_json line;
  line["step"] = step;
  line["val_loss"] = val_loss;
  write_line(line.dump());
  val_.push_back({step, val_loss});
}

void MetricsWriter::write_save(const SaveMetrics& save) {
  nlohmann::ordered_json line;
  line["step"] = save.step;
  line["save_bytes"] = save.bytes;
  line["save_seconds"] = save.seconds;
  line["save_gb_per_s"] = static_cast<double>(save.bytes) / 1e9 / save.seconds;
  line["save_stall_ms"] = save.stall_ms;
  write_line(line.dump());
}

void MetricsWriter::write_line(const std::string& line) {
  const bool written = std::fputs(line.c_str(), file_.get()) >= 0 &&
                       std::fputc('\n', file_.get()) != EOF && std::fflush(file_.get()) == 0;
  require<IoError>(written, "cannot write to {}: {}", path_.string(), std::strerror(errno));
}

}  // namespace tessera::tools
