#include "io/chat/value.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/data/text.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io::chat {
namespace {

constexpr int kMostLevels = 200;  // of values within values

std::string number_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", number);
  if (text.find_first_of(".e") == text.npos) text += ".0";
  return text;
}

/// repr() of a string: single quotes unless it has some and no double ones.
std::string quoted(const std::string& text) {
  const bool has_single = text.find('\'') != text.npos, has_double = text.find('"') != text.npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      if (c == quote || c == '\\') out += '\\';
      out += c;
    }
  }
  return out += quote;
}

std::string json_string(const std::string& text, bool ascii) {
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size(); i += utf8_length(text[i])) {
    const char32_t point = code_point_at(text, i);
    constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kLetters = "\"\\nrtbf";
    const std::size_t escape =
        point < 0x80 ? kEscaped.find(static_cast<char>(point)) : kEscaped.npos;
    if (escape != kEscaped.npos) {
      out += '\\';
      out += kLetters[escape];
    } else if (point < 0x20 || (ascii && point > 0x7E && point < 0x10000)) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(point));
    } else if (ascii && point >= 0x10000) {
      const auto rest = static_cast<unsigned>(point) - 0x10000;
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF));
    } else {
      out += text.substr(i, utf8_length(text[i]));
    }
  }
  return out += '"';
}

class Writer {
 public:
  explicit Writer(Budget& budget) : budget_(budget) {}

  /// As Python shows a value within another one.
  void repr(const Value& value, int level = 0) {
    check_level(level);
    if (const std::string* text = value.string()) return put(quoted(*text));
    if (const List* list = value.list()) {
      put("[");
      for (const Value& element : *list) {
        if (&element != list->data()) put(", ");
        repr(element, level + 1);
      }
      return put("]");
    }
    if (const Dict* dict = value.dict()) {
      put("{");
      for (const auto& item : *dict) {
        if (&item != dict->data()) put(", ");
        put(quoted(item.first) + ": ");
        repr(item.second, level + 1);
      }
      return put("}");
    }
    put(scalar(value));
  }

  void json(const Value& value, const JsonStyle& style, int level = 0) {
    check_level(level);
    const auto open = [&](const char* bracket) { put(bracket), line(style, level + 1); };
    const auto next = [&] { put(style.comma), line(style, level + 1); };
    if (const std::string* text = value.string()) return put(json_string(*text, style.ascii));
    if (const List* list = value.list()) {
      if (list->empty()) return put("[]");
      for (const Value& element : *list) {
        if (&element == list->data()) open("[");
        if (&element != list->data()) next();
        json(element, style, level + 1);
      }
      return line(style, level), put("]");
    }
    if (const Dict* dict = value.dict()) {
      if (dict->empty()) return put("{}");
      std::vector<const std::pair<std::string, Value>*> items;
      for (const auto& item : *dict) items.push_back(&item);
      if (style.sorted) std::ranges::sort(items, {}, [](const auto* item) { return item->first; });
      for (const auto* item : items) {
        if (item == items.front()) open("{");
        if (item != items.front()) next();
        put(json_string(item->first, style.ascii) + style.colon);
        json(item->second, style, level + 1);
      }
      return line(style, level), put("}");
    }
    if (value.is_none()) return put("null");
    if (const bool* b = std::get_if<bool>(&value.data)) return put(*b ? "true" : "false");
    double number = 0;
    require(as_number(value, number), "tojson: {} has no JSON form", value.type());
    if (!std::isfinite(number))
      return put(std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
    put(scalar(value));
  }

  static std::string scalar(const Value& value) {
    if (const bool* b = std::get_if<bool>(&value.data)) return *b ? "True" : "False";
    if (const std::int64_t* i = value.integer()) return fmt::format("{}", *i);
    if (const double* d = std::get_if<double>(&value.data)) return number_text(*d);
    if (const auto* wide = std::get_if<std::uint64_t>(&value.data)) return fmt::format("{}", *wide);
    if (value.is_none()) return "None";
    return value.is_undefined() ? "" : fmt::format("<{}>", value.type());
  }

  std::string out;

 private:
  void put(std::string_view text) {
    budget_.spend(text.size() + 1);
    out += text;
  }
  void line(const JsonStyle& style, int level) {
    if (style.indent.empty()) return;
    put("\n");
    for (int i = 0; i < level; ++i) put(style.indent);
  }
  static void check_level(int level) {
    require(level < kMostLevels, "a value has more than {} levels", kMostLevels);
  }
  Budget& budget_;
};

bool equal_at(const Value& a, const Value& b, Budget& budget, int level) {
  budget.spend(8);
  require(level < kMostLevels, "a value has more than {} levels", kMostLevels);
  double x = 0, y = 0;
  if (a.integer() && b.integer()) return *a.integer() == *b.integer();
  if (as_number(a, x) && as_number(b, y)) return x == y;
  if (a.data.index() != b.data.index()) return false;
  if (const std::string* text = a.string()) return budget.spend(text->size()), *text == *b.string();
  if (const List* list = a.list())
    return std::equal(
        list->begin(), list->end(), b.list()->begin(), b.list()->end(),
        [&](const Value& l, const Value& r) { return equal_at(l, r, budget, level + 1); });
  if (const Dict* dict = a.dict())
    return dict->size() == b.dict()->size() && std::ranges::all_of(*dict, [&](const auto& item) {
             budget.spend(b.dict()->size());
             const Value* other = find(*b.dict(), item.first);
             return other != nullptr && equal_at(item.second, *other, budget, level + 1);
           });
  if (const auto* space = std::get_if<Namespace>(&a.data))
    return space->items == std::get<Namespace>(b.data).items;
  return a.is_none() || a.is_undefined();
}

}  // namespace

