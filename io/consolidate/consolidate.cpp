#include "io/consolidate/consolidate.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>

#include "core/base/error.h"
#include "io/consolidate/attempt.h"
#include "io/consolidate/copy_files.h"
#include "io/consolidate/source.h"
#include "io/consolidate/tensor_files.h"
#include "io/hf/gpt2.h"
#include "io/hf/tokenizer.h"

namespace tessera::io {
namespace {

constexpr const char* kOwnConfig = "tessera.json";
constexpr const char* kTokenizer = "tokenizer_tessera.json";
constexpr const char* kHfTokenizer = "tokenizer.json";
constexpr const char* kHfTokenizerConfig = "tokenizer_config.json";
constexpr const char* kGeneration = "generation_config.json";

/// Everything that is to be written, and where it comes from.
struct Plan {
  ConsolidateSource source;
  std::vector<ExportFile> weight_files, moment_files;

  std::vector<ExportFile> files() const {
    std::vector<ExportFile> all = weight_files;
    all.insert(all.end(), moment_files.begin(), moment_files.end());
    return all;
  }
};

void check_options(const ConsolidateOptions& options) {
  require(options.what == ExportWhat::Model || options.format == ExportFormat::Safetensors,
          "a Hugging Face directory holds no optimizer state; add --format safetensors");
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

void check_apart(const fs::path& out, const fs::path& source) {
  const fs::path from = fs::weakly_canonical(source), to = fs::weakly_canonical(out);
  const auto contains = std::mismatch(to.begin(), to.end(), from.begin(), from.end());
  require(contains.first != to.end(), "{} holds the source {}; choose another directory",
          out.string(), source.string());
}

// An existing `out` is replaced only if it is an earlier export: a mistyped path must not cost
// somebody a directory.
void check_out(const fs::path& out, bool overwrite) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(out, error))) return;
  require(overwrite, "{} exists already; choose another directory, or replace it with --overwrite",
          out.string());
  require(fs::is_directory(out, error), "{} is no directory; --overwrite replaces only an export",
          out.string());
  bool empty = true, config = false, tensors = false;
  for (const auto& item : fs::directory_iterator(out)) {
    const std::string name = item.path().filename().string();
    const bool is_config = name == "config.json" || name == kOwnConfig;
    const bool is_tensors = is_tensor_file(name);
    const bool is_side_file = name == kTokenizer || name == kHfTokenizer ||
                              name == kHfTokenizerConfig || name == kGeneration;
    const bool ours = item.is_regular_file() && (is_config || is_tensors || is_side_file);
    require(ours, "{} holds {}, which no export does: it is not replaced; choose another directory",
            out.string(), name);
    empty = false;
    config = config || is_config;
    tensors = tensors || is_tensors;
  }
  require(empty || (config && tensors),
          "{} is no complete export (config.json or {}, and tensors): it is not replaced; choose "
          "another directory",
          out.string(), kOwnConfig);
}

Plan make_plan(const fs::path& source, const ConsolidateOptions& options) {
  Plan plan;
  plan.source = open_consolidate_source(source, options);
  const auto lay_out = [&](const std::vector<ExportTensor>& tensors, const char* stem) {
    if (tensors.empty()) return std::vector<ExportFile>();
    return plan_tensor_files(tensors, stem, options.max_shard_size);
  };
  plan.weight_files = lay_out(plan.source.weights, "model");
  plan.moment_files = lay_out(plan.source.optimizer, "optimizer");
  return plan;
}

void write_json(const fs::path& dir, const char* name, const Json& json,
                std::vector<std::string>& files) {
  write_file_atomically(dir / name, json.dump(2) + "\n");
  files.emplace_back(name);
}

void write_side_files(const fs::path& dir, const Plan& plan, const ConsolidateOptions& options,
                      std::vector<std::string>& files) {
  const auto& reader = plan.source.checkpoint;
  if (options.format == ExportFormat::Safetensors) {
    Json own{{"model", plan.source.config.value_or(nullptr)}};
    if (reader) own["step"] = reader->index().step;
    write_json(dir, kOwnConfig, own, files);
    return;
  }
  const Json config = gpt2_config_to_hf(*plan.source.config, plan.source.weights.front().written);
  write_json(dir, "config.json", config, files);
  Json generation{{"_from_model_config", true}};
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (!config[key].is_null()) generation[key] = config[key];
  }
  write_json(dir, kGeneration, generation, files);
  if (reader && reader->index().trainer) {
    const std::string source = (reader->path() / reader->index().trainer->file).string();
    const Json trainer = parse_json(reader->trainer_json(), source);
    const auto tokenizer = trainer.find("tokenizer");
    if (tokenizer != trainer.end() && tokenizer->is_object()) {
      write_json(dir, kTokenizer, *tokenizer, files);
      if (const auto hf = tokenizer_to_hf(*tokenizer)) {
        write_json(dir, kHfTokenizer, *hf, files);
        write_json(dir, kHfTokenizerConfig, tokenizer_config_to_hf(config["n_positions"]), files);
      }
    }
  }
}

