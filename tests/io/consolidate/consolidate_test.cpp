#include "io/consolidate/consolidate.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <thread>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/copy_files.h"
#include "io/hf/family.h"
#include "io/hf/model_source.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

void check_equal(const ModelSource& source, const SampleModel& model) {
  for (const auto& tensor : model.tensors) {
    std::vector<float> values(tensor.weight.size());
    source.read(tensor.name, 0, static_cast<std::int64_t>(values.size()), values.data(),
                DType::F32);
    CHECK(values == tensor.weight);
  }
}

struct Fixture {
  TempDir dir;
  SampleModel model = make_sample_model();
  fs::path run = dir.path() / "run";
  fs::path out = dir.path() / "out";
  fs::path make(int world_size, bool optimizer = true, const char* trainer = R"({"step": 7})") {
    return save(model, run / "checkpoints",
                {.world_size = world_size,
                 .optimizer = optimizer,
                 .trainer_json = trainer,
                 .chunk_bytes = world_size == 1 ? 0 : 64});
  }
};

TEST_CASE("shards of any world size give the same model, with any buffers and threads") {
  std::set<std::string> contents;
  for (int world_size = 1; world_size <= 4; ++world_size) {
    Fixture f;
    f.make(world_size);
    ConsolidateOptions options;
    options.memory = world_size * 128 << 10;  // the least for each thread
    options.jobs = world_size;
    std::int64_t last = 0, total = 0;
    options.progress = [&](const ConsolidateProgress& progress) {
      CHECK(progress.done > last);
      CHECK(progress.reused == 0);
      last = progress.done;
      total = progress.total;
      return true;
    };
    const ConsolidateReport report = consolidate(f.run, f.out, options);
    CHECK(report.step == 7);
    CHECK(report.bytes < total);  // total includes headers
    CHECK(last == total);
    CHECK(report.parameters * 4 == report.bytes);
    check_equal(*open_model(f.out), f.model);
    CHECK(open_model(f.out)->config() == Json::parse(f.model.config));
    contents.insert(read_text(f.out / "model.safetensors"));
    CHECK_FALSE(fs::exists(f.out / "tokenizer_tessera.json"));
  }
  CHECK(contents.size() == 1);
}

TEST_CASE("files are split at the size limit and listed in an index") {
  Fixture f;
  f.make(2);
  ConsolidateOptions options;
  options.max_shard_size = 2000;
  const ConsolidateReport report = consolidate(f.run, f.out, options);
  const Json index = Json::parse(read_text(f.out / "model.safetensors.index.json"));
  CHECK(index["metadata"]["total_size"] == report.bytes);
  CHECK(index["weight_map"].size() == f.model.tensors.size());
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    const SafetensorsReader reader(f.out / file.get<std::string>());
    CHECK(reader.find(name) != nullptr);
    std::int64_t bytes = 0;
    for (const auto& tensor : reader.header().tensors) bytes += tensor.end - tensor.begin;
    CHECK((bytes <= 2000 || reader.header().tensors.size() == 1));
    files.insert(file);
  }
  CHECK(files.size() > 2);
  CHECK(files.contains(fmt::format("model-00001-of-{:05}.safetensors", files.size())));
  check_equal(*open_model(f.out), f.model);
}

TEST_CASE("weights are converted to bf16") {
  Fixture f;
  f.make(3);
  ConsolidateOptions options;
  options.dtype = DType::BF16;
  consolidate(f.run, f.out, options);
  CHECK(Json::parse(read_text(f.out / "config.json"))["torch_dtype"] == "bfloat16");
  const auto source = open_model(f.out);
  for (const TensorInfo& tensor : source->tensors()) {
    CHECK(tensor.dtype == DType::BF16);
    std::vector<float> values(static_cast<std::size_t>(numel(tensor.shape)));
    source->read(tensor.name, 0, numel(tensor.shape), values.data(), DType::F32);
    const auto& expected = f.model.at(tensor.name).weight;
    for (std::size_t i = 0; i < values.size(); ++i) {
      CHECK(values[i] == static_cast<float>(BFloat16(expected[i])));
    }
  }
}

TEST_CASE("optimizer state is written to a file of its own") {
  Fixture f;
  const fs::path checkpoint = f.make(2);
  ConsolidateOptions options;
  options.what = ExportWhat::All;
  CHECK_THROWS_HOLDING(InvalidArgument, "--format safetensors", consolidate(f.run, f.out, options));
  options.format = ExportFormat::Safetensors;
  consolidate(f.run, f.out, options);
  const SafetensorsReader weights(f.out / "model.safetensors"),
      moments(f.out / "optimizer.safetensors");
  for (const auto& tensor : f.model.tensors) {
    std::vector<float> values(tensor.weight.size());
    const auto size = static_cast<std::int64_t>(values.size());
    weights.read(tensor.name, 0, size, values.data(), DType::F32);
    CHECK(values == tensor.weight);
    moments.read("exp_avg/" + tensor.name, 0, size, values.data(), DType::F32);
    CHECK(values == tensor.exp_avg);
    moments.read("exp_avg_sq/" + tensor.name, 0, size, values.data(), DType::F32);
    CHECK(values == tensor.exp_avg_sq);
  }
  CHECK(Json::parse(read_text(f.out / "tessera.json")) ==
        Json{{"step", 7}, {"model", Json::parse(f.model.config)}});
  CHECK_FALSE(fs::exists(f.out / "config.json"));

  Fixture weights_only;
  weights_only.make(1, false);
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no optimizer state",
                       consolidate(weights_only.run, weights_only.out, options));
}

