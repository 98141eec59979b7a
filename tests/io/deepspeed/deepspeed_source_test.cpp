#include "io/deepspeed/deepspeed_source.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/consolidate/consolidate.h"
#include "io/deepspeed/files.h"
#include "io/hf/model_source.h"
#include "io/source/open_sharded.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kDeepSpeed = test::source_path("tests/io/deepspeed/fixtures");
constexpr const char* kStep = "global_step2";

/// A copy of a fixture to damage.
struct RunCopy {
  TempDir dir;
  fs::path path, folder;
  explicit RunCopy(const char* name) : path(dir.path() / name), folder(path / kStep) {
    fs::copy(kDeepSpeed / name, path, fs::copy_options::recursive);
  }
  fs::path optimizer(int rank) const {
    const std::string name = fmt::format("zero_pp_rank_{}_mp_rank_00_optim_states.pt", rank);
    return is_there(folder / name) ? folder / name : folder / ("bf16_" + name);
  }
};

std::string all_bytes(const TensorSource& source, const TensorInfo& tensor) {
  const std::int64_t n = numel(tensor.shape);
  std::string bytes(static_cast<std::size_t>(n) * dtype_size(tensor.dtype), '?');
  source.read(tensor.name, 0, n, bytes.data(), tensor.dtype);
  return bytes;
}

std::string bytes_in(const SafetensorsReader& file, const SafetensorsEntry& entry) {
  std::string bytes(static_cast<std::size_t>(entry.end - entry.begin), '?');
  file.file().read(entry.begin, bytes.data(), bytes.size());
  return bytes;
}

TEST_CASE("DeepSpeed's checkpoints are read as the ranks' tensors were in memory") {
  const std::map<std::string, std::string> kinds = {{"none", "DeepSpeed checkpoint without ZeRO"},
                                                    {"zero1", "DeepSpeed ZeRO-1 checkpoint"},
                                                    {"zero2", "DeepSpeed ZeRO-2 checkpoint"},
                                                    {"zero3", "DeepSpeed ZeRO-3 checkpoint"},
                                                    {"zero3-gpt2", "DeepSpeed ZeRO-3 checkpoint"}};
  for (const auto& each : kinds) {  // clang 14 captures no structured bindings
    const std::string &name = each.first, &kind = each.second;
    CAPTURE(name);
    const SafetensorsReader expected(kDeepSpeed / name / "expected.safetensors.golden");
    for (const fs::path& path : {kDeepSpeed / name, kDeepSpeed / name / kStep}) {
      const auto source = open_sharded(path);
      REQUIRE(source != nullptr);
      CHECK(source->kind() == kind);
      CHECK(source->tensors().size() == expected.header().tensors.size());
      for (const TensorInfo& tensor : source->tensors()) {
        CAPTURE(tensor.name);
        std::string short_name = tensor.name;
        if (short_name.starts_with("optimizer.state.")) {
          const std::size_t dot = short_name.rfind('.');
          short_name =
              fmt::format("{}/{}", short_name.substr(dot + 1), short_name.substr(16, dot - 16));
        }
        const SafetensorsEntry* const entry = expected.find(short_name);
        REQUIRE(entry != nullptr);
        CHECK(entry->dtype == tensor.dtype);
        CHECK(entry->shape == tensor.shape);
        CHECK(all_bytes(*source, tensor) == bytes_in(expected, *entry));
      }
    }
  }
}

TEST_CASE("ranges of a tensor match the whole, across boundaries of ranks inside rows") {
  for (const char* name : {"zero2", "zero3"}) {
    const auto source = open_sharded(kDeepSpeed / name);
    std::vector<float> whole(91);
    source->read("embed.weight", 0, 91, whole.data(), DType::F32);
    for (std::int64_t begin = 0; begin < 91; ++begin) {
      for (std::int64_t end = begin + 1; end <= 91; end += 7) {
        std::vector<float> part(static_cast<std::size_t>(end - begin));
        source->read("embed.weight", begin, end, part.data(), DType::F32);
        REQUIRE(std::equal(part.begin(), part.end(), whole.begin() + begin));
      }
    }
  }
}

