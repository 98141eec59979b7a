#include "tools/tessera/plot/run_metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "core/base/error.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

std::optional<double> number_in(const nlohmann::ordered_json& value) {
  if (value.is_number()) return value.get<double>();
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  return std::nullopt;
}

class MetricsReader {
 public:
  void add(const nlohmann::ordered_json& line) {
    const auto step = line["step"].get<std::int64_t>();
    if (!rows().empty() && step < rows().back().step) rewind(step);
    if (rows().empty() || step > rows().back().step) {
      if (rows().empty() && line.contains("tokens") && line["tokens"].is_number())
        tokens_ = static_cast<double>(step) * line["tokens"].get<double>();
      rows().push_back({.step = step, .tokens = tokens_, .seconds = seconds_});
    }
    for (const auto& [key, value] : line.items())
      if (const auto number = number_in(value); number && key != "step") run_.add(key, *number);
    if (line.contains("elapsed_s") && line["elapsed_s"].is_number()) {
      const auto elapsed = line["elapsed_s"].get<double>();
      if (elapsed < elapsed_) before_ = seconds_;  // a new start
      elapsed_ = elapsed;
      seconds_ = rows().back().seconds = before_ + elapsed;
    }
    if (line.contains("tokens") && line["tokens"].is_number())
      tokens_ = rows().back().tokens + line["tokens"].get<double>();
  }
  RunMetrics take() { return std::move(run_); }

 private:
  std::vector<RunMetrics::Row>& rows() { return run_.rows; }

  // Forgets the steps from `step` on, which a resumed run makes again.
  void rewind(std::int64_t step) {
    const auto first = std::ranges::lower_bound(rows(), step, {}, &RunMetrics::Row::step);
    const auto kept = static_cast<std::size_t>(first - rows().begin());
    tokens_ = first->tokens;
    rows().erase(first, rows().end());
    for (auto& [key, samples] : run_.values)
      while (!samples.empty() && samples.back().row >= kept) samples.pop_back();
  }

  RunMetrics run_;
  double tokens_ = 0, seconds_ = 0;   // so far
  double before_ = 0, elapsed_ = -1;  // seconds of earlier starts, and since this one
};

}  // namespace

void RunMetrics::add(const std::string& key, double value) {
  auto [found, is_new] = values.try_emplace(key);
  if (is_new) keys.push_back(key);
  std::vector<Sample>& samples = found->second;
  const std::size_t row = rows.size() - 1;
  if (!samples.empty() && samples.back().row == row)
    samples.back().value = value;
  else
    samples.push_back({row, value});
}

RunFile read_run(const fs::path& path) {
  std::error_code error;
  const fs::path file = fs::is_directory(path, error) ? path / "metrics.jsonl" : path;
  require<IoError>(fs::exists(file, error),
                   "{} does not exist; name a directory given as --run.out, or a metrics.jsonl",
                   file.string());
  require<IoError>(fs::is_regular_file(file, error), "{} is not a file", file.string());
  errno = 0;
  std::ifstream in(file);
  require<IoError>(in.good(), "cannot read {}: {}", file.string(), std::strerror(errno));

  RunFile result;
  MetricsReader reader;
  std::int64_t number = 0, first_bad = 0, bad = 0;
  for (std::string text; std::getline(in, text);) {
    ++number;
    const auto line = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
        line["step"].get<std::int64_t>() >= 0) {
      reader.add(line);
    } else if (in.eof()) {
      result.warnings.push_back(fmt::format(
          "{}: the last line is incomplete, because the run is writing it or was killed; left out",
          file.string()));
    } else if (!text.empty() && bad++ == 0) {
      first_bad = number;
    }
  }
  require<IoError>(!in.bad(), "cannot read {}: {}", file.string(), std::strerror(errno));
  if (bad > 0)
    result.warnings.push_back(fmt::format("{}: line {}{} is no JSON object with a step; left out",
                                          file.string(), first_bad,
                                          bad == 1 ? "" : fmt::format(", and {} more,", bad - 1)));
  result.run = reader.take();
  require<IoError>(!result.run.rows.empty(), "{} holds no step yet", file.string());
  return result;
}

std::vector<std::string> short_names(const std::vector<fs::path>& paths) {
  std::vector<std::vector<std::string>> parts;
  for (const fs::path& path : paths) {
    std::vector<std::string>& own = parts.emplace_back();
    for (const fs::path& part : path.lexically_normal())
      if (!part.empty()) own.push_back(part.string());
    if (own.size() > 1 && own.back() == "metrics.jsonl") own.pop_back();
  }
  const auto name = [](const std::vector<std::string>& own, std::size_t count) {
    fs::path joined;
    for (std::size_t i = own.size() - std::min(count, own.size()); i < own.size(); ++i)
      joined /= own[i];
    return joined.string();
  };
  std::vector<std::string> names;
  for (const auto& own : parts) {
    std::size_t count = 1;
    const auto is_shared = [&] {
      return std::ranges::count_if(parts, [&](const auto& other) {
               return name(other, count) == name(own, count);
             }) > 1;
    };
    while (count < own.size() && is_shared()) ++count;
    names.push_back(name(own, count));
  }
  return names;
}

}  // namespace tessera::tools
