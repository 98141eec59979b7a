#include "tools/tessera/report/metrics.h"

#include <fcntl.h>
#include <unistd.h>

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

constexpr std::size_t kMaxWaiting = std::size_t{1} << 20;

double number_or_nan(const nlohmann::json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>()
                                                   : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, std::int64_t resume_step)
    : path_(std::move(path)) {
  keep_lines_before(resume_step);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  require<IoError>(fd_ >= 0, "cannot open {}: {}", path_.string(), std::strerror(errno));
}

MetricsWriter::~MetricsWriter() { ::close(fd_); }

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
  const bool waited = !waiting_.empty();
  waiting_ += line + '\n';
  const std::string error = write_waiting();
  require<IoError>(waiting_.size() <= kMaxWaiting, "{}", error);
  if (!error.empty() && !waited) warning_ = error;
}

// @return the error; empty: nothing waits any more
std::string MetricsWriter::write_waiting() {
  while (!waiting_.empty()) {
    const ssize_t n = ::write(fd_, waiting_.data(), waiting_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fmt::format("cannot write to {}: {}", path_.string(), std::strerror(errno));
    waiting_.erase(0, static_cast<std::size_t>(n));
  }
  return {};
}

void MetricsWriter::flush() {
  const std::string error = write_waiting();
  require<IoError>(error.empty(), "{}", error);
}

}  // namespace tessera::tools