TEST_CASE("a DeepSpeed run is consolidated under the names of a model, with moments") {
  const TempDir out;
  consolidate(kDeepSpeed / "zero3-gpt2", out.path() / "hf", {});
  ConsolidateOptions options;
  options.what = ExportWhat::Optimizer;
  options.format = ExportFormat::Safetensors;
  consolidate(kDeepSpeed / "zero3-gpt2", out.path() / "moments", options);
  const SafetensorsReader weights(out.path() / "hf/model.safetensors");
  const SafetensorsReader expected(kDeepSpeed / "zero3-gpt2/expected.safetensors.golden");
  for (const SafetensorsEntry& entry : weights.header().tensors) {
    CAPTURE(entry.name);
    REQUIRE(expected.find(entry.name) != nullptr);
    CHECK(bytes_in(weights, entry) == bytes_in(expected, *expected.find(entry.name)));
  }
  CHECK(weights.find("lm_head.weight") == nullptr);  // tied
  const SafetensorsReader optimizer(out.path() / "moments/optimizer.safetensors");
  const SafetensorsEntry* const moment = optimizer.find("exp_avg_sq/transformer.h.0.ln_1.weight");
  REQUIRE(moment != nullptr);
  CHECK(bytes_in(optimizer, *moment) ==
        bytes_in(expected, *expected.find("exp_avg_sq/transformer.h.0.ln_1.weight")));
  // The folder of a checkpoint has its config.json next to it.
  CHECK(open_model(kDeepSpeed / "zero3-gpt2" / kStep)->tensors().size() == 16);
  CHECK_THROWS_HOLDING(InvalidArgument, "is a DeepSpeed ZeRO-2 checkpoint without config.json",
                       consolidate(kDeepSpeed / "zero2", out.path() / "none", {}));
}

TEST_CASE("each weight has the hyperparameters of its group") {
  for (const char* fixture : {"zero1", "zero2", "zero3"}) {
    CAPTURE(fixture);
    const auto source = open_sharded(kDeepSpeed / fixture);
    const Hyperparameters found = source->hyperparameters();
    CHECK(found.left_out.empty());
    REQUIRE(found.groups.size() == 2);
    std::set<std::string> names;
    for (std::size_t g = 0; g < 2; ++g) {
      const Json& settings = *found.groups[g].settings;
      CHECK(settings["lr"] == 0.01);
      CHECK(settings["betas"] == Json::array({0.9, 0.999}));
      CHECK(settings["weight_decay"] == (g == 0 ? 0.1 : 0.0));
      for (const std::string& name : found.groups[g].weights) {
        CAPTURE(name);
        const auto info = std::ranges::find(source->tensors(), name, &TensorInfo::name);
        REQUIRE(info != source->tensors().end());
        CHECK((info->shape.size() > 1) == (g == 0));
        CHECK(names.insert(name).second);
      }
    }
    for (const TensorInfo& info : source->tensors())
      if (info.name.ends_with(".exp_avg"))
        CHECK(names.contains(info.name.substr(16, info.name.size() - 24)));
  }
  CHECK(open_sharded(kDeepSpeed / "zero3-gpt2")->hyperparameters().groups.size() == 1);
  CHECK(open_sharded(kDeepSpeed / "none")->hyperparameters().groups.empty());
}

TEST_CASE("moments are left out unless they are needed") {
  const auto source = open_sharded(kDeepSpeed / "zero3", {}, false);
  const auto all = open_sharded(kDeepSpeed / "zero3");
  CHECK(all->left_out().empty());
  CHECK(source->left_out().size() + source->tensors().size() == all->tensors().size());
  for (const std::string& name : source->left_out()) CHECK(name.starts_with("optimizer.state."));
  const ConsolidatePlan plan = plan_consolidation(kDeepSpeed / "zero3-gpt2");
  CHECK(std::ranges::count(plan.skipped, "optimizer state, written with --what all",
                           &SkippedEntry::why) == 32);
}

