#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>

#include "core/base/error.h"
#include "tools/tessera/command.h"

namespace tessera::tools {

// The subcommands of `tessera checkpoint`, each in the file of its name.
Command add_checkpoint_list(CLI::App& parent);
Command add_checkpoint_inspect(CLI::App& parent);
Command add_checkpoint_verify(CLI::App& parent);
Command add_checkpoint_diff(CLI::App& parent);
Command add_checkpoint_reshard(CLI::App& parent);

inline constexpr const char* kOneCheckpoint = "A checkpoint, or a run (its newest checkpoint)";

/// Which checkpoint of a run: "latest" or a number. @throws InvalidArgument on anything else
inline std::optional<std::int64_t> parse_step(const std::string& text) {
  if (text == "latest") return std::nullopt;
  std::int64_t step = -1;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, step);
  require(error == std::errc{} && stop == end && step >= 0,
          "--step {}: expected \"latest\" or a step's number", text);
  return step;
}

}  // namespace tessera::tools
