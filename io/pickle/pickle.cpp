// Source of the format: CPython's Lib/pickletools.py.

#include "io/pickle/pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <new>
#include <vector>

#include "core/base/error.h"
#include "io/pickle/pickle_input.h"
#include "io/pickle/pickle_memo.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "pickles are little-endian");

constexpr int kMinProtocol = 2, kMaxProtocol = 5;
constexpr std::size_t kMaxName = 1000;          // bytes of a global's module or name
constexpr std::size_t kMaxLine = 4 * kMaxName;  // bytes read in search of the end of a name
constexpr int kMaxDepth = 64;                   // nesting of containers
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

/// Layout of an opcode's argument.
struct Form {
  bool is_known = false;
  std::uint8_t width = 0;  // bytes of the argument, an unsigned integer
  bool has_bytes = false;  // as many as the argument says
  std::uint8_t lines = 0;
};

constexpr std::array<Form, 256> make_forms() {
  std::array<Form, 256> forms{};
  for (const std::uint8_t opcode :
       {kMark,       kStop,        kPop,     kPopMark,   kNone,     kTrue,        kFalse,
        kEmptyTuple, kTuple,       kTuple1,  kTuple2,    kTuple3,   kEmptyList,   kAppend,
        kAppends,    kEmptyDict,   kSetItem, kSetItems,  kEmptySet, kAddItems,    kFrozenSet,
        kMemoize,    kStackGlobal, kReduce,  kNewObject, kBuild,    kPersistentId})
    forms[opcode] = {true, 0, false, 0};
  for (const std::uint8_t opcode : {kBinInt1, kGet, kPut}) forms[opcode] = {true, 1, false, 0};
  forms[kBinInt2] = {true, 2, false, 0};
  for (const std::uint8_t opcode : {kBinInt, kLongGet, kLongPut})
    forms[opcode] = {true, 4, false, 0};
  for (const std::uint8_t opcode : {kBinFloat, kFrame}) forms[opcode] = {true, 8, false, 0};
  for (const std::uint8_t opcode : {kLong1, kShortBinUnicode, kShortBinBytes})
    forms[opcode] = {true, 1, true, 0};
  for (const std::uint8_t opcode : {kBinUnicode, kBinBytes}) forms[opcode] = {true, 4, true, 0};
  for (const std::uint8_t opcode : {kBinUnicode8, kBinBytes8}) forms[opcode] = {true, 8, true, 0};
  forms[kGlobal] = {true, 0, false, 2};
  return forms;
}
constexpr std::array<Form, 256> kForms = make_forms();

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

/// Whether values of this kind refer to no others.
bool is_leaf(PickleKind kind) {
  return kind == PickleKind::Int || kind == PickleKind::Float || kind == PickleKind::Str ||
         kind == PickleKind::Bytes || kind == PickleKind::Global || kind == PickleKind::Folded;
}

/// Bytes of a leaf's data.
std::size_t payload_bytes(const PickleValue& value) {
  return value.is(PickleKind::Folded) ? value.size * sizeof(std::int64_t) : value.size;
}

}  // namespace

