#include "train/load_state.h"

#include <doctest/doctest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/control/memory_store.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/base/error.h"
#include "core/optim/adamw.h"
#include "io/checkpoint/diff.h"
#include "io/checkpoint/find.h"
#include "models/decoder.h"
#include "tests/support/check_throws.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"
#include "tests/support/temp_dir.h"
#include "train/save_state.h"
#include "train/trainer_state.h"

using namespace tessera;
using namespace tessera::train;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

std::vector<io::TensorInfo> tensors_of(const models::Arch& arch) {
  return train::tensors_of(*models::make_model(arch));
}

train::StateTensors states_of(const models::Arch& arch) {
  return train::state_tensors(*models::make_model(arch), optim::AdamW());
}

const models::Arch kConfig{.n_layer = 2, .n_head = 1, .n_embd = 12, .vocab_size = 17, .seq_len = 8};

struct Ranks {
  int world = 1;
  std::string mode = "full";
  models::Arch config = kConfig;
  DType master = DType::F32;
};

void for_each_rank(const Ranks& ranks,
                   const std::function<void(int rank, comm::ShardedModel& sharded)>& body) {
  const auto group = std::make_shared<comm::ThreadGroup>(ranks.world);
  test::on_threads(ranks.world, [&](int rank) {
    const auto context = Context::create({.threads = 1});
    const auto communicator = ranks.world == 1 ? comm::make_single_communicator()
                                               : comm::make_threads_communicator(group, rank);
    models::Decoder model(ranks.config);
    const comm::Mesh mesh = test::mesh_of(ranks.mode, *communicator);
    comm::ShardedModel sharded(model, mesh, test::spec_of(ranks.mode, ranks.master, ranks.master),
                               context);
    CHECK_NOTHROW(body(rank, sharded));
  });
}

void save_all(const fs::path& dir, int world, int rank, comm::ShardedModel& sharded,
              const std::shared_ptr<comm::Store>& store, bool with_optimizer = true) {
  train::StoreCoordinator coordinator(store, "save", rank, world, 20s);
  train::SaveState state = train::make_save_state(sharded, with_optimizer);
  io::SaveRequest& request = state.request;
  request.checkpoints_dir = dir;
  request.step = 1;
  request.run_id = "run";
  request.rank = rank;
  request.world_size = world;
  request.model_config = models::to_json(kConfig);
  save_checkpoint(request, coordinator);
}

// Weights and moments with a unique value per position.
float value_of(const Parameter& parameter, int section, std::int64_t element) {
  return static_cast<float>(section) + static_cast<float>(parameter.name.size()) / 64 +
         static_cast<float>(element) / 4096;
}

fs::path save_sample(const fs::path& dir, int world, bool with_optimizer = true,
                     DType master = DType::F32) {
  const auto store = std::make_shared<comm::MemoryStore>();
  for_each_rank({.world = world, .master = master}, [&](int rank, comm::ShardedModel& sharded) {
    sharded.create_optimizer_state(optim::AdamW());
    for (const auto& piece : sharded.held_pieces()) {
      int section = 0;
      for (const Tensor& tensor : {piece.master, piece.state[0].values, piece.state[1].values}) {
        fill_from_host(tensor, [&](std::int64_t begin, std::int64_t end, float* out) {
          for (std::int64_t i = begin; i < end; ++i) {
            *out++ = value_of(*piece.parameter, section, piece.begin + i);
          }
        });
        ++section;
      }
    }
    save_all(dir, world, rank, sharded, store, with_optimizer);
  });
  return dir / io::checkpoint_name(1);
}

fs::path pass_through(const fs::path& checkpoint, const fs::path& dir, const Ranks& ranks) {
  const auto store = std::make_shared<comm::MemoryStore>();
  for_each_rank(ranks, [&](int rank, comm::ShardedModel& sharded) {
    const auto reader = io::CheckpointReader::open(checkpoint);
    const train::LoadPlan plan = train::plan_resume(reader, tensors_of(ranks.config),
                                                    states_of(ranks.config), io::LoadPolicy::Exact);
    CHECK(plan.notes.empty());
    const io::ReadReport report =
        train::load_training_state(sharded, optim::AdamW(), reader, plan, 2, 1);
    CHECK(report.wanted_bytes <= report.read_bytes);
    save_all(dir, ranks.world, rank, sharded, store);
  });
  return dir / io::checkpoint_name(1);
}

}  // namespace

