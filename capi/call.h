#pragma once

#include <tessera/c_api.h>

#include <cstddef>
#include <functional>
#include <string>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/option_texts.h"
#include "io/base/placed.h"

namespace tessera::capi {

/// Thrown when a callback stops a call.
class Stopped : public Error {
 public:
  using Error::Error;
};

/// Runs the body of a C function. @param place  of errors that have none
/// @return the status of its exception, whose text it keeps for this thread
int run_call(const io::ErrorPlace& place, const std::function<void()>& body) noexcept;

/// @throws InvalidArgument on NULL
io::OptionTexts option_texts(const tessera_option* options, std::size_t count);

/// @throws InvalidArgument if it is NULL or empty. @param what  of the argument, for the message
std::string text_argument(const char* text, const char* what);

void send_json(tessera_text callback, void* user, const io::Json& json);

}  // namespace tessera::capi
