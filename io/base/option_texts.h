#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// Options by name, as a command line, the C API and Python give them. In names, '_' equals '-'.
/// The functions that read an option return an empty value if it is absent, and throw
/// InvalidArgument if its text is invalid, or if it has several values and only texts() reads it.
class OptionTexts {
 public:
  void add(std::string_view name, std::string value);
  /// Replaces all values of the option.
  void set(std::string_view name, std::string value);
  bool has(std::string_view name) const;

  /// Null if the option is absent.
  const std::string* find(std::string_view name) const;
  std::string text(std::string_view name, const std::string& otherwise = "") const;
  std::vector<std::string> texts(std::string_view name) const;
  /// An integer of at least `least`.
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t least) const;
  /// A size, as in parse_bytes.
  std::optional<std::int64_t> bytes(std::string_view name) const;
  /// "true" or "false"; absent: false.
  bool flag(std::string_view name) const;
  template <typename T>
  std::optional<T> choice(std::string_view name, const std::map<std::string, T>& choices) const {
    const std::string* const value = find(name);
    if (value == nullptr) return std::nullopt;
    const auto found = choices.find(*value);
    if (found != choices.end()) return found->second;
    std::string known;
    for (const auto& [text, ignored] : choices) known += (known.empty() ? "" : ", ") + text;
    refuse(name, *value, "one of " + known);
  }
  /// Option "step"; empty: "latest".
  std::optional<std::int64_t> step() const;
  /// Option "jobs"; 1 by default.
  int jobs() const;

  /// @throws InvalidArgument, with all names that were read, if any other option is given
  void refuse_others() const;

 private:
  [[noreturn]] static void refuse(std::string_view name, const std::string& value,
                                  const std::string& expected);
  const std::vector<std::string>& values(std::string_view name) const;

  std::map<std::string, std::vector<std::string>, std::less<>> values_;
  mutable std::set<std::string, std::less<>> read_;  ///< names of the options that were read
};

}  // namespace tessera::io
