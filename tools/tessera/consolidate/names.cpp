#include "tools/tessera/consolidate/names.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <system_error>

#include "core/base/error.h"

namespace tessera::tools {

io::NameRules NameOptions::all_rules() const {
  io::NameRules result = rules;
  if (strip == std::vector<std::string>{"auto"}) return result;
  result.strip_wrappers = false;
  if (strip == std::vector<std::string>{"none"}) return result;
  for (const char* whole : {"auto", "none"})
    require(std::ranges::find(strip, whole) == strip.end(),
            "--strip {} cannot be combined with prefixes, which are removed in the given order",
            whole);
  result.prefixes = strip;
  return result;
}

std::optional<io::fs::path> NameOptions::config_file() const {
  if (config.empty()) return std::nullopt;
  std::error_code error;
  const io::fs::path path = config;
  return io::fs::is_directory(path, error) ? path / "config.json" : path;
}

std::optional<io::fs::path> NameOptions::like_directory() const {
  return like.empty() ? std::nullopt : std::optional<io::fs::path>(like);
}

bool NameOptions::is_given() const {
  return !config.empty() || !like.empty() || strip != std::vector<std::string>{"auto"} ||
         !rules.renames.empty() || !rules.select.empty() || !rules.exclude.empty();
}

void add_name_rules(CLI::App& app, NameOptions& options) {
  app.add_option("--strip", options.strip,
                 "What to remove from names in other programs' shards: auto (parts that wrappers "
                 "add, keys of the saved dict, and any prefix before the names of the model), "
                 "none, or a prefix such as model. (may be repeated)")
      ->allow_extra_args(false)
      ->capture_default_str();
  app.add_option("--rename", options.rules.renames,
                 "Change names in other programs' shards, after --strip: 's/OLD/NEW/' with an "
                 "ECMAScript expression OLD, and $1 in NEW (may be repeated)")
      ->allow_extra_args(false);
  app.add_option("--select", options.rules.select,
                 "Take only weights whose name in the shards matches this pattern, such as "
                 "'ema.*', and their moments (may be repeated)")
      ->allow_extra_args(false);
  app.add_option("--exclude", options.rules.exclude,
                 "Leave out weights whose name in the shards matches this pattern, and their "
                 "moments (may be repeated)")
      ->allow_extra_args(false);
}

}  // namespace tessera::tools