std::string_view Value::type() const {
  constexpr std::string_view kNames[] = {"an undefined value",
                                         "None",
                                         "a bool",
                                         "an int",
                                         "a float",
                                         "a str",
                                         "a list",
                                         "a dict",
                                         "a namespace",
                                         "a function",
                                         "an int"};
  return kNames[data.index()];
}

Value from_json(const OrderedJson& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    List list;
    for (const OrderedJson& element : json) list.push_back(from_json(element));
    return list;
  }
  if (json.is_object()) {
    Dict dict;
    for (const auto& [key, value] : json.items()) dict.emplace_back(key, from_json(value));
    return dict;
  }
  constexpr auto kMost = static_cast<std::uint64_t>(INT64_MAX);
  const bool wide = json.is_number_unsigned() && json.get<std::uint64_t>() > kMost;
  if (json.is_number_integer() && !wide) return json.get<std::int64_t>();
  if (wide) return Value::Data(json.get<std::uint64_t>());
  if (json.is_number()) return Value::Data(json.get<double>());
  return Value::Data(None{});
}

const Value* find(const Dict& dict, std::string_view key) {
  const auto found = std::ranges::find(dict, key, &Dict::value_type::first);
  return found == dict.end() ? nullptr : &found->second;
}

Value& slot(Dict& dict, const std::string& key) {
  const auto found = std::ranges::find(dict, key, &Dict::value_type::first);
  return found != dict.end() ? found->second : dict.emplace_back(key, Value()).second;
}

bool truth(const Value& value) {
  double number = 0;
  if (as_number(value, number)) return number != 0;
  if (const std::string* text = value.string()) return !text->empty();
  if (const List* list = value.list()) return !list->empty();
  if (const Dict* dict = value.dict()) return !dict->empty();
  return !value.is_undefined() && !value.is_none();
}

bool as_number(const Value& value, double& number) {
  if (const bool* b = std::get_if<bool>(&value.data)) {
    number = *b ? 1 : 0;
  } else if (const std::int64_t* i = value.integer()) {
    number = static_cast<double>(*i);
  } else if (const double* d = std::get_if<double>(&value.data)) {
    number = *d;
  } else if (const auto* wide = std::get_if<std::uint64_t>(&value.data)) {
    number = static_cast<double>(*wide);
  } else {
    return false;
  }
  return true;
}

bool equal(const Value& a, const Value& b, Budget& budget) { return equal_at(a, b, budget, 0); }

int compare(const Value& a, const Value& b, Budget& budget) {
  double x = 0, y = 0;
  if (a.integer() && b.integer())
    return *a.integer() < *b.integer() ? -1 : *a.integer() > *b.integer() ? 1 : 0;
  if (as_number(a, x) && as_number(b, y)) return x < y ? -1 : x > y ? 1 : 0;
  require(a.string() && b.string(), "{} and {} have no order", a.type(), b.type());
  budget.spend(std::min(a.string()->size(), b.string()->size()));
  const int order = a.string()->compare(*b.string());
  return order < 0 ? -1 : order > 0 ? 1 : 0;
}

List elements(const Value& value, Budget& budget) {
  if (const List* list = value.list()) return budget.spend(list->size() * sizeof(Value)), *list;
  List out;
  if (value.is_undefined()) return out;
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, item] : *dict)
      budget.spend(key.size() + sizeof(Value)), out.emplace_back(key);
    return out;
  }
  const std::string* text = value.string();
  require(text != nullptr, "{} is not iterable", value.type());
  for (std::size_t i = 0; i < text->size(); i += utf8_length((*text)[i])) {
    budget.spend(sizeof(Value));
    out.emplace_back(text->substr(i, utf8_length((*text)[i])));
  }
  return out;
}

std::int64_t length(const Value& value) {
  if (const List* list = value.list()) return std::ssize(*list);
  if (const Dict* dict = value.dict()) return std::ssize(*dict);
  if (value.is_undefined()) return 0;
  require(value.string() != nullptr, "{} has no length", value.type());
  return std::ranges::count_if(*value.string(), [](char c) { return (c & 0xC0) != 0x80; });
}

std::string to_text(const Value& value, Budget& budget) {
  if (const std::string* text = value.string()) return budget.spend(text->size()), *text;
  Writer writer(budget);
  writer.repr(value);
  return std::move(writer.out);
}

std::string to_json(const Value& value, const JsonStyle& style, Budget& budget) {
  Writer writer(budget);
  writer.json(value, style);
  return std::move(writer.out);
}

}  // namespace tessera::io::chat
