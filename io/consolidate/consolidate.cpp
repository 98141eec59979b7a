#include "io/consolidate/consolidate.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <thread>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/consolidate/attempt.h"
#include "io/consolidate/copy_files.h"
#include "io/consolidate/parts.h"
#include "io/consolidate/side_files.h"
#include "io/consolidate/sink.h"
#include "io/consolidate/source.h"
#include "io/consolidate/tensor_files.h"
#include "io/pump/write_files.h"
#include "io/seal/seal.h"

namespace tessera::io {
namespace {

struct Plan {
  ConsolidateSource source;
  ExportLayout layout;
};

void check_options(const ConsolidateOptions& options) {
  require(options.what == ExportWhat::Model || sink_of(options.format).has_optimizer,
          "optimizer state is written with --format {} only", formats_with_optimizer());
  require(options.tensors.empty() || options.format == ExportFormat::Safetensors,
          "a model needs all of its tensors, but --tensors selects some; choose --format "
          "safetensors");
  const bool gguf = options.format == ExportFormat::GGUF;
  require(!options.dtype || (is_floating(*options.dtype) && *options.dtype != DType::F64),
          "weights are written as f32, bf16 or f16, not {}", options.dtype.value_or(DType::F32));
  require(options.encoding == Encoding::Plain || (gguf && !options.dtype),
          "q8_0 is a dtype of --format gguf only");
  require(options.jobs >= 1 && options.max_shard_size >= 1,
          "jobs ({}) and max-shard-size ({}) must be at least 1", options.jobs,
          options.max_shard_size);
  require(
      !options.part || (options.part->number >= 1 && options.part->number <= options.part->count),
      "there is no part {} of {}", options.part->number, options.part->count);
  require(!options.part || !gguf,
          "--format gguf writes one file, which cannot be divided: omit --part");
  require(options.memory >= kLeastJobMemory, "memory is {} bytes, and the least that works {} KiB",
          options.memory, kLeastJobMemory >> 10);
}

/// Whether a path is `dir` or inside it. Both are canonical.
bool is_in(const fs::path& path, const fs::path& dir) {
  return std::mismatch(dir.begin(), dir.end(), path.begin(), path.end()).first == dir.end();
}

// Throws if replacing `out` or removing `<out>.tmp` would remove `path`.
// @param name  name of the path in errors
void check_apart(const fs::path& out, const fs::path& path, const std::string& name) {
  const fs::path inner = fs::weakly_canonical(path), attempt = attempt_path(out);
  require(!is_in(inner, fs::weakly_canonical(out)), "{} contains {}; choose another directory",
          out.string(), name);
  require(!is_in(inner, fs::weakly_canonical(attempt)),
          "{}, the working directory of an export to {}, contains {}; choose another directory",
          attempt.string(), out.string(), name);
}

// Throws unless `out` is absent or an earlier export, so that --overwrite with a mistyped path does
// no harm. Checks the writer in the files, because other programs' models have the same file names.
void check_out(const fs::path& out, bool overwrite) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(out, error);
  if (!fs::exists(status)) return;
  require(overwrite, "{} exists already; choose another directory, or replace it with --overwrite",
          out.string());
  require(!fs::is_symlink(status),
          "{} is a symbolic link; give the directory that it points to, or remove the link",
          out.string());
  require(fs::is_directory(status), "{} is not a directory; --overwrite replaces only an export",
          out.string());
  bool empty = true, config = false, tensors = false;
  for (const auto& item : fs::directory_iterator(out)) {
    const std::string name = item.path().filename().string();
    const ExportSink* const sink = sink_with_file(name);
    require(item.is_regular_file() && (sink != nullptr || is_side_file(name)),
            "{} contains {}, which is not part of an export: it is not replaced; choose another "
            "directory",
            out.string(), name);
    require(sink == nullptr || sink->is_own(item.path()),
            "{} contains {}, which does not name tessera as its writer: it is not replaced; choose "
            "another directory, or remove this one if you no longer need it",
            out.string(), name);
    empty = false;
    config = config || is_config_file(name) || sink == &sink_of(ExportFormat::GGUF);
    tensors = tensors || sink != nullptr;
  }
  require(
      empty || (config && tensors),
      "{} is not a complete export (model.gguf, or tensors and config.json or tessera.json): it is "
      "not replaced; "
      "choose another directory",
      out.string());
}

Plan make_plan(const fs::path& source, const ConsolidateOptions& options) {
  Plan plan;
  plan.source = open_consolidate_source(source, options);
  plan.layout.others = compose_side_files(plan.source, options, plan.source.warnings);
  sink_of(options.format).plan(plan.source, options, plan.layout);
  return plan;
}

// Writes the files without tensors. @param names  receives the names of all files
void write_other_files(const fs::path& dir, const ExportLayout& layout,
                       std::vector<std::string>& names) {
  for (const ExportFile& file : layout.files) names.push_back(file.name);
  for (const SideFile& file : layout.others) {
    write_file_atomically(dir / file.name, file.content);
    names.push_back(file.name);
  }
}

std::int64_t allocated_bytes(const fs::path& dir) {
  std::int64_t bytes = 0;
  std::error_code error;
  for (const fs::path& path : list_directory(dir, error)) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) == 0) bytes += std::int64_t{status.st_blocks} * 512;
  }
  return bytes;
}

