#include "tools/tessera/plot/csv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::tools {
namespace {

// Quoted if it needs to be (RFC 4180).
std::string field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

}  // namespace

std::string to_csv(std::span<const RunMetrics> runs, const std::vector<std::string>& keys) {
  std::vector<std::string> columns = keys;
  for (const RunMetrics& run : runs)
    for (const std::string& key : run.keys)
      if (keys.empty() && std::ranges::count(columns, key) == 0) columns.push_back(key);

  std::string out = "run,step";
  for (const std::string& column : columns) out += ',' + field(column);
  out += '\n';
  for (const RunMetrics& run : runs) {
    const std::string name = field(run.name);
    std::vector<std::span<const RunMetrics::Sample>> rest;  // per column, not yet written
    for (const std::string& column : columns) {
      const auto found = run.values.find(column);
      rest.emplace_back();
      if (found != run.values.end()) rest.back() = found->second;
    }
    for (std::size_t row = 0; row < run.rows.size(); ++row) {
      out += fmt::format("{},{}", name, run.rows[row].step);
      for (auto& samples : rest) {
        out += ',';
        if (samples.empty() || samples.front().row != row) continue;
        if (std::isfinite(samples.front().value)) out += fmt::format("{}", samples.front().value);
        samples = samples.subspan(1);
      }
      out += '\n';
    }
  }
  return out;
}

}  // namespace tessera::tools
