#include "io/consolidate/consolidate.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <span>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "io/consolidate/attempt.h"
#include "io/consolidate/copy_files.h"
#include "io/consolidate/side_files.h"
#include "io/consolidate/source.h"
#include "io/consolidate/tensor_files.h"

namespace tessera::io {
namespace {

/// Source and output of a consolidation.
struct Plan {
  ConsolidateSource source;
  std::vector<ExportFile> files;     ///< of weights, then of moments
  std::size_t weight_files = 0;      ///< number of files of weights
  std::vector<SideFile> side_files;  ///< without the indices of `files`
};

void check_options(const ConsolidateOptions& options) {
  require(options.what == ExportWhat::Model || options.format == ExportFormat::Safetensors,
          "a Hugging Face directory holds no optimizer state; choose --format safetensors");
  require(options.tensors.empty() || options.format == ExportFormat::Safetensors,
          "a Hugging Face directory needs all tensors of a model, but --tensors selects some; "
          "choose --format safetensors");
  require(!options.dtype || *options.dtype == DType::F32 || *options.dtype == DType::BF16,
          "weights are written as f32 or bf16, not {}", options.dtype.value_or(DType::F32));
  require(options.jobs >= 1 && options.memory >= 1 && options.max_shard_size >= 1,
          "jobs ({}), memory ({}) and max-shard-size ({}) must be at least 1", options.jobs,
          options.memory, options.max_shard_size);
}

// "model.safetensors", "optimizer-00001-of-00002.safetensors", "model.safetensors.index.json"
bool is_tensor_file(std::string_view name) {
  for (const std::string_view stem : {"model", "optimizer"}) {
    if (!name.starts_with(stem)) continue;
    std::string rest(name.substr(stem.size()));
    if (rest == ".safetensors" || rest == ".safetensors.index.json") return true;
    for (char& c : rest) {
      if (c >= '0' && c <= '9') c = '0';
    }
    if (rest == "-00000-of-00000.safetensors") return true;
  }
  return false;
}

/// Whether a path is `dir` or inside it. Both are canonical.
bool is_in(const fs::path& path, const fs::path& dir) {
  return std::mismatch(dir.begin(), dir.end(), path.begin(), path.end()).first == dir.end();
}

// The source must survive the replacement of `out` and the removal of `<out>.tmp`.
void check_apart(const fs::path& out, const fs::path& source) {
  const fs::path from = fs::weakly_canonical(source);
  const fs::path attempt = attempt_path(out);
  require(!is_in(from, fs::weakly_canonical(out)),
          "{} contains the source {}; choose another directory", out.string(), source.string());
  require(!is_in(from, fs::weakly_canonical(attempt)),
          "{}, the working directory of an export to {}, contains the source {}; choose another "
          "directory",
          attempt.string(), out.string(), source.string());
}

// The file of --config and its directory must survive, too.
void check_apart_from_config(const fs::path& out, const fs::path& config) {
  const fs::path beside = fs::weakly_canonical(fs::absolute(config).parent_path());
  for (const fs::path& dir : {out, attempt_path(out)}) {
    const fs::path canonical = fs::weakly_canonical(dir);
    // The file may be a link, as in the Hugging Face cache.
    require(!is_in(beside, canonical) && !is_in(fs::weakly_canonical(config), canonical),
            "{} contains {}, the file of --config; choose another directory", dir.string(),
            config.string());
  }
}

// @param dir  directory of the checkpoint, not of its run
void check_outside(const fs::path& out, const fs::path& dir) {
  require(!is_in(fs::weakly_canonical(attempt_path(out)), fs::weakly_canonical(dir)),
          "{} is inside the source {}; choose another directory", out.string(), dir.string());
}

// --overwrite replaces only an earlier export, never another directory by a mistyped path. Models
// of other programs have files of the same names, so the files must name tessera as their writer.
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
    const bool is_config = is_config_file(name);
    const bool is_tensors = is_tensor_file(name);
    const bool ours = item.is_regular_file() && (is_tensors || is_side_file(name));
    require(ours,
            "{} contains {}, which is not part of an export: it is not replaced; choose another "
            "directory",
            out.string(), name);
    require(!name.ends_with(".safetensors") || is_written_by_export(item.path()),
            "{} contains {}, which does not name tessera as its writer: it is not replaced; choose "
            "another directory, or remove this one if you no longer need it",
            out.string(), name);
    empty = false;
    config = config || is_config;
    tensors = tensors || is_tensors;
  }
  require(
      empty || (config && tensors),
      "{} is not a complete export (config.json or tessera.json, and tensors): it is not replaced; "
      "choose another directory",
      out.string());
}

Plan make_plan(const fs::path& source, const ConsolidateOptions& options) {
  Plan plan;
  plan.source = open_consolidate_source(source, options);
  const auto lay_out = [&](const std::vector<ExportTensor>& tensors, const char* stem) {
    if (tensors.empty()) return;
    for (ExportFile& file : plan_tensor_files(tensors, stem, options.max_shard_size)) {
      plan.files.push_back(std::move(file));
    }
  };
  lay_out(plan.source.weights, "model");
  plan.weight_files = plan.files.size();
  lay_out(plan.source.optimizer, "optimizer");
  plan.side_files = compose_side_files(plan.source, options, plan.source.warnings);
  return plan;
}

void write_index(const fs::path& dir, const char* stem, std::span<const ExportFile> files,
                 std::vector<std::string>& names) {
  for (const ExportFile& file : files) names.push_back(file.name);
  if (files.size() < 2) return;
  names.push_back(fmt::format("{}.safetensors.index.json", stem));
  write_file_atomically(dir / names.back(), tensor_files_index(files));
}

