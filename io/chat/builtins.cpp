// Filters and tests of jinja2 3.1, and methods of Python's strings and dicts.
#include "io/chat/builtins.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "io/data/text.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io::chat {
namespace {

using Strings = std::vector<std::string>;

bool is_space(char32_t point) {
  return is_white_space(point) || (point >= 0x1C && point <= 0x1F);  // as Python
}

/// Text without leading and trailing characters of a set; an absent set: white space.
std::string_view strip(std::string_view text, const Value* set, bool left, bool right) {
  const bool is_set = set != nullptr && set->string() != nullptr;
  const auto strips = [&](std::size_t i) {
    const char32_t point = code_point_at(text, i);
    if (!is_set) return is_space(point);
    std::string character;
    append_utf8(point, character);
    return set->string()->find(character) != std::string::npos;
  };
  std::size_t begin = 0, end = text.size();
  while (left && begin < end && strips(begin)) begin += utf8_length(text[begin]);
  while (right && end > begin) {
    std::size_t last = end - 1;
    while (last > begin && (text[last] & 0xC0) == 0x80) --last;
    if (!strips(last)) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

/// str.split(); without a separator at white space. `most` < 0: everywhere.
Strings split(std::string_view text, const Value* separator, std::int64_t most, bool from_right) {
  Strings parts;
  if (separator == nullptr || separator->is_none()) {
    std::string_view rest = strip(text, nullptr, true, true);
    while (!rest.empty()) {
      std::size_t end = 0;
      while (end < rest.size() && !is_space(code_point_at(rest, end)))
        end += utf8_length(rest[end]);
      if (most >= 0 && std::ssize(parts) == most) end = rest.size();
      parts.emplace_back(rest.substr(0, end));
      rest = strip(rest.substr(end), nullptr, true, false);
    }
    return parts;
  }
  require(separator->string() != nullptr && !separator->string()->empty(),
          "split: the separator must be a string that is not empty");
  const std::string& by = *separator->string();
  std::string_view rest = text;
  while (most < 0 || std::ssize(parts) < most) {
    const std::size_t at = from_right ? rest.rfind(by) : rest.find(by);
    if (at == rest.npos) break;
    parts.emplace_back(from_right ? rest.substr(at + by.size()) : rest.substr(0, at));
    rest = from_right ? rest.substr(0, at) : rest.substr(at + by.size());
  }
  parts.emplace_back(rest);
  if (from_right) std::ranges::reverse(parts);
  return parts;
}

std::string replace(const std::string& text, const std::string& from, const std::string& to,
                    std::int64_t most, Budget& budget) {
  require(!from.empty(), "replace: the text to replace is empty");
  std::string out;
  std::size_t begin = 0;
  for (std::size_t at; most-- != 0 && (at = text.find(from, begin)) != text.npos;) {
    budget.spend(at - begin + to.size() + 1);
    out.append(text, begin, at - begin).append(to);
    begin = at + from.size();
  }
  return out.append(text, begin);
}

std::string capitalize(const std::string& text) {
  const std::size_t first = text.empty() ? 0 : utf8_length(text[0]);
  return uppercase_unicode(text.substr(0, first)) + lowercase_unicode(text.substr(first));
}

std::string title(const std::string& text) {
  std::string out, word;
  for (const char c : text + " ") {
    word += c;
    if (std::string_view("- \t\n\r({[<").find(c) == std::string_view::npos) continue;
    out += capitalize(word);
    word.clear();
  }
  out.pop_back();
  return out;
}

Strings lines_of(const std::string& text) {
  static const Value kNewline("\n");
  Strings lines = split(text, &kNewline, -1, false);
  if (lines.back().empty()) lines.pop_back();
  return lines;
}

std::string indent(const std::string& text, const Arguments& a, Budget& budget) {
  const Value* width = a.get(0, "width");
  std::string margin(4, ' ');
  if (width != nullptr && width->string()) margin = *width->string();
  if (width != nullptr && width->integer())
    margin = std::string(
        static_cast<std::size_t>(std::clamp<std::int64_t>(*width->integer(), 0, 999)), ' ');
  const bool first = a.flag(1, "first"), blank = a.flag(2, "blank");
  std::string out;
  const Strings lines = lines_of(text + "\n");
  for (const std::string& line : lines) {
    const bool is_first = &line == lines.data();
    budget.spend(line.size() + margin.size() + 1);
    if (!is_first) out += '\n';
    if (is_first ? first : (blank || !line.empty())) out += margin;
    out += line;
  }
  return out;
}

std::int64_t whole(const Value* value, std::int64_t otherwise) {
  if (value == nullptr || value->is_none()) return otherwise;
  require(value->integer() != nullptr, "expected an int, found {}", value->type());
  return *value->integer();
}

Value to_list(const Strings& strings, Budget& budget) {
  List list;
  for (const std::string& s : strings) budget.spend(s.size() + sizeof(Value)), list.emplace_back(s);
  return list;
}

/// "a.b.0" within a value, as map(attribute=...) and selectattr() read it.
Value path(const Value& value, const Value& name, Budget& budget) {
  if (name.string() == nullptr) return item(value, name, budget);
  static const Value kDot(".");
  Value found = value;
  for (const std::string& part : split(*name.string(), &kDot, -1, false)) {
    std::int64_t index = 0;
    const char* const end = part.data() + part.size();
    const bool is_index = !part.empty() && std::from_chars(part.data(), end, index).ptr == end;
    found = item(found, is_index ? Value(index) : Value(part), budget);
  }
  return found;
}

Value sort_key(const Value& value, bool case_sensitive) {
  return value.string() && !case_sensitive ? Value(lowercase_unicode(*value.string())) : value;
}

/// @param keys  of the elements
List sorted(const List& list, const List& keys, bool reverse, Budget& budget) {
  std::vector<std::size_t> order(list.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
    budget.spend(64);
    return compare(keys[reverse ? b : a], keys[reverse ? a : b], budget) < 0;
  });
  List out;
  for (const std::size_t i : order) out.push_back(list[i]);
  return out;
}

/// The elements for which a test holds: select, reject, selectattr, rejectattr.
Value filtered(const Value& value, const Arguments& a, bool by_attribute, bool wanted,
               Budget& budget) {
  const std::size_t first = by_attribute ? 1 : 0;
  List out;
  for (const Value& element : elements(value, budget)) {
    const Value tested = by_attribute ? path(element, a.need(0), budget) : element;
    bool holds = false;
    if (const Value* test = a.get(first)) {
      require(test->string() != nullptr, "the name of a test is a string, found {}", test->type());
      holds = apply_test(*test->string(), tested, a.after(first + 1), budget);
    } else {
      holds = truth(tested);
    }
    if (holds == wanted) out.push_back(element);
  }
  return out;
}

Value mapped(const Value& value, const Arguments& a, Budget& budget) {
  List out;
  const Value* const name = a.get(SIZE_MAX, "attribute");
  const Value* const otherwise = a.get(SIZE_MAX, "default");
  for (const Value& element : elements(value, budget)) {
    if (name == nullptr) {
      out.push_back(apply_filter(to_text(a.need(0), budget), element, a.after(1), budget));
      continue;
    }
    out.push_back(path(element, *name, budget));
    if (otherwise != nullptr && out.back().is_undefined()) out.back() = *otherwise;
  }
  return out;
}

Value items_of(const Value& value, Budget& budget) {
  List out;
  if (value.is_undefined()) return out;
  require(value.dict() != nullptr, "items: expected a dict, found {}", value.type());
  for (const auto& [key, entry] : *value.dict()) {
    budget.spend(key.size() + sizeof(Value));
    out.emplace_back(List{key, entry});
  }
  return out;
}

Value number_of(const Value& value, const Value& otherwise, bool is_float) {
  double number = 0;
  if (const std::string* text = value.string()) {
    const std::string_view digits = strip(*text, nullptr, true, true);
    const char* const last = digits.data() + digits.size();
    const auto [end, error] = std::from_chars(digits.data(), last, number);
    if (error != std::errc() || end != last || digits.empty()) return otherwise;
  } else if (!as_number(value, number)) {
    return otherwise;
  }
  if (is_float) return Value::Data(number);
  return std::abs(number) < 0x1p63 ? Value(static_cast<std::int64_t>(number)) : otherwise;
}

Value json_of(const Value& value, const Arguments& a, Budget& budget) {
  JsonStyle style{.ascii = a.flag(0, "ensure_ascii"), .sorted = a.flag(3, "sort_keys")};
  if (const Value* width = a.get(1, "indent"); width != nullptr && !width->is_none()) {
    const std::int64_t spaces = width->string() ? 0 : whole(width, 0);
    style.indent =
        width->string()
            ? *width->string()
            : std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(spaces, 0, 99)), ' ');
    style.comma = ",";
  }
  if (const Value* marks = a.get(2, "separators"); marks != nullptr && !marks->is_none()) {
    const List both = elements(*marks, budget);
    require(both.size() == 2 && both[0].string() && both[1].string(),
            "tojson: separators are two strings");
    style.comma = *both[0].string();
    style.colon = *both[1].string();
  }
  return to_json(value, style, budget);
}