TEST_CASE("chosen tensors are exported with their moments, and the others are reported") {
  Fixture f;
  f.make(2);
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::All;
  options.tensors = {"h.1.attn.*", "wte.weight"};
  const ConsolidatePlan plan = plan_consolidation(f.run, options);
  std::set<std::string> planned, skipped;
  for (const auto& tensor : plan.tensors) planned.insert(tensor.name);
  for (const SkippedEntry& entry : plan.skipped) {
    CHECK(entry.why == "not selected by --tensors");
    skipped.insert(entry.name);
  }
  std::set<std::string> expected, left;
  for (const auto& tensor : f.model.tensors) {
    if (!tensor.name.starts_with("h.1.attn.") && tensor.name != "wte.weight") {
      left.insert(tensor.name);
      continue;
    }
    for (const char* kind : {"", "exp_avg/", "exp_avg_sq/"}) expected.insert(kind + tensor.name);
  }
  CHECK(expected.size() == 3 * 5);
  CHECK(planned == expected);
  CHECK(skipped == left);

  const ConsolidateReport report = consolidate(f.run, f.out, options);
  CHECK(report.tensors == 15);
  const SafetensorsReader weights(f.out / "model.safetensors");
  CHECK(weights.header().tensors.size() == 5);
  std::vector<float> values(f.model.at("wte.weight").weight.size());
  weights.read("wte.weight", 0, static_cast<std::int64_t>(values.size()), values.data(),
               DType::F32);
  CHECK(values == f.model.at("wte.weight").weight);

  options.tensors = {"h.1.*", "h.2.*", "lm_head"};
  CHECK_THROWS_HOLDING(InvalidArgument, "--tensors: h.2.*, lm_head match no tensor of ",
                       plan_consolidation(f.run, options));
  ConsolidateOptions hf;
  hf.tensors = {"h.1.*"};
  CHECK_THROWS_HOLDING(InvalidArgument, "--tensors selects some; choose --format safetensors",
                       plan_consolidation(f.run, hf));
}

TEST_CASE("the run's tokenizer is exported, for tessera and for Hugging Face's programs") {
  Fixture f;
  f.make(1, true, R"({"tokenizer": {"type": "chars", "vocabulary": "ab\u00e4"}})");
  consolidate(f.run, f.out);
  const auto read = [&](const char* name) { return Json::parse(read_text(f.out / name)); };
  CHECK(read("tokenizer_tessera.json")["vocabulary"] == "ab\u00e4");
  CHECK(read("tokenizer.json")["model"]["vocab"] == Json{{"a", 0}, {"b", 1}, {"\u00e4", 2}});
  CHECK(read("tokenizer_config.json")["model_max_length"] ==
        Json::parse(f.model.config)["seq_len"]);
  ConsolidateOptions options;
  options.overwrite = true;
  consolidate(f.run, f.out, options);  // recognized as an export and replaced

  // A kind without a Hugging Face counterpart, unknown to this build.
  f.make(1, true, R"({"tokenizer": {"type": "other"}})");
  consolidate(f.run, f.out, options);
  CHECK(read("tokenizer_tessera.json")["type"] == "other");
  CHECK_FALSE(fs::exists(f.out / "tokenizer.json"));
}

TEST_CASE("only an export is replaced, and only on request") {
  Fixture f;
  f.make(1);
  consolidate(f.run, f.out);
  const std::string before = read_text(f.out / "model.safetensors");
  CHECK_THROWS_HOLDING(InvalidArgument, "replace it with --overwrite", consolidate(f.run, f.out));
  ConsolidateOptions options;
  options.overwrite = true;
  options.dtype = DType::BF16;
  consolidate(f.run, f.out, options);
  CHECK(read_text(f.out / "model.safetensors") != before);
  CHECK_THROWS_HOLDING(InvalidArgument, "contains the source", consolidate(f.run, f.run, options));
  CHECK_THROWS_HOLDING(InvalidArgument, "contains the source",
                       consolidate(f.run, f.dir.path(), options));
  write_text(f.out / "diary.txt", "dear");
  CHECK_THROWS_HOLDING(InvalidArgument, "contains diary.txt", consolidate(f.run, f.out, options));
  CHECK(read_text(f.out / "diary.txt") == "dear");
}

