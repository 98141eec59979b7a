#include "io/base/option_texts.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "io/base/size.h"

namespace tessera::io {
namespace {

std::string with_dashes(std::string_view name) {
  std::string text(name);
  std::ranges::replace(text, '_', '-');
  return text;
}

}  // namespace

void OptionTexts::add(std::string_view name, std::string value) {
  values_[with_dashes(name)].push_back(std::move(value));
}

void OptionTexts::set(std::string_view name, std::string value) {
  values_[with_dashes(name)] = {std::move(value)};
}

bool OptionTexts::has(std::string_view name) const { return values_.contains(name); }

const std::vector<std::string>& OptionTexts::values(std::string_view name) const {
  static const std::vector<std::string> kNone;
  read_.emplace(name);
  const auto found = values_.find(name);
  return found == values_.end() ? kNone : found->second;
}

const std::string* OptionTexts::find(std::string_view name) const {
  const std::vector<std::string>& given = values(name);
  require(given.size() <= 1, "--{} is given twice", name);
  return given.empty() ? nullptr : &given.front();
}

std::string OptionTexts::text(std::string_view name, const std::string& otherwise) const {
  const std::string* const value = find(name);
  return value == nullptr ? otherwise : *value;
}

std::vector<std::string> OptionTexts::texts(std::string_view name) const { return values(name); }

std::optional<std::int64_t> OptionTexts::integer(std::string_view name, std::int64_t least) const {
  const std::string* const text = find(name);
  if (text == nullptr) return std::nullopt;
  std::int64_t value = 0;
  const char* const end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc{} || stop != end || value < least)
    refuse(name, *text, fmt::format("an integer of at least {}", least));
  return value;
}

std::optional<std::int64_t> OptionTexts::bytes(std::string_view name) const {
  const std::string* const text = find(name);
  return text == nullptr ? std::nullopt : std::optional(parse_bytes(*text));
}

bool OptionTexts::flag(std::string_view name) const {
  return choice<bool>(name, {{"true", true}, {"false", false}}).value_or(false);
}

std::optional<std::int64_t> OptionTexts::step() const {
  return text("step", "latest") == "latest" ? std::nullopt : integer("step", 0);
}

int OptionTexts::jobs() const {
  return static_cast<int>(std::min<std::int64_t>(integer("jobs", 1).value_or(1), 1024));
}

void OptionTexts::refuse_others() const {
  for (const auto& [name, ignored] : values_)
    require(read_.contains(name), "unknown option \"{}\"; there are {}", name,
            fmt::join(read_, ", "));
}

void OptionTexts::refuse(std::string_view name, const std::string& value,
                         const std::string& expected) {
  throw InvalidArgument("--{} is \"{}\"; expected {}", name, value, expected);
}

}  // namespace tessera::io
