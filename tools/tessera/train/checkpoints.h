#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "tools/tessera/config/config.h"
#include "train/trainer_state.h"

namespace tessera::tools {

/// Resolves --step for a run: "latest", "best" (lowest stored validation loss), or a number.
/// @return the step; empty for the newest
/// @throws InvalidArgument on other text, or on "best" without a stored validation loss; IoError,
///         CorruptCheckpoint
std::optional<std::int64_t> parse_step(const std::filesystem::path& path, const std::string& text);
inline constexpr const char* kStepHelp =
    "Of a run: latest, best (the lowest validation loss), or a step's number";

/// Whether a run that starts at `step` saves in the background and needs staging memory. False for
/// a run that saves only at the end.
bool saves_beside_training(const Config& config, std::int64_t step);

}  // namespace tessera::tools
