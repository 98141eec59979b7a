#include "capi/call.h"

#include <new>
#include <nlohmann/json.hpp>
#include <system_error>

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

io::OptionTexts option_texts(const tessera_option* options, std::size_t count) {
  require(options != nullptr || count == 0, "options are NULL");
  io::OptionTexts texts;
  for (std::size_t i = 0; i < count; ++i) {
    require(options[i].name != nullptr && options[i].value != nullptr,
            "option {} has a name or value that is NULL", i);
    texts.add(options[i].name, options[i].value);
  }
  return texts;
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
