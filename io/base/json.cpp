#include "io/base/json.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {

namespace {

// The text of an error without "[json.exception.parse_error.101] ".
std::string_view without_name(std::string_view text) {
  const auto end = text.find("] ");
  return text.starts_with('[') && end != text.npos ? text.substr(end + 2) : text;
}

/// Rejects duplicate keys and deep nesting. Not a callback of Json::parse, because that takes time
/// quadratic in the number of sibling objects.
class Checker final : public nlohmann::json_sax<Json> {
 public:
  Checker(const std::string& source, int max_depth) : source_(source), max_depth_(max_depth) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return open();
  }
  bool key(string_t& name) override {
    require<CorruptCheckpoint>(keys_.back().insert(name).second,
                               "{}: duplicate key \"{}\" in one object", source_, name);
    return true;
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    throw CorruptCheckpoint("{} is not valid JSON: {}", source_, without_name(error.what()));
  }

 private:
  bool open() {
    require<CorruptCheckpoint>(++depth_ <= max_depth_, "{}: nested deeper than {} levels", source_,
                               max_depth_);
    return true;
  }
  const std::string& source_;
  const int max_depth_;
  int depth_ = 0;
  std::vector<std::unordered_set<std::string>> keys_;  // per enclosing object
};

template <typename T>
T parse_as(std::string_view text, const std::string& source, int max_depth) {
  require<CorruptCheckpoint>(!text.empty(), "{} is empty; expected JSON", source);
  require<CorruptCheckpoint>(!text.starts_with("\xEF\xBB\xBF"),
                             "{} starts with a byte-order mark; expected plain UTF-8", source);
  require<CorruptCheckpoint>(!text.starts_with("\xFF\xFE") && !text.starts_with("\xFE\xFF") &&
                                 text.find('\0') == std::string_view::npos,
                             "{} is UTF-16 or binary; expected JSON in UTF-8", source);
  Checker checker(source, max_depth);
  Json::sax_parse(text, &checker);
  try {
    return T::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw CorruptCheckpoint("{} is not valid JSON: {}", source, without_name(error.what()));
  }
}

}  // namespace

Json parse_json(std::string_view text, const std::string& source, int max_depth) {
  return parse_as<Json>(text, source, max_depth);
}

OrderedJson parse_ordered_json(std::string_view text, const std::string& source, int max_depth) {
  return parse_as<OrderedJson>(text, source, max_depth);
}

std::string dump_json(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
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
