// Source of the format: CPython's Lib/pickletools.py.

#include "io/pickle/pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <new>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "pickles are little-endian");

constexpr int kMinProtocol = 2, kMaxProtocol = 5;
constexpr std::size_t kMaxName = 1000;  // bytes of a global's module or name
constexpr int kMaxDepth = 64;           // nesting of containers
// Maximum number of values on the stack. Writers flush containers every 1000 items.
constexpr std::size_t kMaxStack = std::size_t{1} << 22;

enum Opcode : std::uint8_t {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kLong1 = 0x8a,
  kNone = 'N',
  kTrue = 0x88,
  kFalse = 0x89,
  kBinFloat = 'G',
  kBinUnicode = 'X',
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kBinBytes8 = 0x8e,
  kEmptyTuple = ')',
  kTuple = 't',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kGet = 'h',
  kLongGet = 'j',
  kPut = 'q',
  kLongPut = 'r',
  kMemoize = 0x94,
  kGlobal = 'c',
  kStackGlobal = 0x93,
  kReduce = 'R',
  kNewObject = 0x81,
  kBuild = 'b',
  kPersistentId = 'Q',
  kProtocol = 0x80,
  kFrame = 0x95,
};

/// Opcodes that checkpoints of tensors do not need, with their names for errors.
constexpr std::pair<std::uint8_t, std::string_view> kRefused[] = {
    {'I', "INT"},
    {'L', "LONG"},
    {'F', "FLOAT"},
    {'S', "STRING"},
    {'T', "BINSTRING"},
    {'U', "SHORT_BINSTRING"},
    {'V', "UNICODE"},
    {'l', "LIST"},
    {'d', "DICT"},
    {'g', "GET"},
    {'p', "PUT"},
    {'2', "DUP"},
    {'i', "INST"},
    {'o', "OBJ"},
    {'P', "PERSID"},
    {0x82, "EXT1"},
    {0x83, "EXT2"},
    {0x84, "EXT4"},
    {0x8b, "LONG4"},
    {0x92, "NEWOBJ_EX"},
    {0x96, "BYTEARRAY8"},
    {0x97, "NEXT_BUFFER"},
    {0x98, "READONLY_BUFFER"},
};

/// Values shared by all pickles.
struct Constants {
  PickleValue none, empty_tuple, no, yes;
  std::array<PickleValue, 256> integers;
  Constants() {
    empty_tuple.kind = PickleKind::Tuple;
    no.kind = yes.kind = PickleKind::Bool;
    yes.integer = 1;
    for (std::size_t i = 0; i < integers.size(); ++i) {
      integers[i].kind = PickleKind::Int;
      integers[i].integer = static_cast<std::int64_t>(i);
    }
  }
};

const Constants& constants() {
  static const Constants kAll;
  return kAll;
}

}  // namespace

std::string_view pickle_kind_name(PickleKind kind) {
  constexpr std::string_view kNames[] = {
      "None",   "a bool", "an integer", "a float", "a string",  "bytes",          "a tuple",
      "a list", "a set",  "a dict",     "a class", "an object", "a persistent id"};
  return kNames[static_cast<std::size_t>(kind)];
}

const PickleValue* PickleValue::find(std::string_view key) const {
  if (kind != PickleKind::Dict && kind != PickleKind::Object) return nullptr;
  const auto entries = items();
  for (std::size_t i = 0; i + 1 < entries.size(); i += 2) {
    if (entries[i]->is(PickleKind::Str) && entries[i]->text() == key) return entries[i + 1];
  }
  return nullptr;
}

/// Interpreter of a pickle's opcodes. Cannot execute code.
class PickleMachine {
 public:
  PickleMachine(Pickle& pickle, std::span<const PickleGlobal> known, const std::string& source,
                std::int64_t max_memory, UnknownGlobals unknown)
      : text_(*pickle.text_),
        memory_(*pickle.memory_),
        known_(known),
        source_(source),
        max_memory_(max_memory),
        inert_(unknown == UnknownGlobals::Inert) {}

  const PickleValue* run() {
    check(!text_.empty() && take<std::uint8_t>() == kProtocol,
          "not a pickle of protocol 2 or newer: it does not begin with PROTO");
    const int protocol = take<std::uint8_t>();
    check(protocol >= kMinProtocol && protocol <= kMaxProtocol,
          "is a pickle of protocol {}; 2 to 5 are known", protocol);
    for (;;) {
      opcode_ = position_;
      const auto opcode = take<std::uint8_t>();
      if (opcode == kStop) break;
      step(opcode);
    }
    check(stack_.size() == 1 && marks_.empty(),
          "STOP leaves {} values and {} marks, expected one value", stack_.size(), marks_.size());
    check(position_ == text_.size(), "{} bytes follow STOP", text_.size() - position_);
    return stack_.front();
  }

