#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/byte_range.h"
#include "io/pickle/pickle_arena.h"

namespace tessera::io {

/// A class or function named in a pickle.
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
  Object,        ///< result of calling `global` with `args`; has state, and items() like a Dict
  PersistentId,  ///< args is the id
  Folded,        ///< numbers() that a PickleFolder made of an object of `global`
};

/// "a tuple", "an integer", ...
std::string_view pickle_kind_name(PickleKind kind);

/// A value of a pickle. Values may be shared, and a list or dict may contain itself: callers must
/// not recurse deeper than the structure they expect.
struct PickleValue {
  PickleKind kind = PickleKind::None;
  bool is_pinned = false;   ///< in the memo of a pickle with a PickleFolder
  std::uint16_t depth = 0;  ///< nesting depth of its items when they were added
  std::uint32_t capacity = 0;
  union {
    std::int64_t integer = 0;
    double real;
    const PickleGlobal* global;  ///< one of the `known` globals of Pickle, or an inert one
  };
  const void* data = nullptr;  ///< the text, or an array of pointers to the items
  std::size_t size = 0;        ///< bytes of the text, or number of items or numbers
  const PickleValue* args = nullptr;
  const PickleValue* state = nullptr;  ///< the object's state; null if not set

  /// Bytes of a Str or Bytes value; a Str is normally UTF-8.
  std::string_view text() const { return {static_cast<const char*>(data), size}; }
  /// Elements of a list, tuple or set. For a Dict, or an Object filled like one: key, value, key,
  /// value, ...
  std::span<const PickleValue* const> items() const {
    return {static_cast<const PickleValue* const*>(data), size};
  }
  std::span<const std::int64_t> numbers() const {
    return {static_cast<const std::int64_t*>(data), size};
  }
  /// Whether this was folded from an object of a class with this name, in any module.
  bool is_folded(std::string_view name) const {
    return kind == PickleKind::Folded && global->name == name;
  }
  bool is(PickleKind other) const { return kind == other; }
  /// Whether this is an Object made by a call of `callee`.
  bool is_object(const PickleGlobal& callee) const {
    return kind == PickleKind::Object && *global == callee;
  }
  /// Value for a key in a Dict, or in an Object filled like one; null if absent.
  const PickleValue* find(std::string_view key) const;
};

/// Treatment of globals that a caller of Pickle does not list.
enum class UnknownGlobals : std::uint8_t {
  Refuse,
  Inert,  ///< keep their names, and their objects as plain data, for states with arbitrary objects
};

/// Replaces objects by a few numbers while a pickle is parsed, so that tables of millions of small
/// objects take little memory.
class PickleFolder {
 public:
  virtual ~PickleFolder() = default;
  /// Called for an object of a known class when it is made, and when its state is set. Appends its
  /// numbers and returns true to replace it by a Folded value.
  virtual bool fold(const PickleValue& object, std::vector<std::int64_t>& numbers) = 0;
  /// Called for an entry that is added to any dict, if key and value are Folded. Returns true to
  /// leave the entry out.
  virtual bool take(const PickleValue& key, const PickleValue& value) = 0;
};

/// A parsed pickle. Owns its values.
class Pickle {
 public:
  static constexpr std::int64_t kMaxMemory = std::int64_t{4} << 30;  // bytes

  /// Parses a pickle of protocol 2 to 5 as plain data. Executes and imports nothing: a call becomes
  /// an Object with the callee and its arguments. Reads `bytes` twice.
  /// @param known       accepted globals; must outlive this
  /// @param source      named in errors
  /// @param max_memory  maximum bytes of all values
  /// @param unknown     Inert also accepts calls of computed callees, whose object has an unnamed
  ///                    global; items of any object; and integers over 64 bits, as Bytes
  /// @param folder      may be null; else objects of unknown globals lose arguments, state and items
  /// @throws Unsupported naming an unknown global, or an opcode that writers of tensors do not use;
  ///         CorruptCheckpoint on malformed input or an exceeded limit; errors of ByteRange::read
  Pickle(const ByteRange& bytes, std::span<const PickleGlobal> known, const std::string& source,
         std::int64_t max_memory = kMaxMemory, UnknownGlobals unknown = UnknownGlobals::Refuse,
         PickleFolder* folder = nullptr);
  Pickle(std::string_view text, std::span<const PickleGlobal> known, const std::string& source,
         std::int64_t max_memory = kMaxMemory, UnknownGlobals unknown = UnknownGlobals::Refuse);

  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleMachine;
  PickleArena values_, kept_;
  const PickleValue* root_ = nullptr;
};

}  // namespace tessera::io