TEST_CASE("a checkpoint or a foreign directory is not mistaken for an export") {
  Fixture f;
  const fs::path checkpoint = f.make(1);
  const fs::path other = save(f.model, f.dir.path() / "other", {.step = 9});
  ConsolidateOptions options;
  options.overwrite = true;
  const auto refuse = [&](const fs::path& out, const char* expected) {
    CHECK_THROWS_HOLDING(InvalidArgument, expected, consolidate(f.run, out, options));
  };
  refuse(other, "which is not part of an export");
  CHECK(fs::exists(other / "index.json"));
  refuse(checkpoint, "which is not part of an export");
  CHECK(fs::exists(checkpoint / "index.json"));

  fs::create_directories(f.out);
  write_text(f.out / "config.json", "{}");
  refuse(f.out, "is not a complete export");
  write_text(f.out / "package.json", "{}");
  refuse(f.out, "contains package.json");
  fs::remove(f.out / "package.json");
  write_text(f.out / "other.safetensors", "x");
  refuse(f.out, "contains other.safetensors");
  CHECK(read_text(f.out / "config.json") == "{}");
  fs::remove_all(f.out);
  fs::create_directories(f.out);
  consolidate(f.run, f.out, options);
  check_equal(*open_model(f.out), f.model);

  // OUT is a link to the run's newest checkpoint.
  fs::create_directory_symlink(checkpoint, f.dir.path() / "link");
  CHECK_THROWS_HOLDING(InvalidArgument, "contains the source",
                       consolidate(checkpoint, f.dir.path() / "link", options));
}

TEST_CASE("multi-file exports and tessera's own format are replaced") {
  Fixture f;
  f.make(2);
  ConsolidateOptions options;
  options.overwrite = true;
  options.max_shard_size = 2000;
  consolidate(f.run, f.out, options);
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::Optimizer;
  consolidate(f.run, f.out, options);
  CHECK_FALSE(fs::exists(f.out / "config.json"));
  options.max_shard_size = 1 << 30;
  const ConsolidateReport report = consolidate(f.run, f.out, options);
  CHECK(report.files == std::vector<std::string>{"optimizer.safetensors", "tessera.json"});
}

TEST_CASE("a damaged shard stops the export and leaves no output") {
  Fixture f;
  const fs::path checkpoint = f.make(2);
  const fs::path shard = checkpoint / "rank-00001-of-00002.safetensors";
  const auto reader = CheckpointReader::open(checkpoint);
  for (const auto& [name, tensor] : reader.tensors(kModelSection)) {
    const Chunk& chunk = tensor.chunks.back();
    if (chunk.file != shard.filename()) continue;
    flip_bit(shard, chunk.byte_begin);
    break;
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "rank-00001-of-00002.safetensors",
                       consolidate(f.run, f.out));
  std::size_t left = 0;
  for (const auto& item : fs::directory_iterator(f.dir.path())) left += item.path() != f.run;
  CHECK(left == 0);
}

// Exports in a child with a resource limit, not as root. @return its exit status
int consolidate_limited(const Fixture& f, const ConsolidateOptions& options, auto resource,
                        rlim_t limit) {
  fs::permissions(f.dir.path(), fs::perms::all);
  const int status = in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 2;
    const rlimit limits{limit, limit};
    ::setrlimit(resource, &limits);
    try {
      if (resource == RLIMIT_NPROC) {
        std::thread([] {}).join();
        return 3;  // the limit has no effect
      }
    } catch (const std::system_error&) {
    }
    return consolidate(f.run, f.out, options).files.size() > 20 ? 0 : 4;
  });
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST_CASE("more files than may be open, and more threads than may be started") {
  Fixture f;
  f.make(2);
  ConsolidateOptions options;
  options.max_shard_size = 1;
  options.jobs = 4;
  SUBCASE("files") { CHECK(consolidate_limited(f, options, RLIMIT_NOFILE, 20) == 0); }
  SUBCASE("threads") { CHECK(consolidate_limited(f, options, RLIMIT_NPROC, 1) == 0); }
  check_equal(*open_model(f.out), f.model);
}

// Copies 48 MiB of weights in a process that may grow by 24 MiB.
TEST_CASE("memory is bounded for any model size") {
  TempDir dir;
  SampleModel model;
  const Json config = {{"arch", "gpt2"},         {"n_layer", 1},         {"n_head", 1},
                       {"n_embd", 64},           {"vocab_size", 200000}, {"seq_len", 8},
                       {"layer_norm_eps", 1e-5}, {"dropout", 0.0}};
  model.config = config.dump();
  for (const TensorInfo& info : model_tensors(config)) {
    const auto size = static_cast<std::size_t>(numel(info.shape));
    model.tensors.push_back({info.name, info.shape, std::vector<float>(size, 0.5F), {}, {}});
  }
  const fs::path checkpoint = save(model, dir.path(), {.world_size = 2, .optimizer = false});
  model.tensors.clear();
  CHECK(in_child([&] {
          rusage before{}, after{};
          ::getrusage(RUSAGE_SELF, &before);
          ConsolidateOptions options;
          options.memory = 4 << 20;
          options.dtype = DType::BF16;
          consolidate(checkpoint, dir.path() / "out", options);
          ::getrusage(RUSAGE_SELF, &after);
          return after.ru_maxrss - before.ru_maxrss < 24 * 1024 ? 0 : 1;  // KiB
        }) == 0);
  CHECK(fs::file_size(dir.path() / "out" / "model.safetensors") > 24'000'000);
}

}  // namespace
}  // namespace tessera::io
