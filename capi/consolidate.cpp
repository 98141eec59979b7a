#include "io/consolidate/consolidate.h"

#include <nlohmann/json.hpp>

#include "capi/call.h"
#include "io/consolidate/options.h"

int tessera_consolidate(const char* source, const char* out, const tessera_option* options,
                        size_t option_count, tessera_progress progress, tessera_text warn,
                        tessera_text report, void* user) {
  namespace io = tessera::io;
  return tessera::capi::run_call({source == nullptr ? "" : source, ""}, [&] {
    auto consolidate = io::consolidate_options(tessera::capi::option_texts(options, option_count));
    if (progress != nullptr) {
      consolidate.progress = [&](const io::ConsolidateProgress& at) {
        return progress(user, at.done, at.total) == 0;
      };
      consolidate.checked = [&](std::int64_t done, std::int64_t total) {
        if (progress(user, done, total) != 0)
          throw tessera::capi::Stopped("the check of the seal was stopped");
      };
    }
    if (warn != nullptr)
      consolidate.warn = [&](const std::string& text) { warn(user, text.c_str()); };
    const std::string from = tessera::capi::text_argument(source, "the source");
    const std::string to = tessera::capi::text_argument(out, "the directory to write");
    const io::ConsolidateReport done = [&] {
      try {
        return io::consolidate(from, to, consolidate);
      } catch (const io::ConsolidationStopped& stopped) {
        throw tessera::capi::Stopped(stopped.what());
      }
    }();
    tessera::capi::send_json(report, user, io::report_json(done));
  });
}