bool is_method(const Value& self, const std::string& name) {
  static const Strings kOfStrings = {"strip",        "lstrip",       "rstrip",     "split",
                                     "rsplit",       "splitlines",   "startswith", "endswith",
                                     "upper",        "lower",        "title",      "capitalize",
                                     "replace",      "find",         "count",      "join",
                                     "removeprefix", "removesuffix", "isdigit"};
  static const Strings kOfDicts = {"items", "keys", "values", "get"};
  const auto has = [&](const Strings& names) {
    return std::ranges::find(names, name) != names.end();
  };
  return (self.string() && has(kOfStrings)) || (self.dict() && has(kOfDicts));
}

bool affixed(const std::string& text, const Value& affix, bool at_end) {
  if (const std::string* s = affix.string())
    return at_end ? text.ends_with(*s) : text.starts_with(*s);
  require(affix.list() != nullptr, "startswith: expected a str or a tuple, found {}", affix.type());
  return std::ranges::any_of(*affix.list(),
                             [&](const Value& v) { return affixed(text, v, at_end); });
}

Value method_of_string(const std::string& text, const std::string& name, const Arguments& a,
                       Budget& budget) {
  const auto need = [&](std::size_t i) -> const std::string& {
    require(a.need(i).string() != nullptr, "{}: expected a str, found {}", name, a.need(i).type());
    return *a.need(i).string();
  };
  budget.spend(text.size() + 1);
  if (name == "strip") return std::string(strip(text, a.get(0), true, true));
  if (name == "lstrip") return std::string(strip(text, a.get(0), true, false));
  if (name == "rstrip") return std::string(strip(text, a.get(0), false, true));
  if (name == "split" || name == "rsplit")
    return to_list(split(text, a.get(0, "sep"), whole(a.get(1, "maxsplit"), -1), name == "rsplit"),
                   budget);
  if (name == "splitlines") return to_list(lines_of(text), budget);
  if (name == "startswith" || name == "endswith")
    return affixed(text, a.need(0), name == "endswith");
  if (name == "upper") return uppercase_unicode(text);
  if (name == "lower") return lowercase_unicode(text);
  if (name == "title") return title(text);
  if (name == "capitalize") return capitalize(text);
  if (name == "replace")
    return replace(text, need(0), need(1), whole(a.get(2, "count"), -1), budget);
  if (name == "removeprefix") return text.starts_with(need(0)) ? text.substr(need(0).size()) : text;
  if (name == "removesuffix")
    return text.ends_with(need(0)) ? text.substr(0, text.size() - need(0).size()) : text;
  if (name == "find") {
    const std::size_t at = text.find(need(0));
    return at == text.npos ? std::int64_t{-1} : length(Value(text.substr(0, at)));
  }
  if (name == "count")
    return static_cast<std::int64_t>(split(text, &a.need(0), -1, false).size()) - 1;
  if (name == "isdigit")
    return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  return apply_filter("join", a.need(0), {.values = {text}}, budget);
}

