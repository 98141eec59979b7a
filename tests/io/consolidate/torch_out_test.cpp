// Exports for PyTorch: Distributed Checkpoints, and files of torch.save.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/byte_range.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/dcp/metadata.h"
#include "io/hf/family.h"
#include "io/pickle/pickle_reader.h"
#include "io/torch/torch_archive.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

constexpr const char* kTrainer =
    R"({"step": 7, "config": {"optim": {"lr": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 0.125,
        "weight_decay": 0.5, "lr_scale": []}}})";

struct Fixture {
  TempDir dir;
  SampleModel model = make_sample_model();
  fs::path run = dir.path() / "run", out = dir.path() / "out";
  ConsolidateOptions options;
  std::vector<std::string> warnings;

  Fixture() {
    save(model, run / "checkpoints",
         {.world_size = 2, .trainer_json = kTrainer, .chunk_bytes = 64});
    options.warn = [this](const std::string& text) { warnings.push_back(text); };
    options.memory = 128 << 10;
  }
  void export_as(ExportFormat format, ExportWhat what) {
    options.format = format;
    options.what = what;
    consolidate(run, out, options);
  }
  // Content of the only file of an export of `source`.
  std::string exported(const fs::path& source, const char* file, ConsolidateOptions with = {}) {
    const fs::path to = dir.path() / "again";
    with.overwrite = true;
    consolidate(source, to, with);
    return read_text(to / file);
  }
  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> all;
    for (const std::string& name : names_in(out)) all[name] = read_text(out / name);
    return all;
  }
};

const std::string kFirst = "transformer.h.0.attn.c_attn.weight";

