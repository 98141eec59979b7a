#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/clock.h"

namespace tessera::tools {

struct ConsoleStyle {
  bool live = false;   ///< terminal on which lines can be redrawn
  bool color = false;  ///< live, and NO_COLOR is not set
  int width = 80;      ///< columns
};
ConsoleStyle detect_console(int descriptor);

enum class Tone : std::uint8_t { Plain, Dim, Good, Bad };
/// Adds ANSI codes if the style has color.
std::string paint(const ConsoleStyle& style, Tone tone, std::string_view text);

/// "  label   value" lines with values aligned; a row with an empty label continues the one above.
std::string format_rows(const ConsoleStyle& style,
                        const std::vector<std::pair<std::string, std::string>>& rows);

/// "12", "3.40k", "12.5M", "1.20G": at least three significant digits, decimal prefixes.
std::string format_count(double value);
/// "1 rank", "2 ranks"
std::string counted(std::int64_t count, std::string_view noun);
/// `width` block characters; averages or repeats values to fit, with gaps for non-finite values.
std::string sparkline(std::span<const double> values, int width);

}  // namespace tessera::tools
