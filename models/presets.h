#pragma once

#include <span>
#include <string_view>

#include "models/arch.h"

namespace tessera::models {

/// A published model, as its config.json describes it.
struct Preset {
  std::string_view name;    ///< "llama-8b"
  std::string_view source;  ///< "meta-llama/Llama-3.1-8B"
  std::string_view config;  ///< Hugging Face configuration, as JSON
};
std::span<const Preset> presets();

/// @throws InvalidArgument on an unknown name, with those that there are
Arch arch_of_preset(std::string_view name);

}  // namespace tessera::models