void check_space(const fs::path& out, const Attempt& attempt, const Plan& plan,
                 const std::vector<ExportFile>& files) {
  std::int64_t needed = std::int64_t{1} << 20;  // for indexes and directories
  for (const ExportFile& file : files) needed += file.size;
  for (const SideFile& file : plan.layout.others) {
    needed += static_cast<std::int64_t>(file.content.size());
  }
  needed = std::max<std::int64_t>(needed - allocated_bytes(attempt.dir()), 0);
  require_space(out, needed);
}

/// An export that has been checked but not begun.
struct Prepared {
  fs::path out;  ///< absolute
  Plan plan;
  std::uint64_t identity = 0;  ///< see Attempt, ExportParts
};

// Also of the files that the last part writes.
std::uint64_t part_identity(const Plan& plan, int count) {
  std::uint64_t identity = copy_identity(plan.layout.files, true);
  const auto add = [&](const std::string& text) {
    identity = crc64(text.data(), text.size(), identity);
  };
  add(fmt::format("{} parts\n", count));
  for (const SideFile& file : plan.layout.others)
    add(fmt::format("{} {}\n{}", file.name, file.content.size(), file.content));
  return identity;
}

Prepared prepare(const fs::path& source, const fs::path& out, const ConsolidateOptions& options) {
  check_options(options);
  Prepared prepared;
  prepared.out = fs::absolute(out / "").lexically_normal().parent_path();
  check_apart(prepared.out, source, "the source " + source.string());
  if (options.like) check_apart(prepared.out, *options.like, "the directory of --like");
  if (!options.base.empty()) check_apart(prepared.out, options.base, "the directory of --base");
  if (options.config_file) {
    // Checks both the file and its directory, because the file may be a link (Hugging Face cache).
    const fs::path& file = *options.config_file;
    const std::string name = file.string() + ", the file of --config";
    check_apart(prepared.out, fs::absolute(file).parent_path(), name);
    check_apart(prepared.out, file, name);
  }
  check_out(prepared.out, options.overwrite);
  prepared.plan = make_plan(source, options);
  const fs::path& from = prepared.plan.source.path;  // checkpoint; `source` may be its run
  const auto check_both = [&](const fs::path& read, const std::string& name) {
    check_apart(prepared.out, read, name);
    // Files may be links, as in the cache of Hugging Face.
    std::error_code none;
    for (const fs::path& file : list_directory(read, none))
      if (fs::is_symlink(file, none)) check_apart(prepared.out, file, name);
    require(!is_in(fs::weakly_canonical(attempt_path(prepared.out)), fs::weakly_canonical(read)),
            "{} is inside {}; choose another directory", prepared.out.string(), name);
  };
  check_both(from, "the source " + from.string());
  for (const fs::path& base : prepared.plan.source.bases)
    check_both(base, "the base " + base.string());
  prepared.identity = options.part ? part_identity(prepared.plan, options.part->count)
                                   : copy_identity(prepared.plan.layout.files);
  return prepared;
}

