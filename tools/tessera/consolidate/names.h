#pragma once

#include <optional>
#include <string>
#include <vector>

#include "io/base/file.h"
#include "io/source/names.h"

namespace CLI {
class App;
}

namespace tessera::tools {

/// Options that say which model other programs' shards are of, and what its tensors are named.
struct NameOptions {
  std::string config, like;
  std::vector<std::string> strip{"auto"};
  io::NameRules rules{};  ///< of the command line, without `strip`

  /// @throws InvalidArgument if values of --strip exclude each other
  io::NameRules all_rules() const;
  /// File of --config, which may name its directory; empty without the option.
  std::optional<io::fs::path> config_file() const;
  /// Directory of --like; empty without the option.
  std::optional<io::fs::path> like_directory() const;
  /// Whether any of the options is given.
  bool is_given() const;
};

/// Adds --strip, --rename, --select and --exclude. @param options  outlives the parsing
void add_name_rules(CLI::App& app, NameOptions& options);

}  // namespace tessera::tools
