#include "capi/call.h"

#include <algorithm>
#include <charconv>
#include <new>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace tessera::capi {
namespace {

struct LastError {
  std::string message;
  io::ErrorPlace place;
};
thread_local LastError last_error;

int status_of(const std::exception& error) {
  const auto is = [&]<typename E>(E*) { return dynamic_cast<const E*>(&error) != nullptr; };
  if (is(static_cast<InvalidArgument*>(nullptr))) return TESSERA_INVALID_ARGUMENT;
  if (is(static_cast<Unsupported*>(nullptr))) return TESSERA_UNSUPPORTED;
  if (is(static_cast<IoError*>(nullptr)) || is(static_cast<std::system_error*>(nullptr)))
    return TESSERA_IO;
  if (is(static_cast<CorruptCheckpoint*>(nullptr))) return TESSERA_CORRUPT;
  if (is(static_cast<CommError*>(nullptr))) return TESSERA_COMMUNICATION;
  if (is(static_cast<OutOfMemory*>(nullptr)) || is(static_cast<std::bad_alloc*>(nullptr)))
    return TESSERA_OUT_OF_MEMORY;
  return is(static_cast<Stopped*>(nullptr)) ? TESSERA_STOPPED : TESSERA_INTERNAL;
}

}  // namespace

int run_call(const io::ErrorPlace& place, const std::function<void()>& body) noexcept {
  try {
    try {
      last_error = {};
      body();
      return TESSERA_OK;
    } catch (const std::exception& error) {
      last_error = {error.what(), place};
      if (const auto* placed = dynamic_cast<const io::ErrorPlace*>(&error)) {
        if (!placed->file.empty()) last_error.place.file = placed->file;
        if (place.tensor.empty()) last_error.place.tensor = placed->tensor;
      }
      return status_of(error);
    }
  } catch (...) {  // no memory for the text
    return TESSERA_OUT_OF_MEMORY;
  }
}

Options::Options(const tessera_option* options, std::size_t count,
                 std::span<const char* const> names, std::span<const char* const> repeated) {
  require(options != nullptr || count == 0, "options are NULL");
  for (std::size_t i = 0; i < count; ++i) {
    require(options[i].name != nullptr && options[i].value != nullptr,
            "option {} has a name or value that is NULL", i);
    std::string name = options[i].name;
    std::ranges::replace(name, '_', '-');
    const bool many = std::ranges::find(repeated, name) != repeated.end();
    if (!many && std::ranges::find(names, name) == names.end()) {
      std::string known;
      for (const auto& list : {names, repeated})
        for (const char* other : list) known += (known.empty() ? "" : ", ") + std::string(other);
      throw InvalidArgument("unknown option \"{}\"; there are {}", options[i].name, known);
    }
    std::vector<std::string>& values = values_[name];
    require(many || values.empty(), "option \"{}\" is given twice", name);
    values.emplace_back(options[i].value);
  }
}

void Options::refuse(std::string_view name, const std::string& value, const std::string& expected) {
  throw InvalidArgument("option {} is \"{}\"; expected {}", name, value, expected);
}

const std::string* Options::find(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second.front();
}

std::string Options::text(std::string_view name, const std::string& otherwise) const {
  const std::string* const value = find(name);
  return value == nullptr ? otherwise : *value;
}

std::vector<std::string> Options::texts(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::vector<std::string>() : found->second;
}

std::optional<std::int64_t> Options::integer(std::string_view name, std::int64_t least) const {
  const std::string* const text = find(name);
  if (text == nullptr) return std::nullopt;
  std::int64_t value = 0;
  const char* const end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc{} || stop != end || value < least)
    refuse(name, *text, fmt::format("an integer of at least {}", least));
  return value;
}

bool Options::flag(std::string_view name) const {
  return choice<bool>(name, {{"true", true}, {"false", false}}).value_or(false);
}

std::optional<std::int64_t> Options::step() const {
  return text("step", "latest") == "latest" ? std::nullopt : integer("step", 0);
}

int Options::jobs() const {
  return static_cast<int>(std::min<std::int64_t>(integer("jobs", 1).value_or(1), 1024));
}

std::string text_argument(const char* text, const char* what) {
  require(text != nullptr && *text != '\0', "{} is missing", what);
  return text;
}

void send_json(tessera_text callback, void* user, const io::Json& json) {
  if (callback != nullptr) callback(user, io::dump_json(json).c_str());
}

}  // namespace tessera::capi

extern "C" {

int tessera_api_version(void) { return TESSERA_API_VERSION; }
const char* tessera_library_version(void) { return TESSERA_VERSION; }
const char* tessera_error_message(void) { return tessera::capi::last_error.message.c_str(); }
const char* tessera_error_file(void) { return tessera::capi::last_error.place.file.c_str(); }
const char* tessera_error_tensor(void) { return tessera::capi::last_error.place.tensor.c_str(); }

}  // extern "C"
