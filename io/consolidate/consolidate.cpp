#include "io/consolidate/consolidate.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/tensor_files.h"
#include "io/hf/model_source.h"

namespace tessera::io {
namespace {

constexpr const char* kOwnConfig = "tessera.json";
constexpr const char* kTokenizer = "tokenizer_tessera.json";

/// Everything that is to be written, and where it comes from.
struct Plan {
  std::unique_ptr<ModelSource> model;
  std::vector<ExportTensor> weights, moments;
  std::int64_t total_bytes() const {
    std::int64_t bytes = 0;
    for (const auto* list : {&weights, &moments}) {
      for (const ExportTensor& tensor : *list) {
        bytes += numel(tensor.shape) * static_cast<std::int64_t>(dtype_size(tensor.written));
      }
    }
    return bytes;
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
    const bool ours = item.is_regular_file() && (is_config || is_tensors || name == kTokenizer ||
                                                 name == "generation_config.json");
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
  plan.model = open_model(source, options.step);
  if (options.what != ExportWhat::Optimizer) {
    for (const TensorInfo& info : plan.model->tensors()) {
      const bool hf = options.format == ExportFormat::HF;
      plan.weights.push_back(
          {hf ? gpt2_name_to_hf(info.name) : info.name, info.shape, info.dtype,
           options.dtype.value_or(info.dtype),
           [model = plan.model.get(), name = info.name](std::size_t bytes, const auto& sink) {
             model->stream(name, bytes, sink);
           }});
    }
  }
  if (options.what != ExportWhat::Model) {
    const CheckpointReader* reader = plan.model->checkpoint();
    require(reader != nullptr, "{} is a Hugging Face model and holds no optimizer state",
            plan.model->path().string());
    for (const Section section : {Section::ExpAvg, Section::ExpAvgSq}) {
      const char* const prefix = section == Section::ExpAvg ? "exp_avg/" : "exp_avg_sq/";
      for (const auto& [name, record] : reader->tensors(section)) {
        plan.moments.push_back({prefix + name, record.shape, record.dtype, record.dtype,
                                [reader, section, key = name](std::size_t bytes, const auto& sink) {
                                  reader->stream(section, key, bytes, sink);
                                }});
      }
    }
  }
  return plan;
}

void write_json(const fs::path& dir, const char* name, const Json& json,
                std::vector<std::string>& files) {
  write_file_atomically(dir / name, json.dump(2) + "\n");
  files.emplace_back(name);
}

void write_side_files(const fs::path& dir, const Plan& plan, const ConsolidateOptions& options,
                      std::vector<std::string>& files) {
  const CheckpointReader* reader = plan.model->checkpoint();
  if (options.format == ExportFormat::Safetensors) {
    Json own{{"model", plan.model->config()}};
    if (reader) own["step"] = reader->index().step;
    write_json(dir, kOwnConfig, own, files);
    return;
  }
  const Json config = gpt2_config_to_hf(plan.model->config(), plan.weights.front().written);
  write_json(dir, "config.json", config, files);
  Json generation{{"_from_model_config", true}};
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (!config[key].is_null()) generation[key] = config[key];
  }
  write_json(dir, "generation_config.json", generation, files);
  if (reader && reader->index().trainer) {
    const std::string source = (reader->path() / reader->index().trainer->file).string();
    const Json trainer = parse_json(reader->trainer_json(), source);
    const auto tokenizer = trainer.find("tokenizer");
    if (tokenizer != trainer.end() && tokenizer->is_object()) {
      write_json(dir, kTokenizer, *tokenizer, files);
    }
  }
}

// Where an export of this process to `out` is made. Process ids mean something on one host only.
std::string temporary_prefix(const fs::path& out) {
  std::array<char, 65> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("{}.{}-", out.filename().string(), host.data());
}

// What exports to `out` left behind that were killed. One that runs, or ran on another host, stays.
void remove_leftovers(const fs::path& out) {
  const std::string prefix = temporary_prefix(out);
  std::vector<fs::path> leftovers;
  std::error_code error;
  fs::directory_iterator items(out.parent_path(), error);
  for (; !error && items != fs::directory_iterator(); items.increment(error)) {
    const std::string name = items->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    pid_t pid = 0;
    const char* const end = name.data() + name.size();
    const auto [stop, failure] = std::from_chars(name.data() + prefix.size(), end, pid);
    const bool ours = failure == std::errc{} && std::string_view(stop, end) == ".tmp" && pid > 0;
    if (ours && ::kill(pid, 0) != 0 && errno == ESRCH) leftovers.push_back(items->path());
  }
  for (const fs::path& path : leftovers) fs::remove_all(path, error);
}

void commit(const fs::path& temporary, const fs::path& out, bool overwrite) {
  sync_directory(temporary);
  check_out(out, overwrite);  // again: somebody may have used the name meanwhile
  std::error_code error;
  if (fs::exists(out, error)) {
    exchange_paths(temporary, out);
    sync_directory(out.parent_path());
    fs::remove_all(temporary, error);
  } else {
    rename_path(temporary, out);
    sync_directory(out.parent_path());
  }
}

}  // namespace

ConsolidateReport consolidate(const fs::path& source, const fs::path& out_path,
                              const ConsolidateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  check_options(options);
  const fs::path out = fs::absolute(out_path / "").lexically_normal().parent_path();
  check_apart(out, source);
  check_out(out, options.overwrite);
  const Plan plan = make_plan(source, options);
  check_apart(out, plan.model->path());

  ConsolidateReport report;
  report.source = plan.model->path();
  if (const CheckpointReader* reader = plan.model->checkpoint()) report.step = reader->index().step;
  remove_leftovers(out);  // before their space is missed
  const std::int64_t total = plan.total_bytes();
  const std::int64_t available = free_bytes(out.parent_path());
  require<IoError>(available < 0 || total <= available,
                   "cannot write {}: {} bytes needed, {} bytes free on that file system",
                   out.string(), total, available);

  TensorFilesOptions files;
  files.max_shard_size = options.max_shard_size;
  files.memory = options.memory;
  files.jobs = options.jobs;
  files.wrote = [&](std::int64_t bytes) {
    report.bytes += bytes;
    if (options.progress) options.progress(report.bytes, total);
  };
  const fs::path temporary =
      out.parent_path() / fmt::format("{}{}.tmp", temporary_prefix(out), ::getpid());
  std::error_code error;
  fs::remove_all(temporary, error);
  make_directories_durably(temporary);
  try {
    const auto write = [&](const std::vector<ExportTensor>& tensors, const char* stem) {
      if (tensors.empty()) return;
      files.stem = stem;
      for (std::string& name : write_tensor_files(temporary, tensors, files)) {
        report.files.push_back(std::move(name));
      }
      report.tensors += static_cast<std::int64_t>(tensors.size());
    };
    write(plan.weights, "model");
    write(plan.moments, "optimizer");
    write_side_files(temporary, plan, options, report.files);
    commit(temporary, out, options.overwrite);
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
  for (const ExportTensor& tensor : plan.weights) report.parameters += numel(tensor.shape);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace tessera::io
