#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "core/base/shape.h"
#include "io/pickle/pickle.h"

namespace tessera::io {

inline constexpr PickleGlobal kTorchSize{"torch", "Size"};

/// Limit on the values that readers of one pickle return, in proportion to its size: a small pickle
/// can repeat a large value.
class PickleBudget {
 public:
  /// @param source  named in errors
  PickleBudget(std::int64_t pickle_bytes, std::string source)
      : pickle_bytes_(pickle_bytes),
        left_(kBase + kPerByte * pickle_bytes),
        source_(std::move(source)) {}

  void spend(std::size_t bytes) {
    left_ -= static_cast<std::int64_t>(bytes);
    require<CorruptCheckpoint>(left_ >= 0,
                               "{}: more values than a pickle of {} bytes holds unless it repeats "
                               "them",
                               source_, pickle_bytes_);
  }

 private:
  // Writers store a string once, and refer to it at most a few times.
  static constexpr std::int64_t kPerByte = 8, kBase = 4096;
  const std::int64_t pickle_bytes_;
  std::int64_t left_;
  const std::string source_;
};

/// Typed access to a value of a pickle. Errors are CorruptCheckpoint and name the path to the value.
class PickleReader {
 public:
  /// @param budget  limit for this reader and all that it returns; null: none
  PickleReader(const PickleValue& value, std::string where, PickleBudget* budget = nullptr)
      : value_(&value), where_(std::move(where)), budget_(budget) {}

  const PickleValue& value() const { return *value_; }
  const std::string& where() const { return where_; }

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) const {
    throw CorruptCheckpoint("{}: {}", where_, fmt::format(text, std::forward<Args>(args)...));
  }
  const PickleValue& expect(PickleKind kind) const {
    if (!value_->is(kind)) {
      fail("expected {}, found {}{}", pickle_kind_name(kind), pickle_kind_name(value_->kind),
           class_name());
    }
    return *value_;
  }
  std::string_view text() const {
    const std::string_view text = expect(PickleKind::Str).text();
    spend(kText + text.size());
    return text;
  }
  std::int64_t integer(std::int64_t low = 0) const {
    const std::int64_t number = expect(PickleKind::Int).integer;
    if (number < low) fail("found {}, expected {} or more", number, low);
    return number;
  }
  /// Reader of a value inside this one. @param where  path to it, for errors
  PickleReader child(const PickleValue& value, std::string where) const {
    spend(value.is(PickleKind::Object) ? kObject : kOther);
    return {value, std::move(where), budget_};
  }
  bool is_none() const { return value_->is(PickleKind::None); }

  /// Whether this is an object of a class with this name, in any module.
  bool is_object(std::string_view name) const {
    return value_->is(PickleKind::Object) && value_->global->name == name;
  }
  void expect_object(std::string_view name) const {
    if (is_object(name)) return;
    fail("expected an object of {}, found {}{}", name, pickle_kind_name(value_->kind),
         class_name());
  }
  /// A field of an object's state, or of a state itself: a dict, or two for fields and slots.
  PickleReader at(std::string_view field) const {
    const PickleReader found = find(field);
    if (found.value_ == nullptr) fail("the field \"{}\" is missing", field);
    return found;
  }
  /// A field of the object's state; None if absent.
  PickleReader get(std::string_view field) const {
    static const PickleValue kNone{};
    PickleReader found = find(field);
    if (found.value_ == nullptr) found.value_ = &kNone;
    return found;
  }

  /// Elements of a tuple or list.
  std::span<const PickleValue* const> elements() const {
    if (!value_->is(PickleKind::List)) expect(PickleKind::Tuple);
    return value_->items();
  }
  PickleReader element(std::size_t i) const {
    if (i >= elements().size()) fail("holds {} values, expected more", elements().size());
    return child(*elements()[i], where_);
  }
  /// An argument of the call that made the object.
  PickleReader argument(std::size_t i) const {
    return child(*expect(PickleKind::Object).args, where_).element(i);
  }

  /// A torch.Size, also folded to its sizes, tuple or list.
  Shape shape() const {
    if (value_->is_folded(kTorchSize.name)) return {value_->numbers().data(), value_->size};
    if (value_->is_object(kTorchSize)) {
      if (value_->args->items().size() != 1)
        fail("torch.Size of {} values", value_->args->items().size());
      return argument(0).dims();
    }
    return dims();
  }

  /// Calls f(key, value) for the entries of a dict.
  template <typename F>
  void for_each(F&& f) const {
    if (!value_->is_object(kOrderedDict)) expect(PickleKind::Dict);
    for (std::size_t i = 0; i + 1 < value_->items().size(); i += 2) {
      f(*value_->items()[i], *value_->items()[i + 1]);
    }
  }
  /// Calls f(name, reader) for the entries of a dict with strings as keys; never for None.
  template <typename F>
  void for_each_entry(F&& f) const {
    if (is_none()) return;
    for_each([&](const PickleValue& key, const PickleValue& value) {
      const std::string_view name = child(key, "a key of " + where_).text();
      f(name, child(value, fmt::format("{}: {}", where_, name)));
    });
  }
  /// Calls f(reader) for the elements of a list or tuple; never for None.
  template <typename F>
  void for_each_element(F&& f) const {
    if (is_none()) return;
    std::size_t i = 0;
    for (const PickleValue* element : elements())
      f(child(*element, fmt::format("{}[{}]", where_, i++)));
  }

 private:
  // Maximum number of an object's fields. Limits the linear search, because many objects may share
  // one large state. A budget replaces it.
  static constexpr std::size_t kMaxFields = 64;
  // Bytes that callers are expected to keep.
  static constexpr std::size_t kText = 32, kObject = 64, kOther = 8;

  PickleReader() = default;
  std::string class_name() const {
    if (!value_->is(PickleKind::Object) && !value_->is(PickleKind::Folded)) return "";
    return fmt::format(" of {}.{}", value_->global->module, value_->global->name);
  }
  void spend(std::size_t bytes) const {
    if (budget_ != nullptr) budget_->spend(bytes);
  }
  PickleReader find(std::string_view field) const {
    PickleReader found;
    found.where_ = fmt::format("{}: {}", where_, field);
    found.budget_ = budget_;
    const PickleValue* const state = value_->is(PickleKind::Object) ? value_->state : value_;
    if (state == nullptr) return found;
    const auto search = [&](const PickleValue& fields) {
      const std::size_t entries = fields.items().size() / 2;
      spend(entries);
      if (budget_ == nullptr && entries > kMaxFields)
        fail("{} fields; at most {} are accepted", entries, kMaxFields);
      if (found.value_ == nullptr) found.value_ = fields.find(field);
    };
    if (state->is(PickleKind::Dict)) search(*state);
    if (state->is(PickleKind::Tuple) && state->items().size() == 2) {  // (fields, slots)
      for (const PickleValue* part : state->items())
        if (part->is(PickleKind::Dict)) search(*part);
    }
    return found;
  }
  Shape dims() const {
    require<Unsupported>(elements().size() <= Shape::kMaxDims,
                         "{}: {} dims; tessera reads at most {}", where_, elements().size(),
                         int{Shape::kMaxDims});
    Shape shape;
    for (const PickleValue* size : elements()) shape.push_back(child(*size, where_).integer());
    return shape;
  }
  const PickleValue* value_ = nullptr;
  std::string where_;
  PickleBudget* budget_ = nullptr;
};

}  // namespace tessera::io