TEST_CASE("weights and moments of four ranks are loaded unchanged on any number of ranks") {
  test::TempDir dir;
  const fs::path saved = save_sample(dir.path() / "saved", 4);
  const auto expected = io::CheckpointReader::open(saved);
  for (const std::string mode : {"full", "gradients", "optimizer", "none"}) {
    for (const int world : {1, 2, 3, 4, 8}) {
      CAPTURE(world);
      const fs::path again =
          pass_through(saved, dir.path() / fmt::format("{}-{}", world, mode), {world, mode});
      const auto reader = io::CheckpointReader::open(again);
      CHECK(reader.digest() == expected.digest());
      for (const io::Section& section : {io::Section{"exp_avg"}, io::Section{"exp_avg_sq"}}) {
        for (const auto& [name, tensor] : expected.tensors(section)) {
          CHECK(io::tensor_checksum(reader.tensors(section).at(name)) ==
                io::tensor_checksum(tensor));
        }
      }
    }
  }
}

TEST_CASE("bf16 weights are loaded unchanged") {
  test::TempDir dir;
  const fs::path saved = save_sample(dir.path() / "saved", 3, true, DType::BF16);
  const fs::path again =
      pass_through(saved, dir.path() / "again", {.world = 2, .master = DType::BF16});
  CHECK(io::CheckpointReader::open(again).digest() == io::CheckpointReader::open(saved).digest());
}

TEST_CASE("a partial load keeps starting values for missing tensors") {
  test::TempDir dir;
  const auto reader = io::CheckpointReader::open(save_sample(dir.path() / "saved", 4));
  Ranks ranks{.world = 2};
  ranks.config.n_layer = 3;
  ranks.config.seq_len = 9;
  for (const auto policy : {io::LoadPolicy::Exact, io::LoadPolicy::IgnoreExtra}) {
    CHECK_THROWS_HOLDING(
        InvalidArgument, "shape: wpe.weight is [8, 12], expected [9, 12]",
        train::plan_resume(reader, tensors_of(ranks.config), states_of(ranks.config), policy));
  }
  const train::LoadPlan plan = train::plan_resume(reader, tensors_of(ranks.config),
                                                  states_of(ranks.config), io::LoadPolicy::Partial);
  CHECK(plan.notes.size() == 6);  // per section: missing tensors, mismatched tensors
  for_each_rank(ranks, [&](int, comm::ShardedModel& sharded) {
    train::load_training_state(sharded, optim::AdamW(), reader, plan, 2, 77);
    for (const auto& piece : sharded.held_pieces()) {
      const std::string& name = piece.parameter->name;
      CAPTURE(name);
      const bool is_new = name.starts_with("h.2.") || name == "wpe.weight";
      std::vector<float> start(static_cast<std::size_t>(piece.end - piece.begin));
      initialize_range(*piece.parameter, 77, piece.begin, piece.end, start.data());
      const auto weights = piece.master.to_vector<float>();
      const auto moments = piece.state[0].values.to_vector<float>();
      for (std::size_t i = 0; i < start.size(); ++i) {
        const std::int64_t element = piece.begin + static_cast<std::int64_t>(i);
        REQUIRE(weights[i] == (is_new ? start[i] : value_of(*piece.parameter, 0, element)));
        REQUIRE(moments[i] == (is_new ? 0 : value_of(*piece.parameter, 1, element)));
      }
    }
  });
}

