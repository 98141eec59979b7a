#pragma once

#include <tessera/c_api.h>

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/placed.h"

namespace tessera::capi {

/// Thrown when a callback stops a call.
class Stopped : public Error {
 public:
  using Error::Error;
};

/// Runs the body of a C function. @param place  of errors that have none
/// @return the status of its exception, whose text it keeps for this thread
int run_call(const io::ErrorPlace& place, const std::function<void()>& body) noexcept;

/// The options of a call, by name with '-'.
class Options {
 public:
  /// @param names     that the call has
  /// @param repeated  names that may occur more than once
  /// @throws InvalidArgument on another name, NULL, or a repeated one
  Options(const tessera_option* options, std::size_t count, std::span<const char* const> names,
          std::span<const char* const> repeated = {});

  /// Null if the option is absent.
  const std::string* find(std::string_view name) const;
  std::string text(std::string_view name, const std::string& otherwise) const;
  std::vector<std::string> texts(std::string_view name) const;
  /// @throws InvalidArgument unless it is an integer of at least `least`
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t least) const;
  /// @throws InvalidArgument unless it is "true" or "false"
  bool flag(std::string_view name) const;
  /// @throws InvalidArgument, with the choices, on another value
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
  /// Steps of a run; empty for "latest".
  std::optional<std::int64_t> step() const;
  int jobs() const;

 private:
  [[noreturn]] static void refuse(std::string_view name, const std::string& value,
                                  const std::string& expected);
  std::map<std::string, std::vector<std::string>, std::less<>> values_;
};

/// @throws InvalidArgument if it is NULL or empty. @param what  of the argument, for the message
std::string text_argument(const char* text, const char* what);

void send_json(tessera_text callback, void* user, const io::Json& json);

}  // namespace tessera::capi
