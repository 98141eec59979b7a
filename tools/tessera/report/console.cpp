#include "tools/tessera/report/console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

namespace tessera::tools {

ConsoleStyle detect_console(int descriptor) {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string_view(value ? value : "");
  };
  ConsoleStyle style;
  style.live = ::isatty(descriptor) == 1 && variable("TERM") != "dumb";
  style.color = style.live && variable("NO_COLOR").empty();
  struct winsize size {};
  if (style.live && ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    style.width = size.ws_col;
  }
  return style;
}

std::string paint(const ConsoleStyle& style, Tone tone, std::string_view text) {
  static constexpr std::array<const char*, 4> kCodes = {"", "2", "32", "31"};
  if (!style.color || tone == Tone::Plain) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<std::size_t>(tone)], text);
}

std::string format_rows(const ConsoleStyle& style,
                        const std::vector<std::pair<std::string, std::string>>& rows) {
  std::size_t width = 0;
  for (const auto& [label, value] : rows) width = std::max(width, label.size());
  std::string out;
  for (const auto& [label, value] : rows) {
    out +=
        "  " + paint(style, Tone::Dim, fmt::format("{:<{}}", label, width)) + "  " + value + '\n';
  }
  return out;
}

std::string format_count(double value) {
  static constexpr std::string_view kPrefixes = " kMGTPE";
  std::size_t prefix = 0;
  // 999.95 would print as 1000.0.
  while (std::abs(value) >= (prefix == 0 ? 1000.0 : 999.95) && prefix + 1 < kPrefixes.size()) {
    value /= 1000;
    ++prefix;
  }
  if (prefix == 0) return fmt::format("{:.{}f}", value, value == std::floor(value) ? 0 : 1);
  return fmt::format("{:.{}f}{}", value, std::abs(value) < 9.995 ? 2 : 1, kPrefixes[prefix]);
}

std::string counted(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string sparkline(std::span<const double> values, int width) {
  static constexpr std::array<std::string_view, 8> kBlocks = {"▁", "▂", "▃", "▄",
                                                              "▅", "▆", "▇", "█"};
  if (values.empty() || width <= 0) return "";
  const auto columns = static_cast<std::size_t>(width);
  std::vector<double> means(columns);
  double low = INFINITY, high = -INFINITY;
  for (std::size_t c = 0; c < columns; ++c) {
    const std::size_t begin = c * values.size() / columns;
    const std::size_t end = std::max(begin + 1, (c + 1) * values.size() / columns);
    double sum = 0;
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (!std::isfinite(values[i])) continue;
      sum += values[i];
      ++count;
    }
    means[c] = count > 0 ? sum / static_cast<double>(count) : std::nan("");
    low = std::fmin(low, means[c]);  // ignores NaN
    high = std::fmax(high, means[c]);
  }
  std::string out;
  for (const double mean : means) {
    if (std::isnan(mean)) {
      out += ' ';
    } else {
      const double share = high > low ? (mean - low) / (high - low) : 0.0;
      out += kBlocks[std::min<std::size_t>(7, static_cast<std::size_t>(share * 8))];
    }
  }
  return out;
}

}  // namespace tessera::tools