 private:
  template <typename... Args>
  void check(bool condition, fmt::format_string<Args...> text, Args&&... args) const {
    if (condition) [[likely]]
      return;
    throw CorruptCheckpoint("{}: pickle, byte {}: {}", source_, opcode_,
                            fmt::format(text, std::forward<Args>(args)...));
  }

  std::string_view take_bytes(std::uint64_t n) {
    check(n <= text_.size() - position_, "needs {} bytes, but {} follow: it was truncated", n,
          text_.size() - position_);
    const std::string_view bytes = text_.substr(position_, n);
    position_ += n;
    return bytes;
  }
  template <typename T>
  T take() {
    T value{};
    const std::string_view bytes = take_bytes(sizeof(T));
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  std::string_view take_line() {
    const std::size_t end = text_.find('\n', position_);
    check(end != std::string_view::npos, "a name has no end: it was truncated");
    const std::string_view line = text_.substr(position_, end - position_);
    position_ = end + 1;
    return line;
  }

  void* allocate(std::size_t bytes) {
    allocated_ += static_cast<std::int64_t>(bytes);
    check(allocated_ <= max_memory_, "its values take more than {} bytes", max_memory_);
    return memory_.allocate(bytes, alignof(PickleValue));
  }
  template <typename T>
  T* make() {
    static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= alignof(PickleValue));
    return new (allocate(sizeof(T))) T;
  }
  PickleValue* make(PickleKind kind) {
    auto* const value = make<PickleValue>();
    value->kind = kind;
    return value;
  }