std::string_view pickle_kind_name(PickleKind kind) {
  constexpr std::string_view kNames[] = {
      "None",   "a bool", "an integer", "a float", "a string",  "bytes",           "a tuple",
      "a list", "a set",  "a dict",     "a class", "an object", "a persistent id", "an object"};
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
  PickleMachine(Pickle& pickle, const ByteRange& bytes, std::span<const PickleGlobal> known,
                const std::string& source, std::int64_t max_memory, UnknownGlobals unknown,
                PickleFolder* folder)
      : input_(bytes),
        values_(pickle.values_),
        kept_(pickle.kept_),
        known_(known),
        source_(source),
        max_memory_(max_memory),
        inert_(unknown == UnknownGlobals::Inert),
        folder_(folder) {}

  const PickleValue* run() {
    find_wanted();
    input_.seek(0);
    check(input_.left() > 0 && take<std::uint8_t>() == kProtocol,
          "not a pickle of protocol 2 or newer: it does not begin with PROTO");
    const int protocol = take<std::uint8_t>();
    check(protocol >= kMinProtocol && protocol <= kMaxProtocol,
          "is a pickle of protocol {}; 2 to 5 are known", protocol);
    for (;;) {
      opcode_ = input_.position();
      const auto opcode = take<std::uint8_t>();
      if (opcode == kStop) break;
      step(opcode, take_argument(kForms[opcode]));
    }
    check(stack_.size() == 1 && marks_.empty(),
          "STOP leaves {} values and {} marks, expected one value", stack_.size(), marks_.size());
    check(input_.left() == 0, "{} bytes follow STOP", input_.left());
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

  /// Finds the indices of the memo that are fetched. Errors are left to the second pass.
  void find_wanted() {
    try {
      input_.skip(std::min<std::uint64_t>(input_.left(), 2));  // PROTO
      while (input_.left() > 0) {
        const auto opcode = take<std::uint8_t>();
        const Form& form = kForms[opcode];
        if (!form.is_known || opcode == kStop) break;
        const std::uint64_t argument = take_argument(form);
        if (form.has_bytes) {
          need(argument);
          input_.skip(argument);
        }
        for (int i = 0; i < form.lines; ++i) take_line();
        if ((opcode == kGet || opcode == kLongGet) && argument < input_.size())
          memo_.want(argument);
      }
    } catch (const CorruptCheckpoint&) {
    }
    memo_.finish_wanting();
  }

  void need(std::uint64_t n) const {
    check(n <= input_.left(), "needs {} bytes, but {} follow: it was truncated", n, input_.left());
  }
  void take_bytes(void* out, std::size_t n) {
    need(n);
    input_.read(out, n);
  }
  template <typename T>
  T take() {
    T value{};
    take_bytes(&value, sizeof(T));
    return value;
  }
  std::uint64_t take_argument(const Form& form) {
    std::uint64_t argument = 0;
    take_bytes(&argument, form.width);
    return argument;
  }
  std::string take_line() {
    std::string line;
    for (;;) {
      check(input_.left() > 0 && line.size() < kMaxLine, "a name has no end: it was truncated");
      const char next = take<char>();
      if (next == '\n') return line;
      line += next;
    }
  }

  void* allocate(PickleArena& arena, std::size_t bytes) {
    const auto limit = static_cast<std::size_t>(max_memory_);
    const std::size_t used = values_.bytes() + kept_.bytes();
    check(bytes <= limit && used <= limit - bytes, "its values take more than {} bytes",
          max_memory_);
    return arena.allocate(bytes);
  }
  PickleValue* make(PickleKind kind) {
    auto* const value = new (allocate(values_, sizeof(PickleValue))) PickleValue;
    value->kind = kind;
    return value;
  }
  std::string_view keep_text(std::string_view text) {
    if (text.empty()) return {};
    void* const copy = allocate(kept_, text.size());
    std::memcpy(copy, text.data(), text.size());
    return {static_cast<const char*>(copy), text.size()};
  }

  void push(const PickleValue* value) {
    check(stack_.size() < kMaxStack, "more than {} values on the stack", kMaxStack);
    stack_.push_back(value);
    ends_.push_back(values_.mark());
  }
  // Start of the accessible part of the stack: values below the innermost mark are not accessible.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  const PickleValue* top() const {
    check(stack_.size() > floor(), "pops a value from an empty stack");
    return stack_.back();
  }
  const PickleValue* pop() {
    const PickleValue* const value = top();
    drop(1);
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
  void drop(std::size_t n) {
    stack_.resize(stack_.size() - n);
    ends_.resize(ends_.size() - n);
  }

  // Memory is freed if a folder makes values superfluous. Values that the memo does not hold are
  // reachable from one place only: the stack, or a value below on it. Hence everything that was
  // allocated after the value on top of the stack is unreachable, except what the memo reaches:
  // that is pinned.
  void free_above_top() {
    const PickleArena::Mark end = ends_.empty() ? PickleArena::Mark{} : ends_.back();
    if (folder_ != nullptr && end >= pinned_) values_.rewind(end);
  }
  void changed(const PickleValue* target) {
    if (target->is_pinned) pinned_ = values_.mark();
    // A target from the memo may have been allocated anywhere; its slot then ends here, too.
    ends_.back() = values_.mark();
  }
  bool is_dropped(const PickleGlobal* global) const {
    return folder_ != nullptr &&
           (global < known_.data() || global >= known_.data() + known_.size());
  }

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
      void* const data = allocate(values_, capacity * sizeof(PickleValue*));
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
    auto* const to = container(target, is_right, pickle_kind_name(kind));
    auto added = values.subspan(1);
    if (kind == PickleKind::Dict && folder_ != nullptr) added = added.first(take_entries(added));
    if (target->is(PickleKind::Object) && is_dropped(target->global)) added = {};
    if (!added.empty()) add_items(to, added);
    drop(n);
    if (added.empty())
      free_above_top();
    else
      changed(to);
  }
  /// Gives entries of a dict to the folder. @return size of the rest, which comes first
  std::size_t take_entries(std::span<const PickleValue*> entries) {
    std::size_t rest = 0;
    for (std::size_t i = 0; i + 1 < entries.size(); i += 2) {
      const PickleValue *key = entries[i], *value = entries[i + 1];
      if (key->is(PickleKind::Folded) && value->is(PickleKind::Folded) &&
          folder_->take(*key, *value))
        continue;
      entries[rest++] = key;
      entries[rest++] = value;
    }
    return rest;
  }

  void push_integer(std::int64_t integer) {
    if (integer >= 0 && integer < 256) {
      return push(&constants().integers[static_cast<std::size_t>(integer)]);
    }
    PickleValue* const value = make(PickleKind::Int);
    value->integer = integer;
    push(value);
  }
  // @param argument  big-endian
  void push_real(std::uint64_t argument) {
    PickleValue* const value = make(PickleKind::Float);
    value->real = std::bit_cast<double>(__builtin_bswap64(argument));
    push(value);
  }
  void push_long(std::uint64_t bytes) {
    if (inert_ && bytes > sizeof(std::int64_t)) return push_text(PickleKind::Bytes, bytes);
    check(bytes <= sizeof(std::int64_t), "an integer of {} bytes; at most 8 are accepted", bytes);
    std::array<std::int8_t, sizeof(std::int64_t)> digits{};
    take_bytes(digits.data(), bytes);
    // Sign-extends negative numbers.
    std::int64_t value = bytes > 0 && digits[bytes - 1] < 0 ? -1 : 0;
    std::memcpy(&value, digits.data(), bytes);
    push_integer(value);
  }
  void push_text(PickleKind kind, std::uint64_t bytes) {
    need(bytes);
    PickleValue* const value = make(kind);
    value->size = bytes;
    void* const text = allocate(values_, bytes);
    input_.read(text, bytes);
    value->data = text;
    push(value);
  }

  void put(std::uint64_t index) {
    // Storing a memo entry takes an opcode, so that consecutive indices stay below the size.
    check(index < input_.size(), "memo index {} in a pickle of {} bytes", index, input_.size());
    top();
    if (const PickleValue** const place = memo_.put(index)) *place = pin_top();
  }
  void get(std::uint64_t index) {
    const PickleValue* const value = memo_.get(index);
    check(value != nullptr, "memo {} is empty", index);
    push(value);
  }
  /// Keeps the memory of the value on top of the stack.
  const PickleValue* pin_top() {
    const PickleValue*& top = stack_.back();
    const bool is_constant =
        top == &constants().none || top == &constants().empty_tuple || top->is(PickleKind::Bool);
    if (folder_ == nullptr || is_constant || top->is_pinned) return top;
    if (!is_leaf(top->kind)) {
      const_cast<PickleValue*>(top)->is_pinned = true;
      pinned_ = values_.mark();
      return top;
    }
    auto* const copy = new (allocate(kept_, sizeof(PickleValue))) PickleValue(*top);
    copy->is_pinned = true;
    copy->data = keep_text({static_cast<const char*>(top->data), payload_bytes(*top)}).data();
    return top = copy;
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
      const PickleGlobal unknown{keep_text(module), keep_text(name)};
      value->global = new (allocate(kept_, sizeof(PickleGlobal))) PickleGlobal(unknown);
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
    const PickleValue* args = pop();
    const PickleValue* const callee = pop();
    check(callee->is(PickleKind::Global) || inert_, "calls {}, expected a class",
          pickle_kind_name(callee->kind));
    check(args->is(PickleKind::Tuple), "calls with {}, expected a tuple",
          pickle_kind_name(args->kind));
    static constexpr PickleGlobal kComputed{};
    const PickleGlobal* const global = callee->is(PickleKind::Global) ? callee->global : &kComputed;
    if (is_dropped(global)) {
      free_above_top();
      args = &constants().empty_tuple;
    }
    PickleValue* const value = make(PickleKind::Object);
    value->global = global;
    value->args = args;
    nest(value, args);
    if (!fold(*value)) return push(value);
    free_above_top();
    PickleValue* const folded = make(PickleKind::Folded);
    set_folded(folded, global);
    push(folded);
  }
  void build() {
    const PickleValue* const state = pop();
    PickleValue* const target = container(top(), top()->is(PickleKind::Object), "an object");
    check(target->state == nullptr, "sets an object's state twice");
    if (is_dropped(target->global)) return free_above_top();
    target->state = state;
    if (fold(*target)) {
      free_above_top();
      set_folded(target, target->global);
    } else {
      nest(target, state);
    }
    changed(target);
  }
  bool fold(const PickleValue& object) {
    numbers_.clear();
    return folder_ != nullptr && folder_->fold(object, numbers_);
  }
  void set_folded(PickleValue* object, const PickleGlobal* global) {
    const bool is_pinned = object->is_pinned;
    *object = {};
    object->kind = PickleKind::Folded;
    object->is_pinned = is_pinned;
    object->global = global;
    object->size = numbers_.size();
    void* const data = allocate(values_, payload_bytes(*object));
    std::ranges::copy(numbers_, static_cast<std::int64_t*>(data));
    object->data = data;
  }
  void push_persistent_id() {
    PickleValue* const value = make(PickleKind::PersistentId);
    value->args = pop();
    nest(value, value->args);
    push(value);
  }

  void step(std::uint8_t opcode, std::uint64_t argument) {
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
        return push_integer(static_cast<std::int32_t>(argument));
      case kBinInt1:
      case kBinInt2:
        return push_integer(static_cast<std::int64_t>(argument));
      case kLong1:
        return push_long(argument);
      case kNone:
        return push(&constants().none);
      case kTrue:
        return push(&constants().yes);
      case kFalse:
        return push(&constants().no);
      case kBinFloat:
        return push_real(argument);
      case kBinUnicode:
      case kShortBinUnicode:
      case kBinUnicode8:
        return push_text(PickleKind::Str, argument);
      case kBinBytes:
      case kShortBinBytes:
      case kBinBytes8:
        return push_text(PickleKind::Bytes, argument);
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
      case kLongGet:
        return get(argument);
      case kPut:
      case kLongPut:
        return put(argument);
      case kMemoize:
        return put(memo_.count());
      case kGlobal: {
        const std::string module = take_line();
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
      case kFrame:  // only a hint for buffered readers
        return check(argument <= input_.left(),
                     "a frame of {} bytes, but {} follow: it was truncated", argument,
                     input_.left());
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

  PickleInput input_;
  PickleArena& values_;
  PickleArena& kept_;  // leaves of the memo, if there is a folder; names of unknown globals
  std::span<const PickleGlobal> known_;
  const std::string& source_;
  const std::int64_t max_memory_;
  const bool inert_;
  PickleFolder* const folder_;
  std::uint64_t opcode_ = 0;  // position of the current opcode
  std::vector<const PickleValue*> stack_;
  std::vector<PickleArena::Mark> ends_;  // for each value of stack_: end of its memory
  std::vector<std::size_t> marks_;       // sizes of stack_ at the MARK opcodes
  PickleMemo memo_;
  PickleArena::Mark pinned_;           // values before it are not freed
  std::vector<std::int64_t> numbers_;  // of the last folded object
};

Pickle::Pickle(const ByteRange& bytes, std::span<const PickleGlobal> known,
               const std::string& source, std::int64_t max_memory, UnknownGlobals unknown,
               PickleFolder* folder) {
  root_ = PickleMachine(*this, bytes, known, source, max_memory, unknown, folder).run();
}

Pickle::Pickle(std::string_view text, std::span<const PickleGlobal> known,
               const std::string& source, std::int64_t max_memory, UnknownGlobals unknown)
    : Pickle(ByteRange(text, source), known, source, max_memory, unknown) {}

}  // namespace tessera::io
