#include "io/base/json.h"

#include <unordered_set>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {

Json parse_json(std::string_view text, const std::string& source, int max_depth) {
  require<CorruptCheckpoint>(!text.empty(), "{} is empty; expected JSON", source);
  require<CorruptCheckpoint>(!text.starts_with("\xEF\xBB\xBF"),
                             "{} starts with a byte-order mark; expected plain UTF-8", source);
  require<CorruptCheckpoint>(!text.starts_with("\xFF\xFE") && !text.starts_with("\xFE\xFF") &&
                                 text.find('\0') == std::string_view::npos,
                             "{} is UTF-16 or binary; expected JSON in UTF-8", source);
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  int depth = 0;
  const auto open = [&] {
    require<CorruptCheckpoint>(++depth <= max_depth, "{}: nested deeper than {} levels", source,
                               max_depth);
  };
  const auto check = [&](int, Json::parse_event_t event, Json& value) {
    switch (event) {
      case Json::parse_event_t::object_start:
        open();
        keys.emplace_back();
        break;
      case Json::parse_event_t::object_end:
        --depth;
        keys.pop_back();
        break;
      case Json::parse_event_t::array_start:
        open();
        break;
      case Json::parse_event_t::array_end:
        --depth;
        break;
      case Json::parse_event_t::key:
        require<CorruptCheckpoint>(keys.back().insert(value.get_ref<const std::string&>()).second,
                                   "{}: the key \"{}\" stands twice in one object", source,
                                   value.get_ref<const std::string&>());
        break;
      case Json::parse_event_t::value:
        break;
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& error) {
    throw CorruptCheckpoint("{} is not valid JSON: {}", source, error.what());
  }
}

std::string JsonReader::where() const { return place_.empty() ? source_ : source_ + ": " + place_; }

void JsonReader::expected(std::string_view what) const {
  std::string found = value_->dump(-1, ' ', false, Json::error_handler_t::replace);
  if (found.size() > 60) found = found.substr(0, 57) + "...";
  throw CorruptCheckpoint("{}: expected {}, found {}", where(), what, found);
}

bool JsonReader::has(std::string_view key) const { return object().contains(key); }

JsonReader JsonReader::at(std::string_view key) const {
  const auto found = object().find(key);
  require<CorruptCheckpoint>(found != value_->end(), "{}: the field \"{}\" is missing", where(),
                             key);
  return {*found, source_, place_.empty() ? std::string(key) : place_ + "." + std::string(key)};
}

JsonReader JsonReader::at(std::size_t index) const {
  if (index >= array_size())
    expected("an array of more than " + std::to_string(index) + " entries");
  return {(*value_)[index], source_, place_ + "[" + std::to_string(index) + "]"};
}

std::size_t JsonReader::array_size() const {
  if (!value_->is_array()) expected("an array");
  return value_->size();
}

const Json& JsonReader::object() const {
  if (!value_->is_object()) expected("an object");
  return *value_;
}

const std::string& JsonReader::string() const {
  if (!value_->is_string()) expected("a string");
  return value_->get_ref<const std::string&>();
}

std::int64_t JsonReader::integer(std::int64_t low, std::int64_t high) const {
  const auto refuse = [&] { expected(fmt::format("a whole number from {} to {}", low, high)); };
  if (!value_->is_number_integer()) refuse();
  if (value_->is_number_unsigned() &&
      value_->get<std::uint64_t>() > static_cast<std::uint64_t>(high)) {
    refuse();
  }
  const auto number = value_->get<std::int64_t>();
  if (number < low || number > high) refuse();
  return number;
}

}  // namespace tessera::io
