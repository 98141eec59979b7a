#include "io/checkpoint/verify.h"

#include <nlohmann/json.hpp>

#include "capi/call.h"
#include "capi/source.h"
#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/gguf/header.h"
#include "io/source/open_sharded.h"

namespace tessera::capi {
namespace {

// A tessera checkpoint. Damage that prevents opening it is a problem like any other.
io::VerifyReport verify_own(const io::fs::path& dir, std::optional<std::int64_t> step,
                            const io::VerifyOptions& options) {
  const auto check_step = [&](const io::CheckpointIndex& index) {
    require(!step || *step == index.step, "{} is the checkpoint of step {}, not of {}",
            dir.string(), index.step, step.value_or(0));
  };
  try {
    const auto reader = io::CheckpointReader::open(dir);
    check_step(reader.index());
    return io::verify_checkpoint(reader, options);
  } catch (const io::CorruptFile&) {  // a missing or truncated file: verifies the others
    const std::string source = (dir / "index.json").string();
    const auto index =
        io::parse_index(io::read_file(source, io::kMaxIndexBytes, io::Links::Refuse), source);
    check_step(index);
    return io::verify_checkpoint(dir, index, options);
  }
}

// Tensors of another program. Their values may be infinite, such as the best loss so far.
io::VerifyReport verify_other(const OpenedSource& source, io::VerifyOptions options) {
  options.check_finite = false;
  io::TensorVerification verification(options);
  for (const ListedTensor& tensor : source.tensors)
    if (tensor.stored) verification.add(*tensor.source, tensor.stored_name);
  verification.read();
  return std::move(verification.report);
}

}  // namespace
}  // namespace tessera::capi

int tessera_verify(const char* path, const tessera_option* options, size_t option_count,
                   tessera_problem problem, tessera_progress progress, tessera_text report,
                   void* user) {
  namespace capi = tessera::capi;
  namespace io = tessera::io;
  return capi::run_call({path == nullptr ? "" : path, ""}, [&] {
    constexpr const char* kNames[] = {"step", "shards", "jobs"};
    const capi::Options given(options, option_count, kNames);
    const io::fs::path from = capi::text_argument(path, "the path");
    io::VerifyOptions verify;
    verify.threads = given.jobs();
    if (progress != nullptr) {
      verify.progress = [&](std::int64_t done, std::int64_t total) {
        if (progress(user, done, total) != 0) throw capi::Stopped("the verification was stopped");
      };
    }
    io::fs::path read = from;
    io::VerifyReport found;
    try {
      if (io::is_gguf(from) || io::is_sharded(from)) {
        found = capi::verify_other(
            capi::open_source(from, given.step(), given.integer("shards", 1)), verify);
      } else {
        io::refuse_parent_of_shards(from);
        read = io::locate_checkpoint(from, given.step());
        found = capi::verify_own(read, given.step(), verify);
      }
    } catch (const tessera::CorruptCheckpoint& error) {
      const auto* place = dynamic_cast<const io::ErrorPlace*>(&error);
      const auto* tensor = dynamic_cast<const io::CorruptTensor*>(&error);
      found.problems.push_back({place    ? place->file
                                : tensor ? "index.json"
                                         : read.string(),
                                tensor ? tensor->tensor() : "", tensor ? tensor->begin() : 0,
                                tensor ? tensor->end() : 0, error.what()});
    }
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