  void push(const PickleValue* value) {
    check(stack_.size() < kMaxStack, "more than {} values on the stack", kMaxStack);
    stack_.push_back(value);
  }
  // Start of the accessible part of the stack: values below the innermost mark are not accessible.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  const PickleValue* top() const {
    check(stack_.size() > floor(), "pops a value from an empty stack");
    return stack_.back();
  }
  const PickleValue* pop() {
    const PickleValue* const value = top();
    stack_.pop_back();
    return value;
  }
  /// The last n values of the stack. The caller must then drop them.
  std::span<const PickleValue*> last(std::size_t n) {
    check(stack_.size() - floor() >= n, "pops {} values, but the stack has {}", n,
          stack_.size() - floor());
    return std::span(stack_).last(n);
  }
  std::size_t pop_mark() {
    check(!marks_.empty(), "has no mark to return to");
    const std::size_t n = stack_.size() - marks_.back();
    marks_.pop_back();
    return n;
  }
  void drop(std::size_t n) { stack_.resize(stack_.size() - n); }

  // The const_cast is safe, because `is_right` is false for the shared constants.
  PickleValue* container(const PickleValue* value, bool is_right, std::string_view expected) const {
    check(is_right, "adds to {}, expected {}", pickle_kind_name(value->kind), expected);
    return const_cast<PickleValue*>(value);
  }

  void nest(PickleValue* outer, const PickleValue* inner) const {
    const int depth = std::max<int>(outer->depth, inner->depth + 1);
    check(depth <= kMaxDepth, "nested deeper than {} levels", kMaxDepth);
    outer->depth = static_cast<std::uint16_t>(depth);
  }

  void add_items(PickleValue* to, std::span<const PickleValue*> added) {
    const std::size_t needed = to->size + added.size();
    check(needed <= UINT32_MAX, "a container of {} values", needed);
    if (needed > to->capacity) {
      const std::size_t capacity =
          std::max(needed, std::min<std::size_t>(2 * to->size, UINT32_MAX));
      void* const data = allocate(capacity * sizeof(PickleValue*));
      std::copy(to->items().begin(), to->items().end(), static_cast<const PickleValue**>(data));
      to->data = data;
      to->capacity = static_cast<std::uint32_t>(capacity);
    }
    // This const_cast is safe, because the array was allocated above or by an earlier call.
    auto* const items = static_cast<const PickleValue**>(const_cast<void*>(to->data));
    std::copy(added.begin(), added.end(), items + to->size);
    to->size = needed;
    for (const PickleValue* item : added) nest(to, item);
  }

  void push_sequence(PickleKind kind, std::size_t n) {
    if (n == 0 && kind == PickleKind::Tuple) return push(&constants().empty_tuple);
    PickleValue* const value = make(kind);
    add_items(value, last(n));
    drop(n);
    push(value);
  }
  void append(std::size_t n, PickleKind kind) {
    check(kind != PickleKind::Dict || n % 2 == 0, "a key has no value");
    const auto values = last(n + 1);
    const PickleValue* const target = values.front();
    const bool is_right = target->is(kind) ||
                          ((kind == PickleKind::Dict || inert_) && target->is(PickleKind::Object));
    add_items(container(target, is_right, pickle_kind_name(kind)), values.subspan(1));
    drop(n);
  }

  void push_integer(std::int64_t integer) {
    if (integer >= 0 && integer < 256) {
      return push(&constants().integers[static_cast<std::size_t>(integer)]);
    }
    PickleValue* const value = make(PickleKind::Int);
    value->integer = integer;
    push(value);
  }
  void push_long(std::size_t bytes) {
    if (inert_ && bytes > sizeof(std::int64_t)) return push_text(PickleKind::Bytes, bytes);
    check(bytes <= sizeof(std::int64_t), "an integer of {} bytes; at most 8 are accepted", bytes);
    const std::string_view digits = take_bytes(bytes);
    // Sign-extends negative numbers.
    std::int64_t value = bytes > 0 && (digits.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, digits.data(), bytes);
    push_integer(value);
  }
  void push_text(PickleKind kind, std::uint64_t bytes) {
    const std::string_view text = take_bytes(bytes);
    PickleValue* const value = make(kind);
    value->data = text.data();
    value->size = text.size();
    push(value);
  }

  void put(std::uint64_t index) {
    // Storing a memo entry takes an opcode, so that consecutive indices stay below the text's size.
    check(index < text_.size(), "memo index {} in a pickle of {} bytes", index, text_.size());
    if (index >= memo_.size()) memo_.resize(index + 1);
    if (memo_[index] == nullptr) ++memo_count_;
    memo_[index] = top();
  }
  void get(std::uint64_t index) {
    check(index < memo_.size() && memo_[index] != nullptr, "memo {} is empty", index);
    push(memo_[index]);
  }

  void push_global(std::string_view module, std::string_view name) {
    check(module.size() <= kMaxName && name.size() <= kMaxName, "names a global in {} bytes",
          module.size() + name.size());
    const auto found = std::ranges::find(known_, PickleGlobal{module, name});
    require<Unsupported>(found != known_.end() || inert_,
                         "{}: pickle, byte {}: refused {}.{}, which is not needed to read tensors; "
                         "nothing was executed",
                         source_, opcode_, module, name);
    PickleValue* const value = make(PickleKind::Global);
    if (found != known_.end()) {
      value->global = &*found;
    } else {
      auto* const unknown = make<PickleGlobal>();
      *unknown = {module, name};
      value->global = unknown;
    }
    push(value);
  }
  void push_stack_global() {
    const PickleValue* const name = pop();
    const PickleValue* const module = pop();
    check(module->is(PickleKind::Str) && name->is(PickleKind::Str),
          "names a global by {} and {}, expected strings", pickle_kind_name(module->kind),
          pickle_kind_name(name->kind));
    push_global(module->text(), name->text());
  }
  void push_object() {
    const PickleValue* const args = pop();
    const PickleValue* const callee = pop();
    check(callee->is(PickleKind::Global) || inert_, "calls {}, expected a class",
          pickle_kind_name(callee->kind));
    check(args->is(PickleKind::Tuple), "calls with {}, expected a tuple",
          pickle_kind_name(args->kind));
    PickleValue* const value = make(PickleKind::Object);
    static constexpr PickleGlobal kComputed{};
    value->global = callee->is(PickleKind::Global) ? callee->global : &kComputed;
    value->args = args;
    nest(value, args);
    push(value);
  }
  void build() {
    const PickleValue* const state = pop();
    PickleValue* const target = container(top(), top()->is(PickleKind::Object), "an object");
    check(target->state == nullptr, "sets an object's state twice");
    target->state = state;
    nest(target, state);
  }
  void push_persistent_id() {
    PickleValue* const value = make(PickleKind::PersistentId);
    value->args = pop();
    nest(value, value->args);
    push(value);
  }

  void step(std::uint8_t opcode) {
    switch (opcode) {
      case kMark:
        check(marks_.size() < kMaxStack, "more than {} marks", kMaxStack);
        return marks_.push_back(stack_.size());
      case kPop:
        if (stack_.size() == floor() && !marks_.empty()) return marks_.pop_back();
        return static_cast<void>(pop());
      case kPopMark:
        return drop(pop_mark());
      case kBinInt:
        return push_integer(take<std::int32_t>());
      case kBinInt1:
        return push_integer(take<std::uint8_t>());
      case kBinInt2:
        return push_integer(take<std::uint16_t>());
      case kLong1:
        return push_long(take<std::uint8_t>());
      case kNone:
        return push(&constants().none);
      case kTrue:
        return push(&constants().yes);
      case kFalse:
        return push(&constants().no);
      case kBinFloat:
        take_bytes(8);
        return push(make(PickleKind::Float));
      case kBinUnicode:
        return push_text(PickleKind::Str, take<std::uint32_t>());
      case kShortBinUnicode:
        return push_text(PickleKind::Str, take<std::uint8_t>());
      case kBinUnicode8:
        return push_text(PickleKind::Str, take<std::uint64_t>());
      case kBinBytes:
        return push_text(PickleKind::Bytes, take<std::uint32_t>());
      case kShortBinBytes:
        return push_text(PickleKind::Bytes, take<std::uint8_t>());
      case kBinBytes8:
        return push_text(PickleKind::Bytes, take<std::uint64_t>());
      case kEmptyTuple:
        return push(&constants().empty_tuple);
      case kTuple:
        return push_sequence(PickleKind::Tuple, pop_mark());
      case kTuple1:
      case kTuple2:
      case kTuple3:
        return push_sequence(PickleKind::Tuple, std::size_t{1} + opcode - kTuple1);
      case kEmptyList:
        return push_sequence(PickleKind::List, 0);
      case kAppend:
        return append(1, PickleKind::List);
      case kAppends:
        return append(pop_mark(), PickleKind::List);
      case kEmptyDict:
        return push_sequence(PickleKind::Dict, 0);
      case kSetItem:
        return append(2, PickleKind::Dict);
      case kSetItems:
        return append(pop_mark(), PickleKind::Dict);
      case kEmptySet:
        return push_sequence(PickleKind::Set, 0);
      case kAddItems:
        return append(pop_mark(), PickleKind::Set);
      case kFrozenSet:
        return push_sequence(PickleKind::Set, pop_mark());
      case kGet:
        return get(take<std::uint8_t>());
      case kLongGet:
        return get(take<std::uint32_t>());
      case kPut:
        return put(take<std::uint8_t>());
      case kLongPut:
        return put(take<std::uint32_t>());
      case kMemoize:
        return put(memo_count_);
      case kGlobal: {
        const std::string_view module = take_line();
        return push_global(module, take_line());
      }
      case kStackGlobal:
        return push_stack_global();
      case kReduce:
      case kNewObject:
        return push_object();
      case kBuild:
        return build();
      case kPersistentId:
        return push_persistent_id();
      case kFrame: {  // only a hint for buffered readers
        const auto bytes = take<std::uint64_t>();
        return check(bytes <= text_.size() - position_,
                     "a frame of {} bytes, but {} follow: it was truncated", bytes,
                     text_.size() - position_);
      }
      default:
        break;
    }
    for (const auto& [refused, name] : kRefused) {
      require<Unsupported>(
          opcode != refused,
          "{}: pickle, byte {}: refused opcode {}, which is not needed to read tensors", source_,
          opcode_, name);
    }
    check(false, "0x{:02x} is not an opcode", opcode);
  }

  std::string_view text_;
  std::pmr::monotonic_buffer_resource& memory_;
  std::span<const PickleGlobal> known_;
  const std::string& source_;
  const std::int64_t max_memory_;
  const bool inert_;
  std::uint64_t position_ = 0;
  std::uint64_t opcode_ = 0;  // position of the current opcode
  std::int64_t allocated_ = 0;
  std::vector<const PickleValue*> stack_;
  std::vector<std::size_t> marks_;  // sizes of stack_ at the MARK opcodes
  std::vector<const PickleValue*> memo_;
  std::uint64_t memo_count_ = 0;  // entries that are set
};

Pickle::Pickle(std::string text, std::span<const PickleGlobal> known, const std::string& source,
               std::int64_t max_memory, UnknownGlobals unknown)
    : text_(std::make_unique<std::string>(std::move(text))),
      memory_(std::make_unique<std::pmr::monotonic_buffer_resource>()) {
  root_ = PickleMachine(*this, known, source, max_memory, unknown).run();
}

}  // namespace tessera::io
