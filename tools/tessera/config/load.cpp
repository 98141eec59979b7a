#include "tools/tessera/config/load.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "core/base/error.h"
#include "tools/tessera/config/depth.h"
#include "tools/tessera/config/fields.h"

namespace tessera::tools {
namespace {

bool is_flag(std::string_view word) { return word.starts_with("--"); }

const Field& field_of_flag(std::string_view flag) {
  std::string key(flag.substr(2));
  std::replace(key.begin(), key.end(), '-', '_');
  const Field* field = find_field(key);
  require(field != nullptr, "unknown option {}; did you mean --{}?", flag, nearest_key(key));
  return *field;
}

std::string read_config_file(const std::string& path) {
  constexpr std::uintmax_t kLimit = 16 << 20;
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  require<IoError>(std::filesystem::exists(status), "configuration file {} does not exist", path);
  require<IoError>(std::filesystem::is_regular_file(status),
                   "configuration {} is not a regular file", path);
  const auto size = std::filesystem::file_size(path, error);
  require<IoError>(!error && size <= kLimit,
                   "configuration file {} has {} bytes, expected at most {}", path, size, kLimit);
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (size > 0) text << file.rdbuf();
  require<IoError>(file.is_open() && text.good(), "cannot read configuration file {}: {}", path,
                   std::strerror(errno));
  return std::move(text).str();
}

void apply_environment(Config& config, const Environment& environment) {
  for (const auto& variable : environment) {
    const std::string& name = variable.first;
    for (const Field& field : fields()) {
      const std::string known = field.environment_name();
      if (known == name) {
        set_field(config, field, FieldText{variable.second}, name);
      } else {
        const bool slip = edit_distance(name, known) <= 2 &&
                          std::none_of(fields().begin(), fields().end(), [&](const Field& other) {
                            return other.environment_name() == name;
                          });
        require(!slip, "unknown environment variable {}; did you mean {}?", name, known);
      }
    }
  }
}

}  // namespace

TrainArguments parse_train_arguments(const std::vector<std::string>& words) {
  TrainArguments out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!is_flag(word)) {
      require(!word.starts_with('-'), "unknown option {}; configuration keys start with --", word);
      require(!out.config_file.has_value(),
              "expected one configuration file, found {} and {}; values follow their --section.key",
              out.config_file.value_or(""), word);
      out.config_file = word;
      continue;
    }
    const auto equals = word.find('=');
    const Field& field = field_of_flag(std::string_view(word).substr(0, equals));
    Override given{std::string(field.key), {}};
    if (equals != std::string::npos) {
      given.values.push_back(word.substr(equals + 1));
    } else {
      const std::size_t most = field.is_list() ? words.size() : 1;
      while (given.values.size() < most && i + 1 < words.size() && !is_flag(words[i + 1])) {
        given.values.push_back(words[++i]);
      }
      require(!given.values.empty(), "{} needs a value; write --{}=VALUE if it starts with --",
              word, field.key);
    }
    const auto before = std::find_if(out.overrides.begin(), out.overrides.end(),
                                     [&](const Override& other) { return other.key == given.key; });
    if (before == out.overrides.end()) {
      out.overrides.push_back(std::move(given));
    } else if (field.is_list()) {
      before->values.insert(before->values.end(), given.values.begin(), given.values.end());
    } else {
      *before = std::move(given);
    }
  }
  return out;
}

Environment tessera_environment() {
  Environment out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable(*entry);
    const auto equals = variable.find('=');
    if (variable.starts_with("TESSERA_") && equals != variable.npos) {
      out.emplace_back(variable.substr(0, equals), variable.substr(equals + 1));
    }
  }
  return out;
}

Config load_config(const TrainArguments& arguments, const Environment& environment) {
  Config config;
  if (arguments.config_file) {
    read_json_config(config, read_config_file(*arguments.config_file), *arguments.config_file);
  }
  apply_environment(config, environment);
  for (const Override& given : arguments.overrides) {
    const Field& field = *find_field(given.key);
    const std::string where = "--" + given.key;
    if (given.values.size() == 1) {
      set_field(config, field, FieldText{given.values.front()}, where);
    } else {
      set_field(config, field, given.values, where);
    }
  }
  apply_depth(config);
  return config;
}

}  // namespace tessera::tools