TEST_CASE("chosen tensors must all match, and the others start fresh") {
  test::TempDir dir;
  const auto reader = io::CheckpointReader::open(save_sample(dir.path() / "saved", 2, false));
  const auto source = io::open_checkpoint_model(reader);
  Ranks ranks{.world = 2};
  ranks.config.n_layer = 3;
  ranks.config.seq_len = 9;
  const auto exact = io::LoadPolicy::Exact;
  const train::LoadPlan plan =
      train::plan_weights(*source, tensors_of(ranks.config), exact, {"h.0.*", "wte.weight"});
  REQUIRE(plan.notes.size() == 1);
  CHECK(plan.notes[0] ==
        "note: 27 of 40 tensors are not chosen by checkpoint.load_tensors: random initial values");
  CHECK(plan.tensors.at(io::kModelSection).size() == 13);
  for_each_rank(ranks, [&](int, comm::ShardedModel& sharded) {
    train::load_weights(sharded, *source, plan, 2, 77);
    for (const auto& piece : sharded.held_pieces()) {
      const std::string& name = piece.parameter->name;
      CAPTURE(name);
      const bool is_taken = name.starts_with("h.0.") || name == "wte.weight";
      std::vector<float> start(static_cast<std::size_t>(piece.end - piece.begin));
      initialize_range(*piece.parameter, 77, piece.begin, piece.end, start.data());
      const auto weights = piece.master.to_vector<float>();
      for (std::size_t i = 0; i < start.size(); ++i) {
        const std::int64_t element = piece.begin + static_cast<std::int64_t>(i);
        REQUIRE(weights[i] == (is_taken ? value_of(*piece.parameter, 0, element) : start[i]));
      }
    }
  });
  const std::vector<std::string> wrong{"wpe.*", "h.2.ln_1.*", "h.0.*"};
  for (const char* part : {"shape: wpe.weight is [8, 12], expected [9, 12]",
                           "missing: h.2.ln_1.weight", "missing: h.2.ln_1.bias"}) {
    CHECK_THROWS_HOLDING(InvalidArgument, part,
                         train::plan_weights(*source, tensors_of(ranks.config), exact, wrong));
  }
  CHECK(train::plan_weights(*source, tensors_of(ranks.config), io::LoadPolicy::Partial, wrong)
            .tensors.at(io::kModelSection)
            .size() == 12);
  CHECK_THROWS_HOLDING(
      InvalidArgument, "checkpoint.load_tensors: h.7.*, x match no tensor of",
      train::plan_weights(*source, tensors_of(ranks.config), exact, {"h.7.*", "h.*", "x"}));
}

TEST_CASE("a checkpoint without moments can start a run, but cannot be resumed") {
  test::TempDir dir;
  const auto reader = io::CheckpointReader::open(save_sample(dir.path() / "saved", 4, false));
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "holds no optimizer state (it was saved with checkpoint.what=model); start "
      "from its weights with --model.init_from",
      train::plan_resume(reader, tensors_of(kConfig), states_of(kConfig), io::LoadPolicy::Exact));
  const train::LoadPlan partial =
      train::plan_resume(reader, tensors_of(kConfig), states_of(kConfig), io::LoadPolicy::Partial);
  REQUIRE(partial.notes.size() == 1);
  CHECK(
      partial.notes[0].ends_with("holds no optimizer state: training continues with zero moments"));
  const auto source = io::open_checkpoint_model(reader);
  const train::LoadPlan plan =
      train::plan_weights(*source, tensors_of(kConfig), io::LoadPolicy::Exact);
  for_each_rank({.world = 3}, [&](int, comm::ShardedModel& sharded) {
    const io::ReadReport report = train::load_weights(sharded, *source, plan, 2, 1);
    std::int64_t elements = 0;
    for (const auto& piece : sharded.held_pieces()) {
      elements += piece.end - piece.begin;
      const auto weights = piece.master.to_vector<float>();
      for (std::size_t i = 0; i < weights.size(); ++i) {
        REQUIRE(weights[i] ==
                value_of(*piece.parameter, 0, piece.begin + static_cast<std::int64_t>(i)));
      }
    }
    CHECK(report.wanted_bytes == 4 * elements);
  });
}