ConsolidatePlan describe(const Plan& plan) {
  ConsolidatePlan result;
  result.source = plan.source.path;
  result.kind = plan.source.kind;
  result.skipped = plan.source.skipped;
  result.warnings = plan.source.warnings;
  for (const ExportFile& file : plan.layout.files) {
    result.files.push_back({file.name, file.size});
    for (const ExportPart& part : file.parts) {
      if (part.begin != 0) continue;  // the tensor was listed with its first part
      const ExportTensor* const tensor = part.tensor;
      result.tensors.push_back({tensor->source_name, tensor->name, file.name, tensor->shape,
                                tensor->stored, tensor->written, tensor->bytes(),
                                tensor->opaque_dtype, tensor->encoding});
    }
  }
  return result;
}

// Writes the files without tensors, and renames the attempt to `out`.
void commit(Attempt& attempt, const Prepared& prepared, const ConsolidateOptions& options,
            std::vector<std::string>& names) {
  write_other_files(attempt.dir(), prepared.plan.layout, names);
  sync_directory(attempt.dir());
  // Where locks do not reach other machines, two processes may commit the parts at once.
  for (const std::string& name : names) {
    require<IoError>(is_there(attempt.dir() / name),
                     "{} has disappeared; repeat the command to complete {}",
                     (attempt.dir() / name).string(), prepared.out.string());
  }
  try {
    check_out(prepared.out, options.overwrite);  // again, because `out` may be new
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}; the exported files are in {}, for the same command to continue",
                          error.what(), attempt.dir().string());
  }
  attempt.commit(options.overwrite);
}

constexpr auto kCommitPatience = std::chrono::seconds(30);
constexpr auto kCommitPoll = std::chrono::milliseconds(50);

/// The attempt at `out` that commits all parts; null if another process commits, for longer than
/// kCommitPatience.
std::unique_ptr<Attempt> begin_commit(const fs::path& out, std::uint64_t identity) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    try {
      return std::make_unique<Attempt>(out, identity);
    } catch (const AttemptBusy&) {
      if (std::chrono::steady_clock::now() - start > kCommitPatience) {
        if (is_attempt_of(out, identity)) return nullptr;
        throw;
      }
      std::this_thread::sleep_for(kCommitPoll);
    }
  }
}

// Commits if all parts are done; this part is.
void commit_parts(const ExportParts& parts, const Prepared& prepared,
                  const ConsolidateOptions& options, ConsolidateReport& report) {
  const auto is_complete = [&] {
    report.waiting = parts.waiting();
    report.committed = false;
    if (report.waiting.empty()) return true;
    // A commit by another process removes this part, with all others.
    if (!parts.is_done() && is_there(prepared.out)) {
      report.committed = true;
      report.waiting.clear();
    }
    return false;
  };
  if (!is_complete()) return;
  const std::unique_ptr<Attempt> attempt = begin_commit(prepared.out, prepared.identity);
  if (!attempt) return;
  if (!is_complete()) {
    if (report.committed) attempt->remove();  // new and empty
    return;
  }
  parts.gather(attempt->dir());
  report.files.clear();
  commit(*attempt, prepared, options, report.files);
  report.committed = true;
}

}  // namespace

ConsolidatePlan plan_consolidation(const fs::path& source, const ConsolidateOptions& options) {
  check_options(options);
  return describe(make_plan(source, options));
}

ConsolidatePlan plan_consolidation(const fs::path& source, const fs::path& out,
                                   const ConsolidateOptions& options) {
  const Prepared prepared = prepare(source, out, options);
  ConsolidatePlan plan = describe(prepared.plan);
  if (!options.part) return plan;
  const ExportParts parts(prepared.out, prepared.plan.layout.files, *options.part,
                          prepared.identity);
  std::set<std::string> own;
  for (const ExportFile& file : parts.own_files()) own.insert(file.name);
  std::erase_if(plan.files, [&](const auto& file) { return !own.contains(file.name); });
  std::erase_if(plan.tensors, [&](const auto& tensor) { return !own.contains(tensor.file); });
  return plan;
}

