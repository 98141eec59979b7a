#include "io/seal/verify_path.h"

#include <fmt/format.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/seal/seal.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "io/source/sharded_source.h"

namespace tessera::io {
namespace {

// Reports a checkpoint that cannot be opened as a problem instead of throwing.
VerifyReport examine(const fs::path& dir, const VerifyOptions& options,
                     std::optional<std::int64_t> step) {
  const auto check_step = [&](const CheckpointIndex& index) {
    require(!step || *step == index.step, "{} is the checkpoint of step {}, not of {}",
            dir.string(), index.step, step.value_or(0));
  };
  try {
    const auto reader = CheckpointReader::open(dir);
    check_step(reader.index());
    return verify_checkpoint(reader, options);
  } catch (const CorruptFile&) {
    // The index is valid, but a file is missing or truncated: verify the others.
    const std::string source = (dir / "index.json").string();
    const auto index = parse_index(read_file(source, kMaxIndexBytes, Links::Refuse), source);
    check_step(index);
    return verify_checkpoint(dir, index, options);
  } catch (const CorruptCheckpoint& error) {
    VerifyProblem problem{"index.json", "", 0, 0, error.what()};
    if (const auto* tensor = dynamic_cast<const CorruptTensor*>(&error))
      problem = {"index.json", tensor->tensor(), tensor->begin(), tensor->end(), error.what()};
    VerifyReport report;
    report.problems.push_back(std::move(problem));
    return report;
  }
}

std::vector<std::string> names_of(const TensorSource& source) {
  std::vector<std::string> names;
  for (const TensorInfo& info : source.tensors()) names.push_back(info.name);
  if (const auto* sharded = dynamic_cast<const ShardedSource*>(&source))
    for (const auto& other : sharded->unreadable())
      if (other.carrier) names.push_back(other.name);
  return names;
}

fs::path normal(const fs::path& path) { return fs::absolute(path).lexically_normal(); }

// Reads the tensors in files that have checksums or that the seal does not list, and names the
// tensors in the bytes that differ from it. Values may be infinite, such as the best loss so far.
void examine_tensors(const TensorSource& source, const Seal* seal, VerifyOptions options,
                     VerifyReport& report) {
  const std::vector<std::string> names = names_of(source);
  options.check_finite = false;
  if (seal != nullptr) {
    options.files.emplace();
    std::map<fs::path, std::vector<VerifyProblem*>> damaged;
    std::set<const VerifyProblem*> named;
    for (VerifyProblem& problem : report.problems)
      damaged[normal(seal->root / problem.file)].push_back(&problem);
    for (const std::string& name : names) {
      const auto record = source.record(name);
      for (const Chunk& chunk : record->chunks) {
        const fs::path file = normal(source.path() / chunk.file);
        // A checksum of the format also shows damage from before the seal.
        if (chunk.checksum != Checksum::None ||
            !seal->files.contains(file.lexically_relative(normal(seal->root)).string()))
          options.files->insert(chunk.file);
        const auto found = damaged.find(file);
        if (found == damaged.end()) continue;
        const auto [first, last] = chunk.file_bytes();
        for (VerifyProblem* problem : found->second)
          if (first < problem->byte_end && problem->byte_begin < last &&
              named.insert(problem).second)
            problem->what += fmt::format(" (tensor {}, and others there)", name);
      }
    }
  }
  VerifyReport read = verify_tensors(source, names, options);
  report.tensors = read.tensors;
  report.bytes += read.bytes;
  report.unverifiable = read.unverifiable;
  report.problems.insert(report.problems.end(), read.problems.begin(), read.problems.end());
}

PathReport examine_foreign(const fs::path& path, const VerifyOptions& options) {
  PathReport report{path, {}, {}, {}, {}};
  const auto add_error = [&](const Error& error) {
    report.verify.problems.push_back({path.string(), "", 0, 0, error.what()});
  };
  std::optional<Seal> seal;
  try {
    seal = find_seal(path);
    if (seal) {
      report.sealed = seal->created;
      SealReport sealed =
          check_seal(*seal, {.threads = options.threads, .progress = options.progress});
      report.verify.problems = std::move(sealed.problems);
      report.verify.bytes = sealed.bytes;
      report.additional = std::move(sealed.additional);
    }
  } catch (const CorruptCheckpoint& error) {
    add_error(error);
  }
  try {
    // Any directory may have a seal.
    if (const auto source = open_foreign(path))
      examine_tensors(*source, seal ? &*seal : nullptr, options, report.verify);
  } catch (const CorruptCheckpoint& error) {
    add_error(error);
  } catch (const Error& error) {
    if (!seal) throw;
    if (report.verify.problems.empty())
      report.unread = error.what();
    else
      add_error(error);  // damage may be the reason
  }
  return report;
}

}  // namespace

bool is_foreign_or_sealed(const fs::path& path) {
  std::error_code absent;
  return is_foreign(path) || (fs::exists(path, absent) && is_there(seal_path(path)));
}

PathReport verify_path(const fs::path& path, std::optional<std::int64_t> step,
                       const VerifyOptions& options) {
  if (is_foreign_or_sealed(path)) {
    require(!step, "{} is not a tessera checkpoint and has no step {}", path.string(),
            step.value_or(0));
    return examine_foreign(path, options);
  }
  refuse_parent_of_shards(path);
  const fs::path own = locate_checkpoint(path, step);
  return {own, examine(own, options, step), {}, {}, {}};
}

}  // namespace tessera::io