using Filter = Value (*)(const Value&, const Arguments&, Budget&);

const std::unordered_map<std::string, Filter>& filters() {
  static const std::unordered_map<std::string, Filter> table = {
      {"trim",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         return std::string(strip(to_text(v, b), a.get(0, "chars"), true, true));
       }},
      {"upper",
       [](const Value& v, const Arguments&, Budget& b) -> Value {
         return uppercase_unicode(to_text(v, b));
       }},
      {"lower",
       [](const Value& v, const Arguments&, Budget& b) -> Value {
         return lowercase_unicode(to_text(v, b));
       }},
      {"title",
       [](const Value& v, const Arguments&, Budget& b) -> Value { return title(to_text(v, b)); }},
      {"capitalize",
       [](const Value& v, const Arguments&, Budget& b) -> Value {
         return capitalize(to_text(v, b));
       }},
      {"string",
       [](const Value& v, const Arguments&, Budget& b) -> Value { return to_text(v, b); }},
      {"safe", [](const Value& v, const Arguments&, Budget& b) -> Value { return to_text(v, b); }},
      {"indent",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         return indent(to_text(v, b), a, b);
       }},
      {"replace",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         return replace(to_text(v, b), to_text(a.need(0, "old"), b), to_text(a.need(1, "new"), b),
                        whole(a.get(2, "count"), -1), b);
       }},
      {"tojson", json_of},
      {"length", [](const Value& v, const Arguments&, Budget&) -> Value { return length(v); }},
      {"count", [](const Value& v, const Arguments&, Budget&) -> Value { return length(v); }},
      {"default",
       [](const Value& v, const Arguments& a, Budget&) -> Value {
         const bool absent = v.is_undefined() || (a.flag(1, "boolean") && !truth(v));
         const Value* other = a.get(0, "default_value");
         return !absent ? v : other != nullptr ? *other : Value("");
       }},
      {"join",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         const std::string separator = a.text(0, "d", "");
         const Value* name = a.get(1, "attribute");
         std::string out;
         bool is_first = true;
         for (const Value& e : elements(v, b)) {
           if (!std::exchange(is_first, false)) b.spend(separator.size()), out += separator;
           out += to_text(name == nullptr ? e : path(e, *name, b), b);
         }
         return out;
       }},
      {"list", [](const Value& v, const Arguments&, Budget& b) -> Value { return elements(v, b); }},
      {"first",
       [](const Value& v, const Arguments&, Budget& b) -> Value {
         const List list = elements(v, b);
         return list.empty() ? Value() : list.front();
       }},
      {"last",
       [](const Value& v, const Arguments&, Budget& b) -> Value {
         const List list = elements(v, b);
         return list.empty() ? Value() : list.back();
       }},
      {"reverse",
       [](const Value& v, const Arguments&, Budget& b) -> Value {
         List list = elements(v, b);
         std::ranges::reverse(list);
         return v.string() ? apply_filter("join", list, {}, b) : Value(list);
       }},
      {"select", [](const Value& v, const Arguments& a,
                    Budget& b) { return filtered(v, a, false, true, b); }},
      {"reject", [](const Value& v, const Arguments& a,
                    Budget& b) { return filtered(v, a, false, false, b); }},
      {"selectattr",
       [](const Value& v, const Arguments& a, Budget& b) { return filtered(v, a, true, true, b); }},
      {"rejectattr", [](const Value& v, const Arguments& a,
                        Budget& b) { return filtered(v, a, true, false, b); }},
      {"map", mapped},
      {"items", [](const Value& v, const Arguments&, Budget& b) { return items_of(v, b); }},
      {"dictsort",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         const List items = *items_of(v, b).list();
         const bool by_value = a.text(1, "by", "key") == "value";
         List keys;
         for (const Value& pair : items)
           keys.push_back(sort_key((*pair.list())[by_value ? 1 : 0], a.flag(0, "case_sensitive")));
         return sorted(items, keys, a.flag(2, "reverse"), b);
       }},
      {"sort",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         const List list = elements(v, b);
         const Value* name = a.get(2, "attribute");
         List keys;
         for (const Value& e : list)
           keys.push_back(
               sort_key(name == nullptr ? e : path(e, *name, b), a.flag(1, "case_sensitive")));
         return sorted(list, keys, a.flag(0, "reverse"), b);
       }},
      {"unique",
       [](const Value& v, const Arguments& a, Budget& b) -> Value {
         List out, keys;
         for (const Value& e : elements(v, b)) {
           const Value key = sort_key(e, a.flag(0, "case_sensitive"));
           if (std::ranges::any_of(keys, [&](const Value& k) { return equal(k, key, b); }))
             continue;
           keys.push_back(key);
           out.push_back(e);
         }
         return out;
       }},
      {"int",
       [](const Value& v, const Arguments& a, Budget&) -> Value {
         return number_of(v, a.get(0) ? a.need(0) : Value(std::int64_t{0}), false);
       }},
      {"float",
       [](const Value& v, const Arguments& a, Budget&) -> Value {
         return number_of(v, a.get(0) ? a.need(0) : Value(Value::Data(0.0)), true);
       }},
      {"abs",
       [](const Value& v, const Arguments&, Budget&) -> Value {
         double number = 0;
         require(as_number(v, number), "abs: expected a number, found {}", v.type());
         if (v.integer())
           return *v.integer() < 0 ? -std::max(*v.integer(), -INT64_MAX) : *v.integer();
         return Value::Data(std::abs(number));
       }},
  };
  return table;
}

}  // namespace