TEST_CASE("links to folders of checkpoints keep their paths") {
  const RunCopy copy("zero3-gpt2");
  const TempDir disk;
  fs::rename(copy.folder, disk.path() / "stored");
  fs::create_directory_symlink(disk.path() / "stored", copy.folder);
  for (const fs::path& path : {copy.path, copy.folder, copy.folder / ""}) {
    CAPTURE(path);
    CHECK(open_sharded(path)->path() == copy.path);
    CHECK(open_model(path)->tensors().size() == 16);  // config.json is in the run's directory
  }
  fs::remove(disk.path() / "stored/zero_pp_rank_0_mp_rank_00_optim_states.pt");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, copy.path.string() + " has global_step2/",
                       open_sharded(copy.folder));
}

TEST_CASE("latest must name a checkpoint") {
  const auto refuse = [](const char* reason, const std::string& text) {
    const RunCopy copy("zero2");
    write_text(copy.path / "latest", text);
    CAPTURE(text);
    CHECK(is_deepspeed(copy.path));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, open_sharded(copy.path));
  };
  refuse(
      "latest does not hold the name of a checkpoint; give one of its checkpoints: "
      "global_step2",
      "\n");
  refuse("does not hold the name of a checkpoint", "../zero2/global_step2");
  refuse("does not hold the name of a checkpoint", "..");
  refuse("does not hold the name of a checkpoint", std::string("global_step2\0x", 14));
  refuse("latest names global_step3, which is not there", "global_step3");
  refuse("4097 bytes", std::string(4097, 'x'));

  const RunCopy copy("zero2");
  write_text(copy.path / "latest", "global_step2\n");
  CHECK(open_sharded(copy.path) != nullptr);
  fs::rename(copy.folder, copy.path / "best");
  write_text(copy.path / "latest", "best");
  CHECK(open_sharded(copy.path) != nullptr);
  CHECK(open_sharded(copy.path / "best") != nullptr);
  fs::remove(copy.path / "latest");
  // Nothing says that it is a run of DeepSpeed.
  CHECK_THROWS_HOLDING(InvalidArgument, "contains 1 checkpoint of PyTorch, but is not one itself",
                       open_sharded(copy.path));
  fs::rename(copy.path / "best", copy.folder);
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "no `latest`, which DeepSpeed writes after each save; give "
                       "one of its checkpoints: global_step2",
                       open_sharded(copy.path));
  // Others have a file `latest` too.
  const TempDir other;
  other.write("latest", "step-00000001");
  CHECK_FALSE(is_deepspeed(other.path()));
}

