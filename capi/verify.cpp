#include <nlohmann/json.hpp>
#include <optional>

#include "capi/call.h"
#include "core/base/error.h"
#include "io/seal/verify_path.h"

int tessera_verify(const char* path, const tessera_option* options, size_t option_count,
                   tessera_problem problem, tessera_progress progress, tessera_text report,
                   void* user) {
  namespace capi = tessera::capi;
  namespace io = tessera::io;
  return capi::run_call({path == nullptr ? "" : path, ""}, [&] {
    const io::OptionTexts given = capi::option_texts(options, option_count);
    const std::optional<std::int64_t> step = given.step();
    const io::fs::path from = capi::text_argument(path, "the path");
    io::VerifyOptions verify;
    verify.threads = given.jobs();
    given.refuse_others();
    if (progress != nullptr) {
      verify.progress = [&](std::int64_t done, std::int64_t total) {
        if (progress(user, done, total) != 0) throw capi::Stopped("the verification was stopped");
      };
    }
    io::PathReport checked = io::verify_path(from, step, verify);
    io::VerifyReport& found = checked.verify;
    const io::fs::path& read = checked.path;
    constexpr std::string_view kModel = "model/";
    for (io::VerifyProblem& at : found.problems) {
      if (at.tensor.starts_with(kModel)) at.tensor.erase(0, kModel.size());
      if (problem != nullptr)
        problem(user, at.file.c_str(), at.tensor.c_str(), at.begin, at.end, at.what.c_str());
    }
    capi::send_json(report, user,
                    {{"path", read.string()},
                     {"tensors", found.tensors},
                     {"bytes", found.bytes},
                     {"unverifiable_bytes", found.unverifiable},
                     {"sealed", checked.sealed.empty() ? io::Json() : io::Json(checked.sealed)},
                     {"additional_files", checked.additional},
                     {"problems", found.problems.size()}});
    if (found.problems.empty()) return;
    const io::VerifyProblem& first = found.problems.front();
    const std::string more = found.problems.size() == 1 ? ""
                                                        : fmt::format(" (and {} more problems)",
                                                                      found.problems.size() - 1);
    throw io::Placed(tessera::CorruptCheckpoint("{}: {}{}", read.string(), first.str(), more),
                     {(read / first.file).string(), first.tensor});
  });
}
