#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// --section.key given on the command line; several values only for lists.
struct Override {
  std::string key;  ///< "model.n_layer"
  std::vector<std::string> values;
};

/// What the command line of `tessera train` says beside its own options.
struct TrainArguments {
  std::optional<std::string> config_file;
  std::vector<Override> overrides;
};

/// Reads "[CONFIG.json] --section.key value --section.key=value ...", where '-' and '_' are equal.
/// A list (data.train, data.val) takes all words up to the next that starts with "--", and may be
/// repeated; other keys take one word, the last one wins.
/// @throws InvalidArgument on an unknown key (with the nearest known one), a missing value, or a
///   word that belongs to nothing
TrainArguments parse_train_arguments(const std::vector<std::string>& words);

using Environment = std::vector<std::pair<std::string, std::string>>;
/// This process's variables whose names start with "TESSERA_".
Environment tessera_environment();

/// The configuration of a run: flag over environment over file over default. Not validated across
/// fields yet, see Config::validate().
/// @throws InvalidArgument naming where the offending value stands; IoError if the file cannot be
///   read. A variable TESSERA_X is refused if it misses the name of a key by one or two letters,
///   and passed over otherwise
Config load_config(const TrainArguments& arguments, const Environment& environment);

}  // namespace tessera::tools
