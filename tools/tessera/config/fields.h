#pragma once

#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tools/tessera/config/config.h"

namespace tessera::tools {

using FieldRef = std::variant<std::int64_t*, double*, std::string*, std::vector<std::string>*>;

/// A configuration key, the same for JSON files, environment, flags and help.
struct Field {
  std::string_view key;  ///< "model.n_layer"
  FieldRef (*ref)(Config&);
  std::string_view help;
  double min = 0;
  double max = 0;  ///< inclusive and finite; both bounds apply to numbers only
  bool min_exclusive = false;
  std::vector<std::string_view> choices;  ///< allowed strings; empty: any

  bool is_list() const;
  /// "integer", "number", "string" or "list of strings"
  std::string_view type_name() const;
  /// "TESSERA_MODEL_N_LAYER"
  std::string environment_name() const;
};

std::span<const Field> fields();
/// Null if unknown.
const Field* find_field(std::string_view key);
bool is_section(std::string_view name);
/// The closest known key, for "did you mean".
std::string_view nearest_key(std::string_view key);
std::string_view nearest_section(std::string_view name);
/// Levenshtein distance.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Text from a flag or the environment, which set_field() parses according to the field's type.
struct FieldText {
  std::string text;
};
using FieldValue =
    std::variant<std::int64_t, double, std::string, std::vector<std::string>, FieldText>;

/// Sets a field after checking type and range.
/// @param where  the source for messages: "run.json:12", "--optim.lr", "TESSERA_OPTIM_LR"
/// @throws InvalidArgument with key, value, what is expected, and `where`
void set_field(Config& config, const Field& field, const FieldValue& value, std::string_view where);

std::string config_help();

}  // namespace tessera::tools
