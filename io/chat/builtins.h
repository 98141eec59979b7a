#pragma once

#include <string>
#include <utility>
#include <vector>

#include "io/chat/value.h"

namespace tessera::io::chat {

/// Arguments of a call, filter or test.
struct Arguments {
  std::vector<Value> values = {};
  std::vector<std::pair<std::string, Value>> named = {};

  /// Argument `index`, or the one named `name`; null if absent.
  const Value* get(std::size_t index, std::string_view name = "") const;
  /// @throws InvalidArgument if it is absent
  const Value& need(std::size_t index, std::string_view name = "") const;
  bool flag(std::size_t index, std::string_view name, bool otherwise = false) const;
  std::string text(std::size_t index, std::string_view name, std::string_view otherwise) const;
  /// Without the first `n` positional ones.
  Arguments after(std::size_t n) const;
};

/// value.name: a method, an entry, or undefined. @throws InvalidArgument on an undefined value
Value attribute(const Value& value, const std::string& name);
/// value[key]: an entry, a method, or undefined. @throws as attribute()
Value item(const Value& value, const Value& key, Budget& budget);

// @throws InvalidArgument where jinja2 or Python would; Unsupported on an unknown name
Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments,
                   Budget& budget);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments,
                Budget& budget);
/// A method of a string or dict.
Value call_method(const Value& self, const std::string& name, const Arguments& arguments,
                  Budget& budget);
bool contains(const Value& container, const Value& value, Budget& budget);

}  // namespace tessera::io::chat