const Value* Arguments::get(std::size_t index, std::string_view name) const {
  if (index < values.size()) return &values[index];
  for (const auto& [key, value] : named)
    if (key == name) return &value;
  return nullptr;
}

const Value& Arguments::need(std::size_t index, std::string_view name) const {
  const Value* const value = get(index, name);
  require(value != nullptr, "argument {} is missing", index + 1);
  return *value;
}

bool Arguments::flag(std::size_t index, std::string_view name, bool otherwise) const {
  const Value* const value = get(index, name);
  return value == nullptr ? otherwise : truth(*value);
}

std::string Arguments::text(std::size_t index, std::string_view name,
                            std::string_view otherwise) const {
  const Value* const value = get(index, name);
  if (value == nullptr) return std::string(otherwise);
  require(value->string() != nullptr, "expected a str, found {}", value->type());
  return *value->string();
}

Arguments Arguments::after(std::size_t n) const {
  Arguments rest;
  if (n < values.size())
    rest.values.assign(values.begin() + static_cast<std::ptrdiff_t>(n), values.end());
  rest.named = named;
  return rest;
}

Value attribute(const Value& value, const std::string& name) {
  if (const auto* undefined = std::get_if<Undefined>(&value.data))
    throw InvalidArgument("'{}' is undefined, so it has no '{}'", undefined->name, name);
  if (is_method(value, name))
    return Value::Data(Callable{name, nullptr, std::make_shared<Value>(value)});
  const auto* space = std::get_if<Namespace>(&value.data);
  const Dict* const dict = space != nullptr ? space->items : value.dict();
  const Value* const found = dict == nullptr ? nullptr : find(*dict, name);
  return found != nullptr ? *found : Value::Data(Undefined{name});
}