TEST_CASE_FIXTURE(Fixture,
                  "a Distributed Checkpoint has the bits of the run, in files of any size") {
  for (const std::int64_t size : {std::int64_t{1}, std::int64_t{20'000}, std::int64_t{1} << 30}) {
    options.max_shard_size = size;
    options.overwrite = true;
    options.jobs = 3;
    options.memory = 3 << 17;
    export_as(ExportFormat::DCP, ExportWhat::All);
    CHECK(fs::exists(out / "__0_1.distcp") == (size < 1 << 30));
    CHECK(fs::exists(out / "config.json"));
    CHECK(exported(out, "model.safetensors") == exported(run, "model.safetensors"));

    ConsolidateOptions state;
    state.format = ExportFormat::Safetensors;
    state.what = ExportWhat::Optimizer;
    exported(out, "optimizer.safetensors", state);
    const SafetensorsReader moments(dir.path() / "again/optimizer.safetensors");
    CHECK(moments.header().tensors.size() == 3 * model.tensors.size());
    for (const auto& tensor : model.tensors) {
      std::vector<float> values(tensor.exp_avg.size());
      const auto n = static_cast<std::int64_t>(values.size());
      moments.read("exp_avg/transformer." + tensor.name, 0, n, values.data(), DType::F32);
      CHECK(values == tensor.exp_avg);
      moments.read("exp_avg_sq/transformer." + tensor.name, 0, n, values.data(), DType::F32);
      CHECK(values == tensor.exp_avg_sq);
      float step = 0;
      moments.read("step/transformer." + tensor.name, 0, 1, &step, DType::F32);
      CHECK(step == 7);
    }
  }
  CHECK(warnings.empty());
}

TEST_CASE_FIXTURE(Fixture, "names of a Distributed Checkpoint are those of torch's state dicts") {
  export_as(ExportFormat::DCP, ExportWhat::All);
  const DcpMetadata metadata = parse_dcp_metadata(read_text(out / ".metadata"), "x");
  CHECK(metadata.tensors.size() == 4 * model.tensors.size() + 1);
  CHECK(metadata.tensors.at("model." + kFirst).dtype == "float32");
  CHECK(metadata.tensors.at("model." + kFirst).top_key == "model");
  CHECK(metadata.tensors.at("optimizer.state." + kFirst + ".exp_avg").top_key == "optimizer");
  CHECK(metadata.tensors.at("optimizer.state." + kFirst + ".step").shape == Shape{});
  // The tied head is a second name of the embedding's bytes.
  const auto& head = metadata.tensors.at("model.lm_head.weight").chunks;
  const auto& embedding = metadata.tensors.at("model.transformer.wte.weight").chunks;
  REQUIRE(head.size() == 1);
  CHECK(head[0].offset == embedding[0].offset);
  CHECK(head[0].file == embedding[0].file);

  const auto has = [&](const std::string& name) {
    return std::ranges::count(metadata.objects, "optimizer.param_groups." + name) == 1;
  };
  for (const char* key : {"lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize",
                          "capturable", "differentiable", "fused", "decoupled_weight_decay"}) {
    CAPTURE(key);
    for (const std::string& group : {std::string("0."), std::string("1."), kFirst + "."})
      CHECK(has(group + key));
  }
  CHECK(has("0.params"));
  CHECK(has("1.params"));
  CHECK_FALSE(has("2.params"));
}

TEST_CASE_FIXTURE(Fixture, "hyperparameters that a source lacks are left out, with a warning") {
  const fs::path other = dir.path() / "other";
  save(model, other / "checkpoints", {.world_size = 1});
  run = other;
  export_as(ExportFormat::DCP, ExportWhat::All);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("does not say with which learning rate") != std::string::npos);
  CHECK(parse_dcp_metadata(read_text(out / ".metadata"), "x").objects.empty());
}

TEST_CASE_FIXTURE(Fixture, "a large tensor of an own model is cut into chunks of whole rows") {
  std::string bytes(4 * 300 * 100, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2654435761U >> 9);
  const CheckpointReader reader = write_tensor(dir.path() / "own/checkpoints/step-00000000",
                                               DType::F32, {300, 100}, bytes, true);
  options.format = ExportFormat::DCP;
  options.max_shard_size = 70'000;
  consolidate(reader.path(), out, options);
  const DcpMetadata metadata = parse_dcp_metadata(read_text(out / ".metadata"), "x");
  const std::vector<StoredBlock>& chunks = metadata.tensors.at("model.w").chunks;
  REQUIRE(chunks.size() == 2);
  CHECK(chunks[1].box.offsets == Shape{164, 0});
  CHECK(chunks[1].box.shape == Shape{136, 100});
  CHECK(metadata.files == std::vector<std::string>{"__0_0.distcp", "__0_1.distcp"});
  ConsolidateOptions plain;
  plain.format = ExportFormat::Safetensors;
  plain.names.strip_wrappers = true;
  CHECK(exported(out, "model.safetensors", plain).ends_with(bytes));
  CHECK(fs::exists(out / "tessera.json"));
}

TEST_CASE_FIXTURE(Fixture,
                  "files of torch.save have the bits of the run, aligned, with checksums") {
  for (const std::int64_t size : {std::int64_t{2000}, std::int64_t{1} << 30}) {
    options.max_shard_size = size;
    options.overwrite = true;
    export_as(ExportFormat::Bin, ExportWhat::Model);
    CHECK(fs::exists(out / "pytorch_model.bin.index.json") == (size == 2000));
    CHECK(exported(out, "model.safetensors") == exported(run, "model.safetensors"));
    int tensors = 0;
    for (const std::string& name : names_in(out)) {
      if (!name.ends_with(".bin")) continue;
      const std::string content = read_text(out / name);
      const ByteRange range(content, name);
      const TorchArchive archive(range, kMaxTorchDict);
      PickleReader(archive.root(), name)
          .for_each([&](const PickleValue& key, const PickleValue& value) {
            const TorchTensor tensor = archive.tensor(value, std::string(key.text()));
            CHECK(tensor.begin % 64 == 0);
            CHECK(tensor.crc32.has_value());
            ++tensors;
          });
    }
    CHECK(tensors == static_cast<int>(model.tensors.size()));
  }
  const fs::path file = out / "pytorch_model.bin";
  flip_bit(file, static_cast<std::int64_t>(fs::file_size(file)) / 2);
  CHECK_THROWS_AS(exported(out, "model.safetensors"), CorruptCheckpoint);
}

TEST_CASE_FIXTURE(Fixture, "weights of torch.save are converted") {
  options.dtype = DType::BF16;
  export_as(ExportFormat::Bin, ExportWhat::Model);
  CHECK(Json::parse(read_text(out / "config.json"))["torch_dtype"] == "bfloat16");
  ConsolidateOptions bf16;
  bf16.dtype = DType::BF16;
  CHECK(exported(out, "model.safetensors") == exported(run, "model.safetensors", bf16));
}

TEST_CASE_FIXTURE(Fixture,
                  "optimizer.bin is the state dict of an AdamW of the model's parameters") {
  export_as(ExportFormat::Bin, ExportWhat::Optimizer);
  CHECK_FALSE(fs::exists(out / "pytorch_model.bin"));
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("has one group of parameters") != std::string::npos);
  const std::string content = read_text(out / "optimizer.bin");
  const ByteRange range(content, "x");
  const TorchArchive archive(range, kMaxTorchDict);
  const PickleReader root(archive.root(), "x");
  const PickleValue& group = *root.at("param_groups").expect(PickleKind::List).items()[0];
  const auto params = group.find("params")->items();
  const auto names = group.find("param_names")->items();
  REQUIRE(names.size() == model.tensors.size());
  for (std::size_t i = 0; i < params.size(); ++i)
    CHECK(params[i]->integer == static_cast<std::int64_t>(i));
  CHECK(names[0]->text() == "transformer.wte.weight");
  for (const char* key : {"lr", "eps", "weight_decay"})
    CHECK(group.find(key)->is(PickleKind::Float));
  CHECK(group.find("betas")->items().size() == 2);

  const auto states = root.at("state").expect(PickleKind::Dict).items();
  REQUIRE(states.size() == 2 * names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    CHECK(states[2 * i]->integer == static_cast<std::int64_t>(i));
    const PickleValue& state = *states[2 * i + 1];
    const auto& ours = model.at(std::string(names[i]->text().substr(12)));
    for (const auto& [kind, expected] :
         {std::pair("exp_avg", ours.exp_avg), std::pair("exp_avg_sq", ours.exp_avg_sq),
          std::pair("step", std::vector<float>{7})}) {
      const TorchTensor tensor = archive.tensor(*state.find(kind), kind);
      CHECK(tensor.shape ==
            (expected.size() == 1 && kind == std::string("step") ? Shape{} : ours.shape));
      std::vector<float> values(expected.size());
      std::memcpy(values.data(), content.data() + tensor.begin, 4 * values.size());
      CHECK(values == expected);
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "hyperparameters of a Distributed Checkpoint are kept, by groups") {
  export_as(ExportFormat::DCP, ExportWhat::All);
  const DcpMetadata first = parse_dcp_metadata(read_text(out / ".metadata"), "x");
  run = out;
  out = dir.path() / "bin";
  export_as(ExportFormat::Bin, ExportWhat::Optimizer);
  CHECK(warnings.empty());
  const std::string content = read_text(out / "optimizer.bin");
  const ByteRange range(content, "x");
  const TorchArchive archive(range, kMaxTorchDict);
  const auto groups =
      PickleReader(archive.root(), "x").at("param_groups").expect(PickleKind::List).items();
  REQUIRE(groups.size() == 2);
  std::int64_t number = 0;
  for (std::size_t g = 0; g < 2; ++g) {
    CHECK(groups[g]->find("lr")->real == 0.25);
    CHECK(groups[g]->find("weight_decay")->real == (g == 0 ? 0.5 : 0.0));
    CHECK(groups[g]->find("betas")->items()[1]->real == 0.75);
    CHECK(groups[g]->find("amsgrad")->is(PickleKind::Bool));
    for (const PickleValue* param : groups[g]->find("params")->items())
      CHECK(param->integer == number++);
    const std::string_view name = groups[g]->find("param_names")->items()[0]->text();
    CHECK(name == (g == 0 ? "transformer.wte.weight" : "transformer.h.0.ln_1.weight"));
  }
  CHECK(number == static_cast<std::int64_t>(model.tensors.size()));

  out = dir.path() / "dcp";
  for (const bool strip : {true, false}) {  // also under the names of the source
    options.names.strip_wrappers = strip;
    options.overwrite = true;
    export_as(ExportFormat::DCP, ExportWhat::All);
    const DcpMetadata again = parse_dcp_metadata(read_text(out / ".metadata"), "x");
    CHECK(again.objects == first.objects);
    REQUIRE(again.tensors.size() == first.tensors.size());
    for (const auto& [key, tensor] : first.tensors) CHECK(again.tensors.contains(key));
  }
  CHECK(warnings.empty());
}

TEST_CASE_FIXTURE(Fixture, "a damaged hyperparameter is an error that names it") {
  export_as(ExportFormat::DCP, ExportWhat::All);
  std::string content = read_text(out / "__0_0.distcp");
  const DcpMetadata metadata = parse_dcp_metadata(read_text(out / ".metadata"), "x");
  const auto place = std::ranges::find(metadata.hyperparameters, "optimizer.param_groups.0.eps",
                                       &std::pair<std::string, StoredBlock>::first);
  REQUIRE(place != metadata.hyperparameters.end());
  content[static_cast<std::size_t>(place->second.offset)] = '?';
  content[static_cast<std::size_t>(place->second.offset + place->second.length - 22)] = '?';
  write_text(out / "__0_0.distcp", content);
  run = out;
  out = dir.path() / "bin";
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "optimizer.param_groups.0.eps: ",
                       export_as(ExportFormat::Bin, ExportWhat::Optimizer));
  export_as(ExportFormat::Safetensors, ExportWhat::Model);
}

struct ShardFixture : Fixture {
  std::vector<DcpEntry> entries{{"w", "F32", {2}, "AAAAaaaa"},
                                {"none", "F32", {0, 3}, ""},
                                {"optimizer.state.w.momentum_buffer", "F32", {2}, "MMMMmmmm"}};
  ShardFixture() {
    run = dir.path() / "shards";
    fs::create_directories(run);
    options.overwrite = true;
  }
  ConsolidateReport write(ExportFormat format, ExportWhat what) {
    write_dcp_shard(run / "shard-00001-model-00001-of-00001.safetensors", entries);
    options.format = format;
    options.what = what;
    return consolidate(run, out, options);
  }
};

TEST_CASE_FIXTURE(ShardFixture, "reports count tensors without elements") {
  write_text(dir.path() / "config.json", R"({"model_type": "own"})");
  for (const ExportFormat format :
       {ExportFormat::Safetensors, ExportFormat::DCP, ExportFormat::Bin}) {
    if (format != ExportFormat::Safetensors) options.config_file = dir.path() / "config.json";
    CHECK(write(format, ExportWhat::Model).tensors == 2);
  }
}

TEST_CASE_FIXTURE(ShardFixture, "the kind of state may have a slash, as its weight may") {
  entries[0].name = "a/w";
  entries[2].name = "optimizer.state.a/w.my/kind";
  write(ExportFormat::DCP, ExportWhat::All);
  const DcpMetadata metadata = parse_dcp_metadata(read_text(out / ".metadata"), "x");
  CHECK(metadata.tensors.contains("optimizer.state.a/w.my/kind"));
  CHECK(metadata.tensors.contains("model.a/w"));
  entries[2].name = "optimizer.my/state";
  CHECK_THROWS_HOLDING(Unsupported, "is optimizer state of no weight",
                       write(ExportFormat::DCP, ExportWhat::All));
}

TEST_CASE_FIXTURE(ShardFixture, "state of another optimizer than AdamW is said to be so") {
  write(ExportFormat::DCP, ExportWhat::All);
  REQUIRE(warnings.size() >= 2);
  CHECK(std::ranges::any_of(warnings, [](const std::string& text) {
    return text.find("is momentum_buffer, and not AdamW's exp_avg and exp_avg_sq") !=
           std::string::npos;
  }));
}

TEST_CASE_FIXTURE(Fixture, "an interrupted export for PyTorch resumes to the same bytes") {
  for (const ExportFormat format : {ExportFormat::DCP, ExportFormat::Bin}) {
    options.max_shard_size = 4000;
    options.overwrite = true;
    export_as(format, ExportWhat::All);
    const auto expected = contents();
    options.progress = [](const ConsolidateProgress& at) { return at.done < at.total / 2; };
    CHECK_THROWS_AS(consolidate(run, out, options), ConsolidationStopped);
    options.progress = nullptr;
    CHECK(consolidate(run, out, options).reused_bytes > 0);
    CHECK(contents() == expected);
  }
}

TEST_CASE_FIXTURE(Fixture, "files of other programs are not replaced") {
  options.overwrite = true;
  for (const auto& [format, file] : {std::pair(ExportFormat::DCP, "__0_0.distcp"),
                                     std::pair(ExportFormat::Bin, "pytorch_model.bin")}) {
    export_as(format, ExportWhat::Model);
    std::string content = read_text(out / file);
    content.replace(content.find("tessera_export"), 14, "somebody_elses");
    write_text(out / file, content);
    CHECK_THROWS_HOLDING(InvalidArgument, "does not name tessera as its writer",
                         consolidate(run, out, options));
    fs::remove_all(out);
  }
}

TEST_CASE_FIXTURE(Fixture, "numbers of an own model's parameters are unknown") {
  model.config = R"({"arch": "own"})";
  save(model, dir.path() / "own/checkpoints", {.world_size = 1, .trainer_json = kTrainer});
  run = dir.path() / "own";
  write_text(dir.path() / "config.json", R"({"model_type": "own"})");
  options.config_file = dir.path() / "config.json";
  CHECK_THROWS_HOLDING(Unsupported, "--format dcp", export_as(ExportFormat::Bin, ExportWhat::All));
  export_as(ExportFormat::DCP, ExportWhat::All);  // goes by names
  CHECK(parse_dcp_metadata(read_text(out / ".metadata"), "x")
            .tensors.contains("optimizer.state.wte.weight.exp_avg"));
}

TEST_CASE("memory of exports for PyTorch is bounded") {
  for (const ExportFormat format : {ExportFormat::DCP, ExportFormat::Bin}) {
    TempDir dir;
    const fs::path own = dir.path() / "own/checkpoints/step-00000000";
    write_tensor(own, DType::F32, {12'000, 1000}, std::string(48'000'000, 'x'));
    write_text(dir.path() / "config.json", R"({"model_type": "own"})");
    CHECK(in_child([&] {
            rusage before{}, after{};
            ::getrusage(RUSAGE_SELF, &before);
            ConsolidateOptions options;
            options.memory = 4 << 20;
            options.format = format;
            if (format == ExportFormat::Bin) options.config_file = dir.path() / "config.json";
            consolidate(own, dir.path() / "out", options);
            ::getrusage(RUSAGE_SELF, &after);
            return after.ru_maxrss - before.ru_maxrss < 24 * 1024 ? 0 : 1;  // KiB
          }) == 0);
  }
}

TEST_CASE("parameters are in the order of transformers") {
  const auto layer = [](const char* rest) { return std::string("model.layers.0.") + rest; };
  CHECK(parameter_order({"model.embed_tokens.weight", layer("input_layernorm.weight"),
                         layer("self_attn.q_proj.weight"), layer("self_attn.k_proj.weight"),
                         layer("self_attn.q_proj.bias"), layer("self_attn.k_proj.bias"),
                         layer("mlp.down_proj.weight"), "model.layers.1.mlp.down_proj.weight",
                         "model.layers.1.self_attn.o_proj.weight", "model.norm.weight",
                         "lm_head.weight"}) ==
        std::vector<std::string>{
            "model.embed_tokens.weight", layer("self_attn.q_proj.weight"),
            layer("self_attn.q_proj.bias"), layer("self_attn.k_proj.weight"),
            layer("self_attn.k_proj.bias"), layer("mlp.down_proj.weight"),
            layer("input_layernorm.weight"), "model.layers.1.self_attn.o_proj.weight",
            "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"});
  CHECK(parameter_order({layer("mlp.experts.0.gate_proj.weight")}).empty());
}

}  // namespace
}  // namespace tessera::io