void write_small_files(const fs::path& dir, const Plan& plan, std::vector<std::string>& names) {
  const std::span files(plan.files);
  write_index(dir, "model", files.first(plan.weight_files), names);
  write_index(dir, "optimizer", files.subspan(plan.weight_files), names);
  for (const SideFile& file : plan.side_files) {
    write_file_atomically(dir / file.name, file.content);
    names.push_back(file.name);
  }
}

// Disk space already allocated to the files of an attempt.
std::int64_t allocated_bytes(const fs::path& dir) {
  std::int64_t bytes = 0;
  std::error_code error;
  for (const fs::path& path : list_directory(dir, error)) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) == 0) bytes += std::int64_t{status.st_blocks} * 512;
  }
  return bytes;
}

void check_space(const fs::path& out, const Attempt& attempt, const Plan& plan) {
  std::int64_t needed = std::int64_t{1} << 20;  // indices, directories
  for (const ExportFile& file : plan.files) needed += file.plan.file_size;
  for (const SideFile& file : plan.side_files) {
    needed += static_cast<std::int64_t>(file.content.size());
  }
  needed = std::max<std::int64_t>(needed - allocated_bytes(attempt.dir()), 0);
  require_space(out, needed);
}

/// A checked export, before the first write.
struct Prepared {
  fs::path out;  ///< absolute
  Plan plan;
  WriteOptions write;
  std::uint64_t identity = 0;  ///< of the attempt
};

Prepared prepare(const fs::path& source, const fs::path& out, const ConsolidateOptions& options) {
  check_options(options);
  Prepared prepared;
  prepared.out = fs::absolute(out / "").lexically_normal().parent_path();
  check_apart(prepared.out, source);
  if (options.config_file) check_apart_from_config(prepared.out, *options.config_file);
  check_out(prepared.out, options.overwrite);
  prepared.plan = make_plan(source, options);
  check_apart(prepared.out, prepared.plan.source.path);
  check_outside(prepared.out, prepared.plan.source.path);
  prepared.write = {.memory = options.memory, .jobs = options.jobs, .direct_io = options.direct_io};
  prepared.identity = copy_identity(prepared.plan.files);
  return prepared;
}

ConsolidatePlan describe(const Plan& plan) {
  ConsolidatePlan result;
  result.source = plan.source.path;
  result.kind = plan.source.kind;
  result.skipped = plan.source.skipped;
  result.warnings = plan.source.warnings;
  for (const ExportFile& file : plan.files) {
    result.files.push_back({file.name, file.plan.file_size});
    for (const ExportTensor* tensor : file.tensors) {
      result.tensors.push_back({tensor->source_name, tensor->name, file.name, tensor->shape,
                                tensor->stored, tensor->written, tensor->bytes(),
                                tensor->opaque_dtype});
    }
  }
  return result;
}

}  // namespace

ConsolidatePlan plan_consolidation(const fs::path& source, const ConsolidateOptions& options) {
  check_options(options);
  return describe(make_plan(source, options));
}

ConsolidatePlan plan_consolidation(const fs::path& source, const fs::path& out,
                                   const ConsolidateOptions& options) {
  return describe(prepare(source, out, options).plan);
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

  ConsolidateProgress progress;
  for (const ExportFile& file : plan.files) progress.total += file.plan.file_size;

  ConsolidateReport report;
  report.source = plan.source.path;
  report.kind = plan.source.kind;
  report.skipped = plan.source.skipped;
  if (plan.source.checkpoint) report.step = plan.source.checkpoint->index().step;
  make_directories_durably(out.parent_path());
  Attempt attempt(out, prepared.identity);
  if (attempt.has_discarded()) {
    warn(fmt::format(
        "{} held an unfinished export that this one cannot continue (another or changed source, or "
        "another --dtype, --memory, --jobs, ...): removed it, starting anew",
        attempt.dir().string()));
  }
  bool whole = false;
  try {
    check_space(out, attempt, plan);
    if (is_there(out)) require_exchange(attempt.dir(), out);
    whole = copy_files(attempt, plan.files, prepared.write, [&](std::int64_t bytes, bool reused) {
      progress.done += bytes;
      if (reused) progress.reused += bytes;
      return !options.progress || options.progress(progress);
    });
    if (!whole) {
      const bool newest = report.step && !options.step && plan.source.path != source;
      throw ConsolidationStopped(
          "stopped with {} of {} bytes written; the same command continues from there{}; the "
          "finished files are in {}",
          progress.done, progress.total,
          newest ? fmt::format(", with --step {} if the run has saved again", *report.step) : "",
          attempt.dir().string());
    }
    write_small_files(attempt.dir(), plan, report.files);
    sync_directory(attempt.dir());
    try {
      check_out(out, options.overwrite);  // again: it may have been created meanwhile
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("{}; the exported files are in {}, for the same command to continue",
                            error.what(), attempt.dir().string());
    }
    attempt.commit(options.overwrite);
  } catch (const ConsolidationStopped&) {
    throw;
  } catch (const IoError& error) {
    // Keeps finished files after disk errors: a continued export verifies them.
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
  for (const ExportTensor& tensor : plan.source.weights) report.parameters += numel(tensor.shape);
  for (const auto* tensors : {&plan.source.weights, &plan.source.optimizer}) {
    for (const ExportTensor& tensor : *tensors) report.bytes += tensor.bytes();
    report.tensors += static_cast<std::int64_t>(tensors->size());
  }
  report.reused_bytes = progress.reused;
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace tessera::io
