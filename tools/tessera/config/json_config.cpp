#include <algorithm>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/config/load.h"

namespace tessera::tools {
namespace {

/// Handles the parser's events. Depth 1 is the root object, 2 a section, 3 a list.
class Handler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Handler(Config& config, std::string_view text, std::string_view name, const std::size_t& line)
      : config_(config), text_(text), name_(name), line_(line) {}

  bool null() override { return value_of("null"); }
  bool boolean(bool value) override { return value_of(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return set(FieldValue(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    constexpr auto kMax = static_cast<number_unsigned_t>(INT64_MAX);
    if (value > kMax) return set(static_cast<double>(value));
    return set(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t&) override { return set(value); }
  bool string(string_t& value) override {
    if (depth_ == 3) {
      list_.push_back(value);
      return true;
    }
    return set(value);
  }
  bool binary(binary_t&) override { return value_of("binary"); }

  bool start_object(std::size_t) override {
    if (depth_ == 2) value_of("an object");
    if (depth_ == 3) fail("{} must be a list of strings, found an object in it", field_->key);
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2) value_of("a list");
    if (depth_ == 3) fail("{} must be a list of strings, found a list in it", field_->key);
    list_.clear();
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return set(list_);
  }

  bool key(string_t& value) override {
    key_line_ = line_;
    if (depth_ == 1) {
      section_ = value;
      if (!is_section(section_)) {
        fail("unknown section \"{}\"; did you mean \"{}\"?", section_, nearest_section(section_));
      }
    }
    const std::string path = depth_ == 1 ? section_ : section_ + "." + value;
    if (depth_ == 2) {
      field_ = find_field(path);
      if (!field_) fail("unknown key \"{}\"; did you mean \"{}\"?", path, nearest_key(path));
    }
    if (!seen_.insert(path).second) fail("{} is given twice", path);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    const auto end = text_.begin() + static_cast<std::ptrdiff_t>(std::min(position, text_.size()));
    key_line_ = 1 + static_cast<std::size_t>(std::count(text_.begin(), end, '\n'));
    // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error ...", or
    // "[json.exception.out_of_range.406] number overflow parsing '1e400'"
    std::string_view what = error.what();
    const auto colon = what.find(": ");
    what.remove_prefix(colon != what.npos ? colon + 2 : what.find("] ") + 2);
    fail("not valid JSON: {}", what);
  }

 private:
  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) const {
    throw InvalidArgument("{}: {}", where(), fmt::format(text, std::forward<Args>(args)...));
  }
  std::string where() const { return fmt::format("{}:{}", name_, key_line_); }

  /// Always throws, because a value of type `found` is not allowed at this position.
  bool value_of(std::string_view found) const {
    if (depth_ == 0)
      fail("expected an object of sections like {{\"model\": {{...}}}}, found {}", found);
    if (depth_ == 1) fail("\"{}\" must be an object of keys, found {}", section_, found);
    if (depth_ == 3) fail("{} must be a list of strings, found {} in it", field_->key, found);
    fail("{} must be a {}, found {}", field_->key, field_->type_name(), found);
  }
  bool set(const FieldValue& value) {
    if (depth_ != 2)
      return value_of(std::holds_alternative<std::string>(value) ? "a string" : "a number");
    set_field(config_, *field_, value, where());
    return true;
  }

  Config& config_;
  std::string_view text_;
  std::string_view name_;
  const std::size_t& line_;
  std::size_t key_line_ = 1;  // of the last key and its value; line_ can be past a number's end
  int depth_ = 0;
  std::string section_;
  const Field* field_ = nullptr;
  std::vector<std::string> list_;
  std::set<std::string> seen_;
};

/// Counts lines while the parser reads, because nlohmann's SAX interface reports no positions.
struct LineCounter {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  const char* at;
  std::size_t* line;

  char operator*() const { return *at; }
  LineCounter& operator++() {
    *line += *at++ == '\n' ? 1 : 0;
    return *this;
  }
  bool operator==(const LineCounter& other) const { return at == other.at; }
};

}  // namespace

void read_json_config(Config& config, std::string_view text, std::string_view name) {
  std::size_t line = 1;
  Handler handler(config, text, name, line);
  nlohmann::json::sax_parse(LineCounter{text.data(), &line},
                            LineCounter{text.data() + text.size(), &line}, &handler,
                            nlohmann::json::input_format_t::json, /*strict=*/true,
                            /*ignore_comments=*/true);
}

}  // namespace tessera::tools