TEST_CASE("missing and mixed files of ranks are refused") {
  const auto refuse = [](const char* name, const char* reason, auto edit) {
    const RunCopy copy(name);
    edit(copy);
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, open_sharded(copy.path));
  };
  refuse("zero2", "no file like it of rank 1: it is missing",
         [](const RunCopy& copy) { fs::remove(copy.optimizer(1)); });
  refuse("zero2", "is of a run of 3 ranks, but the files of 2 are here",
         [](const RunCopy& copy) { fs::remove(copy.optimizer(2)); });
  refuse("zero2", "has no model states",
         [](const RunCopy& copy) { fs::remove(copy.folder / "mp_rank_00_model_states.pt"); });
  refuse("zero2", "is of a run with ZeRO, but the folder has 0 files of its optimizer",
         [](const RunCopy& copy) {
           for (int rank = 0; rank < 3; ++rank) fs::remove(copy.optimizer(rank));
         });
  refuse("zero3",
         "has 1 files of model states and 2 of optimizer states, but ZeRO-3 writes one of each per "
         "rank",
         [](const RunCopy& copy) {
           fs::remove(copy.folder / "zero_pp_rank_1_mp_rank_00_model_states.pt");
         });
  refuse("zero3", "no file like it of rank 0", [](const RunCopy& copy) {
    fs::remove(copy.folder / "zero_pp_rank_0_mp_rank_00_model_states.pt");
  });
  refuse("zero2", "of different saves into one folder", [](const RunCopy& copy) {
    fs::copy(copy.optimizer(1), copy.folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt");
  });
  refuse("zero2", "of different saves into one folder", [](const RunCopy& copy) {
    fs::rename(copy.optimizer(1), copy.folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt");
  });
  refuse("zero3", "has 3 as its ZeRO stage, but", [](const RunCopy& copy) {
    fs::copy(RunCopy("zero2").optimizer(0), copy.optimizer(0),
             fs::copy_options::overwrite_existing);
  });
  refuse("zero3", "has parameters of other names or shapes", [](const RunCopy& copy) {
    const char* const name = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    fs::copy(kDeepSpeed / "zero3-gpt2" / kStep / name, copy.folder / name,
             fs::copy_options::overwrite_existing);
  });
  refuse("zero2", "truncated", [](const RunCopy& copy) {
    fs::resize_file(copy.optimizer(2), fs::file_size(copy.optimizer(2)) / 2);
  });
}

TEST_CASE("forms that need other tools are refused by name") {
  const auto refuse = [](const char* reason, const char* name) {
    const RunCopy copy("zero2");
    write_text(copy.folder / name, "");
    CHECK_THROWS_HOLDING(Unsupported, reason, open_sharded(copy.path));
    CHECK_THROWS_HOLDING(Unsupported, "ds_to_universal", open_sharded(copy.folder));
  };
  refuse("split by tensor parallelism", "mp_rank_01_model_states.pt");
  refuse("split by tensor parallelism", "zero_pp_rank_0_mp_rank_01_optim_states.pt");
  refuse("of a pipeline", "layer_00-model_states.pt");
  refuse("of a pipeline", "layer_03-model_00-model_states.pt");
  refuse("of a pipeline", "mp_rank_00_001_model_states.pt");
  refuse("experts spread over ranks", "layer_0_expert_3_mp_rank_00_model_states.pt");
  refuse("experts spread over ranks", "expp_rank_0_mp_rank_00_optim_states.pt");
  const RunCopy universal("zero2");
  fs::create_directories(universal.folder / "zero/cube");
  CHECK_THROWS_HOLDING(Unsupported, "is a universal checkpoint of DeepSpeed",
                       open_sharded(universal.path));
}

TEST_CASE("a damaged flat buffer is detected by each tensor that is cut from it") {
  const RunCopy copy("zero2");
  const std::string before = read_text(copy.optimizer(1));
  const SafetensorsReader expected(copy.path / "expected.safetensors.golden");
  const std::string values = bytes_in(expected, *expected.find("embed.weight"));
  const std::size_t at = before.find(values.substr(60 * 4, 16));
  REQUIRE(at != std::string::npos);
  std::string damaged = before;
  damaged[at] = static_cast<char>(damaged[at] ^ 1);
  write_text(copy.optimizer(1), damaged);
  const auto source = open_sharded(copy.path);
  float value = 0;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the checksum is wrong",
                       source->read("embed.weight", 90, 91, &value, DType::F32));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor deep.0.weight, elements 0 to 12",
                       source->read("deep.0.weight", 0, 1, &value, DType::F32));
  source->read("cube", 0, 1, &value, DType::F32);  // of rank 0
}

TEST_CASE("damage of any byte of a rank's file is detected, or changes nothing") {
  for (const auto& [name, rank] : {std::pair("zero2", 1), std::pair("zero3", 0)}) {
    const RunCopy copy(name);
    const auto read_all = [&] {
      std::map<std::string, std::string> all;
      const auto source = open_sharded(copy.path);
      for (const TensorInfo& tensor : source->tensors())
        all[tensor.name] = all_bytes(*source, tensor);
      return all;
    };
    const auto expected = read_all();
    const std::string before = read_text(copy.optimizer(rank));
    for (std::size_t i = 0; i < before.size(); i += 23) {
      std::string damaged = before;
      damaged[i] = static_cast<char>(damaged[i] ^ 16);
      write_text(copy.optimizer(rank), damaged);
      CAPTURE(i);
      try {
        CHECK(read_all() == expected);
      } catch (const Error& error) {
        CHECK(*error.what() != '\0');
      }
    }
  }
}

}  // namespace
}  // namespace tessera::io
