#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/base/shape.h"
#include "io/pickle/pickle.h"

namespace tessera::io {

/// Writes a pickle of protocol 2, with opcodes that torch.load(weights_only=True) accepts. Each call
/// pushes a value on the stack of the pickle machine, or does what it is named after.
class PickleWriter {
 public:
  void none() { text_ += 'N'; }
  void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
  void integer(std::int64_t value);
  void real(double value);
  /// @param value  UTF-8
  void text(std::string_view value);
  void global(const PickleGlobal& value);
  /// A tuple of integers.
  void sizes(const Dims& dims);

  // Items between begin_...() and end_...(); of a dict: key, value, key, value, ...
  void begin_dict() { text_ += "}("; }
  void end_dict() { text_ += 'u'; }
  void begin_list() { text_ += "]("; }
  void end_list() { text_ += 'e'; }
  void begin_tuple() { text_ += '('; }
  void end_tuple() { text_ += 't'; }

  /// Calls a function that was pushed with a tuple of arguments that was pushed after it.
  void reduce() { text_ += 'R'; }
  /// Makes an object of a class that was pushed, with an empty tuple pushed after it.
  void new_object() { text_ += ")\x81"; }
  /// Gives the object below the top of the stack the top as its state.
  void build() { text_ += 'b'; }
  void persistent_id() { text_ += 'Q'; }

  /// Ends the pickle.
  std::string finish() { return std::move(text_ += '.'); }

 private:
  // Pushes a value that was pushed before; else remembers the next one. @return whether it did
  bool recall(const std::string& key);
  void remember();
  std::string text_{"\x80\x02"};
  std::unordered_map<std::string, std::uint32_t> memo_;
};

}  // namespace tessera::io
