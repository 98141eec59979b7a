#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io::chat {

/// Limits the work of a rendering, in units of about a nanosecond or a byte of text.
class Budget {
 public:
  explicit Budget(std::int64_t units) : left_(units) {}
  /// @throws InvalidArgument when the budget is used up
  void spend(std::size_t units) {
    left_ -= static_cast<std::int64_t>(std::min<std::size_t>(units, std::size_t{1} << 40));
    require(left_ >= 0, "the template does not end within its limits; does a loop grow its text?");
  }

 private:
  std::int64_t left_;
};

struct Value;
struct Macro;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;  // in order of insertion
/// A name or key without a value.
struct Undefined {
  std::string name;
};
struct None {};
/// The mutable object of namespace(), owned by its rendering.
struct Namespace {
  Dict* items;
};
/// A macro, a method of `self`, or a global function.
struct Callable {
  std::string name;
  const Macro* macro = nullptr;
  std::shared_ptr<const Value> self = nullptr;
};

/// A value of the template language. Strings are valid UTF-8; tuples are lists.
struct Value {
  using Data =
      std::variant<Undefined, None, bool, std::int64_t, double, std::string,
                   std::shared_ptr<const List>, std::shared_ptr<const Dict>, Namespace, Callable,
                   std::uint64_t>;  // only above INT64_MAX
  Data data = Undefined{};

  Value() = default;
  Value(Data d) : data(std::move(d)) {}           // NOLINT(google-explicit-constructor)
  Value(bool b) : data(b) {}                      // NOLINT(google-explicit-constructor)
  Value(std::string s) : data(std::move(s)) {}    // NOLINT(google-explicit-constructor)
  Value(const char* s) : data(std::string(s)) {}  // NOLINT(google-explicit-constructor)
  Value(std::int64_t i) : data(i) {}              // NOLINT(google-explicit-constructor)
  Value(List list) : data(std::make_shared<const List>(std::move(list))) {}  // NOLINT
  Value(Dict dict) : data(std::make_shared<const Dict>(std::move(dict))) {}  // NOLINT

  bool is_undefined() const { return std::holds_alternative<Undefined>(data); }
  bool is_none() const { return std::holds_alternative<None>(data); }
  const std::string* string() const { return std::get_if<std::string>(&data); }
  const List* list() const {
    const auto* list = std::get_if<std::shared_ptr<const List>>(&data);
    return list == nullptr ? nullptr : list->get();
  }
  const Dict* dict() const {
    const auto* dict = std::get_if<std::shared_ptr<const Dict>>(&data);
    return dict == nullptr ? nullptr : dict->get();
  }
  /// Whole numbers and booleans.
  const std::int64_t* integer() const { return std::get_if<std::int64_t>(&data); }
  /// Python's name of the type, for errors.
  std::string_view type() const;
};

Value from_json(const OrderedJson& json);

/// The entry of a dict, or null.
const Value* find(const Dict& dict, std::string_view key);
Value& slot(Dict& dict, const std::string& key);

bool truth(const Value& value);
/// An int, float or bool. @return false for other values
bool as_number(const Value& value, double& number);
bool equal(const Value& a, const Value& b, Budget& budget);
/// -1, 0 or 1. @throws InvalidArgument if Python does not order such values
int compare(const Value& a, const Value& b, Budget& budget);
/// Elements of a list, keys of a dict, characters of a string. @throws InvalidArgument
List elements(const Value& value, Budget& budget);
/// Elements, keys or characters. @throws InvalidArgument
std::int64_t length(const Value& value);

/// Python's str(). @throws InvalidArgument if the text would be too long
std::string to_text(const Value& value, Budget& budget);

struct JsonStyle {
  bool ascii = false;
  bool sorted = false;
  std::string indent = {};  ///< of a level; empty: one line
  std::string comma = ", ", colon = ": ";
};
/// Python's json.dumps(). @throws InvalidArgument on a value without a JSON form
std::string to_json(const Value& value, const JsonStyle& style, Budget& budget);

}  // namespace tessera::io::chat