void write_index(const fs::path& dir, const char* stem, const std::vector<ExportFile>& files,
                 std::vector<std::string>& names) {
  for (const ExportFile& file : files) names.push_back(file.name);
  if (files.size() < 2) return;
  write_json(dir, fmt::format("{}.safetensors.index.json", stem).c_str(), tensor_files_index(files),
             names);
}

// Bytes of the file system that the files of an attempt have already.
std::int64_t allocated_bytes(const fs::path& dir) {
  std::int64_t bytes = 0;
  std::error_code error;
  for (fs::directory_iterator item(dir, error); !error && item != fs::directory_iterator();
       item.increment(error)) {
    struct stat status {};
    if (::lstat(item->path().c_str(), &status) == 0) bytes += std::int64_t{status.st_blocks} * 512;
  }
  return bytes;
}

void check_space(const fs::path& out, const Attempt& attempt,
                 const std::vector<ExportFile>& files) {
  constexpr std::int64_t kSideFiles = std::int64_t{1} << 20;  // configuration and the like
  std::int64_t needed = kSideFiles;
  for (const ExportFile& file : files) needed += file.plan.file_size;
  needed = std::max<std::int64_t>(needed - allocated_bytes(attempt.dir()), 0);
  const std::int64_t available = free_bytes(out.parent_path());
  require<IoError>(available < 0 || needed <= available,
                   "cannot write {}: {} bytes needed, {} bytes free on that file system",
                   out.string(), needed, available);
}

}  // namespace

ConsolidatePlan plan_consolidation(const fs::path& source, const ConsolidateOptions& options) {
  check_options(options);
  const Plan plan = make_plan(source, options);
  ConsolidatePlan result;
  result.source = plan.source.path;
  result.kind = plan.source.kind;
  result.skipped = plan.source.skipped;
  for (const ExportFile& file : plan.files()) {
    result.files.push_back({file.name, file.plan.file_size});
    for (const ExportTensor* tensor : file.tensors) {
      result.tensors.push_back({tensor->source_name, tensor->name, file.name, tensor->shape,
                                tensor->stored, tensor->written, tensor->bytes()});
    }
  }
  return result;
}

ConsolidateReport consolidate(const fs::path& source, const fs::path& out_path,
                              const ConsolidateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  check_options(options);
  const fs::path out = fs::absolute(out_path / "").lexically_normal().parent_path();
  check_apart(out, source);
  check_out(out, options.overwrite);
  const Plan plan = make_plan(source, options);
  check_apart(out, plan.source.path);

  const std::vector<ExportFile> files = plan.files();
  CopyOptions copy;
  copy.memory = options.memory;
  copy.jobs = options.jobs;
  copy.direct_io = options.direct_io;
  ConsolidateProgress progress;
  for (const ExportFile& file : files) progress.total += file.plan.file_size;

  ConsolidateReport report;
  report.source = plan.source.path;
  report.kind = plan.source.kind;
  report.skipped = plan.source.skipped;
  if (plan.source.checkpoint) report.step = plan.source.checkpoint->index().step;
  make_directories_durably(out.parent_path());
  Attempt attempt(out, copy_identity(files, copy_grain(copy).block));
  bool keep = !attempt.found().empty();  // a full disk is no reason to throw away what there is
  try {
    check_space(out, attempt, files);
    keep = false;
    const bool whole = copy_files(attempt, files, copy, [&](std::int64_t bytes, bool reused) {
      progress.done += bytes;
      if (reused) progress.reused += bytes;
      return !options.progress || options.progress(progress);
    });
    if (!whole) {
      throw ConsolidationStopped(
          "stopped with {} of {} bytes written; the same command goes on from there, what is "
          "done waits in {}",
          progress.done, progress.total, attempt.dir().string());
    }
    write_index(attempt.dir(), "model", plan.weight_files, report.files);
    write_index(attempt.dir(), "optimizer", plan.moment_files, report.files);
    write_side_files(attempt.dir(), plan, options, report.files);
    sync_directory(attempt.dir());
    check_out(out, options.overwrite);  // again: somebody may have used the name meanwhile
    attempt.commit();
  } catch (const ConsolidationStopped&) {
    throw;
  } catch (...) {
    if (!keep) attempt.remove();
    throw;
  }
  for (const ExportTensor& tensor : plan.source.weights) report.parameters += numel(tensor.shape);
  for (const auto* tensors : {&plan.source.weights, &plan.source.optimizer}) {
    for (const ExportTensor& tensor : *tensors) report.bytes += tensor.bytes();
    report.tensors += static_cast<std::int64_t>(tensors->size());
  }
  report.reused_bytes = progress.reused;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace tessera::io
