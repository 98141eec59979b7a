#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>

namespace tessera::io {

/// A class or function that a pickle may name.
struct PickleGlobal {
  std::string_view module, name;
  friend bool operator==(const PickleGlobal&, const PickleGlobal&) = default;
};

inline constexpr PickleGlobal kOrderedDict{"collections", "OrderedDict"};

enum class PickleKind : std::uint8_t {
  None,
  Bool,          ///< integer
  Int,           ///< integer
  Float,         ///< real
  Str,           ///< text()
  Bytes,         ///< text()
  Tuple,         ///< items()
  List,          ///< items()
  Set,           ///< items()
  Dict,          ///< items(): key, value, key, value, ...
  Global,        ///< global
  Object,        ///< what `global` called with `args` would be: args, state, items() as of a Dict
  PersistentId,  ///< args: the id
};

/// "a tuple", "an integer", ...: for messages.
std::string_view pickle_kind_name(PickleKind kind);

/// A value of a pickle. Values may be shared, and a list or dict may hold itself: callers must not
/// recurse deeper than the structure they expect.
struct PickleValue {
  PickleKind kind = PickleKind::None;
  std::uint16_t depth = 0;  ///< of the containers inside, when it was made
  std::uint32_t capacity = 0;
  union {
    std::int64_t integer = 0;
    double real;
    const PickleGlobal* global;  ///< one of those that the reader was given
  };
  const void* data = nullptr;  ///< of the text, or an array of pointers to the items
  std::size_t size = 0;        ///< of the text in bytes, or how many items
  const PickleValue* args = nullptr;
  const PickleValue* state = nullptr;  ///< what the object's state was set to; null if it was not

  /// Of Str and Bytes: as stored, normally UTF-8.
  std::string_view text() const { return {static_cast<const char*>(data), size}; }
  /// Of containers, and of an Object that holds entries as a Dict does.
  std::span<const PickleValue* const> items() const {
    return {static_cast<const PickleValue* const*>(data), size};
  }
  bool is(PickleKind other) const { return kind == other; }
  /// Whether this is an Object made by a call of `callee`.
  bool is_object(const PickleGlobal& callee) const {
    return kind == PickleKind::Object && *global == callee;
  }
  /// Value of a key of a Dict, or of what an Object holds as one; null if there is none.
  const PickleValue* find(std::string_view key) const;
};

struct PickleLimits {
  std::int64_t max_bytes = std::int64_t{256} << 20;  ///< of the pickle
  std::int64_t max_memory = std::int64_t{4} << 30;   ///< bytes of all values
  int max_depth = 64;                                ///< containers in containers
};

/// A parsed pickle. Owns its values, which refer to its text.
class Pickle {
 public:
  /// Parses a pickle of protocol 2 to 5 as plain data. Executes and imports nothing: a call becomes
  /// an Object with the callee and its arguments.
  /// @param known   the only globals that are accepted; must outlive this
  /// @param source  named in errors
  /// @throws Unsupported naming the global that is not known, or the opcode that no writer of
  ///         tensors uses; CorruptCheckpoint on everything that is malformed or over a limit
  Pickle(std::string text, std::span<const PickleGlobal> known, const std::string& source,
         const PickleLimits& limits = {});

  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleMachine;
  std::unique_ptr<std::string> text_;  // its address stays when this is moved
  std::unique_ptr<std::pmr::monotonic_buffer_resource> memory_;
  const PickleValue* root_ = nullptr;
};

}  // namespace tessera::io