Value item(const Value& value, const Value& key, Budget& budget) {
  if (const std::int64_t* index = key.integer();
      index != nullptr && (value.list() || value.string())) {
    const std::int64_t size = length(value);
    const std::int64_t at = *index < 0 ? *index + size : *index;
    if (at < 0 || at >= size) return Value::Data(Undefined{fmt::format("element {}", *index)});
    if (value.list()) return (*value.list())[static_cast<std::size_t>(at)];
    return elements(value, budget)[static_cast<std::size_t>(at)];
  }
  const std::string name = to_text(key, budget);
  if (value.dict() && key.string())
    if (const Value* found = find(*value.dict(), name)) return *found;
  return key.string() || value.is_undefined() ? attribute(value, name)
                                              : Value(Value::Data(Undefined{name}));
}

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments,
                   Budget& budget) {
  budget.spend(1);
  const auto found = filters().find(name == "d" ? "default" : name);
  require<Unsupported>(found != filters().end(), "this build has no template filter '{}'", name);
  return found->second(value, arguments, budget);
}

bool apply_test(const std::string& name, const Value& value, const Arguments& a, Budget& budget) {
  budget.spend(1);
  const std::int64_t* const i = value.integer();
  const bool is_float = std::holds_alternative<double>(value.data);
  const bool is_bool = std::holds_alternative<bool>(value.data);
  const bool is_wide = std::holds_alternative<std::uint64_t>(value.data);
  if (name == "defined") return !value.is_undefined();
  if (name == "undefined") return value.is_undefined();
  if (name == "none") return value.is_none();
  if (name == "string") return value.string() != nullptr;
  if (name == "mapping") return value.dict() != nullptr;
  if (name == "sequence" || name == "iterable")
    return value.string() || value.list() || value.dict() || value.is_undefined();
  if (name == "boolean") return is_bool;
  if (name == "true") return is_bool && truth(value);
  if (name == "false") return is_bool && !truth(value);
  if (name == "integer") return i != nullptr || is_wide;
  if (name == "float") return is_float;
  if (name == "number") return i != nullptr || is_wide || is_float || is_bool;
  if (name == "callable") return std::holds_alternative<Callable>(value.data);
  if (name == "in") return contains(a.need(0), value, budget);
  if (name == "eq" || name == "equalto" || name == "==" || name == "sameas")
    return equal(value, a.need(0), budget);
  if (name == "ne" || name == "!=") return !equal(value, a.need(0), budget);
  if (name == "lt" || name == "lessthan" || name == "<")
    return compare(value, a.need(0), budget) < 0;
  if (name == "le" || name == "<=") return compare(value, a.need(0), budget) <= 0;
  if (name == "gt" || name == "greaterthan" || name == ">")
    return compare(value, a.need(0), budget) > 0;
  if (name == "ge" || name == ">=") return compare(value, a.need(0), budget) >= 0;
  if (name == "upper" || name == "lower") {
    const std::string text = to_text(value, budget);
    return text == (name == "upper" ? uppercase_unicode(text) : lowercase_unicode(text)) &&
           uppercase_unicode(text) != lowercase_unicode(text);
  }
  const bool divides = name == "divisibleby";
  require<Unsupported>(divides || name == "even" || name == "odd",
                       "this build has no template test '{}'", name);
  const std::int64_t by = divides ? whole(&a.need(0), 0) : 2;
  require(i != nullptr && by > 0, "'{}' is for whole numbers", name);
  return (*i % by == 0) != (name == "odd");
}

