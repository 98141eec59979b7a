#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Sets fields from a JSON text: {"section": {"key": value}}, comments allowed.
/// @param name  file name, for messages
/// @throws InvalidArgument with file and line on malformed JSON, an unknown or repeated key, a
///   wrong type, or a value out of range; config is then partly set
void read_json_config(Config& config, std::string_view text, std::string_view name);

/// A --section.key option. Only list keys take several values.
struct Override {
  std::string key;  ///< "model.n_layer"
  std::vector<std::string> values;
};

struct TrainArguments {
  std::optional<std::string> config_file;
  std::vector<Override> overrides;
};

/// Parses "[CONFIG.json] --section.key value --section.key=value ..."; '-' and '_' are equivalent.
/// List keys (data.train, data.val) take all words up to the next "--" and may be repeated; other
/// keys take one word, and the last occurrence wins.
/// @throws InvalidArgument on an unknown key (with the nearest known one), a missing value, or an
///   unexpected word
TrainArguments parse_train_arguments(const std::vector<std::string>& words);

using Environment = std::vector<std::pair<std::string, std::string>>;
Environment tessera_environment();

/// Resolves a run's configuration: flags override the environment, which overrides the file, which
/// overrides what follows from model.depth. Call Config::validate() afterwards.
/// @throws InvalidArgument naming the source of a wrong value, or on a probable misspelling: an
///   environment variable one or two letters away from a key's; IoError if the file cannot be read
Config load_config(const TrainArguments& arguments, const Environment& environment);

}  // namespace tessera::tools