ConsolidateReport consolidate(const fs::path& source, const fs::path& out_path,
                              const ConsolidateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const Prepared prepared = prepare(source, out_path, options);
  const fs::path& out = prepared.out;
  const Plan& plan = prepared.plan;
  const auto warn = [&](const std::string& text) {
    if (options.warn) options.warn(text);
  };
  for (const std::string& text : plan.source.warnings) warn(text);

  const auto most = static_cast<int>(std::min<std::int64_t>(options.memory / kLeastJobMemory, 64));
  const SealOptions seal{.threads = std::clamp(options.jobs, 1, most), .progress = options.checked};
  for (const fs::path& base : plan.source.bases) require_seal_intact(base, seal);
  if (!plan.source.checkpoint) {
    // With --step: the folder of that step, which may have a seal of its own.
    const fs::path& sealed =
        options.step && !plan.source.sources.empty() ? plan.source.sources.back()->path() : source;
    require_seal_intact(sealed, seal);
  }
  std::optional<ExportParts> parts;
  if (options.part) parts.emplace(out, plan.layout.files, *options.part, prepared.identity);
  const std::vector<ExportFile> files = parts ? parts->own_files() : plan.layout.files;
  ConsolidateProgress progress;
  for (const ExportFile& file : files) progress.total += file.size;

  ConsolidateReport report;
  report.source = plan.source.path;
  report.kind = plan.source.kind;
  report.skipped = plan.source.skipped;
  if (plan.source.checkpoint) report.step = plan.source.checkpoint->index().step;
  make_directories_durably(out.parent_path());
  const auto write_own_files = [&] {
    Attempt attempt(parts ? parts->dir() : out, prepared.identity);
    if (attempt.has_discarded()) {
      warn(fmt::format(
          "{} held an unfinished export that this one cannot continue (another or "
          "changed source, or another --dtype, --max-shard-size, ...): removed it, starting anew",
          attempt.dir().string()));
    }
    bool whole = false;
    try {
      if (parts) parts->check_others();  // again, because others may have begun in the meantime
      check_space(out, attempt, plan, files);
      if (is_there(out)) require_exchange(attempt.dir(), out);
      const WriteOptions write{
          .memory = options.memory, .jobs = options.jobs, .direct_io = options.direct_io};
      whole = copy_files(attempt, files, write, [&](std::int64_t bytes, bool reused) {
        progress.done += bytes;
        if (reused) progress.reused += bytes;
        return !options.progress || options.progress(progress);
      });
      if (!whole) {
        const bool newest = report.step && !options.step && plan.source.path != source;
        throw ConsolidationStopped(fmt::format(
            "stopped with {} of {} bytes written; the same command continues from there{}; the "
            "finished files are in {}",
            progress.done, progress.total,
            newest ? fmt::format(", with --step {} if the run has saved again", *report.step) : "",
            attempt.dir().string()));
      }
      if (parts)
        attempt.commit(false);
      else
        commit(attempt, prepared, options, report.files);
    } catch (const ConsolidationStopped&) {
      throw;
    } catch (const IoError& error) {
      // Keeps finished files after disk errors, because a continued export verifies them.
      if (attempt.has_records()) {
        throw IoError("{}; finished files are in {}, and the same command continues from there",
                      error.what(), attempt.dir().string());
      }
      attempt.remove();
      throw;
    } catch (...) {
      if (!whole) attempt.remove();
      throw;
    }
  };
  if (parts) parts->check_others();
  if (parts && parts->is_done())
    progress.done = progress.reused = progress.total;
  else
    write_own_files();
  if (parts) {
    for (const ExportFile& file : files) report.files.push_back(file.name);
    commit_parts(*parts, prepared, options, report);
  }
  for (const ExportFile& file : report.committed ? plan.layout.files : files) {
    for (const ExportPart& part : file.parts) {
      report.tensors += part.begin == 0;
      report.bytes += part.bytes();
    }
  }
  for (const ExportTensor& tensor : plan.source.weights)
    if (report.committed) report.parameters += numel(tensor.shape);
  report.reused_bytes = progress.reused;
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace tessera::io