Value call_method(const Value& self, const std::string& name, const Arguments& a, Budget& budget) {
  if (self.string()) return method_of_string(*self.string(), name, a, budget);
  if (name == "items") return items_of(self, budget);
  if (name == "keys") return elements(self, budget);
  if (name == "values") {
    List out;
    for (const auto& entry : *self.dict()) budget.spend(sizeof(Value)), out.push_back(entry.second);
    return out;
  }
  const Value* const found = a.need(0).string() ? find(*self.dict(), *a.need(0).string()) : nullptr;
  const Value* const other = a.get(1, "default");
  return found != nullptr ? *found : other != nullptr ? *other : Value(Value::Data(None{}));
}

bool contains(const Value& container, const Value& value, Budget& budget) {
  if (const std::string* text = container.string()) {
    require(value.string() != nullptr, "'in <string>' needs a str, found {}", value.type());
    budget.spend(text->size());
    return text->find(*value.string()) != text->npos;
  }
  if (const Dict* dict = container.dict())
    return budget.spend(dict->size()), value.string() && find(*dict, *value.string()) != nullptr;
  if (container.is_undefined()) return false;
  require(container.list() != nullptr, "{} is not iterable", container.type());
  return std::ranges::any_of(*container.list(),
                             [&](const Value& e) { return equal(e, value, budget); });
}

}  // namespace tessera::io::chat
