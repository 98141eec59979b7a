// Asynchronous saves, with ranks as threads: saves that become due during another, fail, or hang.

#include "train/saver.h"

#include <doctest/doctest.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "comm/control/memory_store.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/base/error.h"
#include "core/optim/adamw.h"
#include "io/checkpoint/find.h"
#include "models/decoder.h"
#include "tests/support/check_throws.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

using namespace tessera;
using namespace tessera::train;
using namespace std::chrono_literals;
using test::holds;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

namespace {

const models::Arch kConfig{.n_layer = 1, .n_head = 1, .n_embd = 12, .vocab_size = 17, .seq_len = 8};

struct Settings {
  int world = 2;
  bool in_background = true;
  bool stop_on_error = false;
  std::string mode = "full";
  std::chrono::milliseconds timeout{20'000};
  io::Retention retention{};
  std::function<void(int rank, std::string_view point)> at_point{};
};

/// State and actions of one rank.
struct RankOfTest {
  int rank;
  std::shared_ptr<Context> context;
  comm::ShardedModel* sharded;
  train::Saver* saver;
  train::TrainerState state;
  bool ends = false;  // the saver requests the end of training
  std::vector<train::Saved> saved;
  std::string notes;
  std::function<std::vector<std::string>(std::string)> gather;  // texts of all ranks

  void step(bool due) {
    ++state.step;
    fill(static_cast<float>(state.step));
    ends = saver->agree(state.step);
    if (due) saver->save(state);
    look();
  }
  void fill(float value) const {
    saver->wait_copied();
    for (const auto& piece : sharded->held_pieces()) {
      for (const Tensor& t : {piece.master, piece.state[0].values, piece.state[1].values}) {
        std::fill_n(t.data<float>(), t.numel(), value);
      }
    }
  }
  void look() {
    saver->poll();
    for (const train::Saved& one : saver->take_saved()) saved.push_back(one);
    for (const std::string& text : saver->take_notes()) notes += text + "\n";
  }
  void wait_until_idle() {
    const auto deadline = Clock::now() + 20s;
    while (saver->in_flight() && Clock::now() < deadline) std::this_thread::sleep_for(1ms);
    look();
  }
};

/// Runs `body` on each rank. @return message of each rank's exception; empty if none
std::vector<std::string> run_ranks(const fs::path& dir, const Settings& settings,
                                   const std::function<void(RankOfTest&)>& body) {
  const auto group = std::make_shared<comm::ThreadGroup>(settings.world);
  const auto store = std::make_shared<comm::MemoryStore>();
  std::vector<std::string> errors(static_cast<std::size_t>(settings.world));
  const auto rank_main = [&](int rank) {
    const auto context = Context::create({.threads = 2});
    const auto communicator = settings.world == 1 ? comm::make_single_communicator()
                                                  : comm::make_threads_communicator(group, rank);
    models::Decoder model(kConfig);
    const comm::Mesh mesh = test::mesh_of(settings.mode, *communicator);
    comm::ShardedModel sharded(model, mesh, test::spec_of(settings.mode), context);
    sharded.create_optimizer_state(optim::AdamW());
    train::StoreCoordinator meeting(store, "training", rank, settings.world, settings.timeout + 2s);
    train::StoreCoordinator flags(store, "flags", rank, settings.world, 20s);
    train::SaverOptions options;
    options.checkpoints_dir = dir;
    options.run_id = "run";
    options.rank = rank;
    options.world_size = settings.world;
    options.model = models::to_json(kConfig);
    options.in_background = settings.in_background;
    options.stop_on_error = settings.stop_on_error;
    options.retention = settings.retention;
    options.timeout = settings.timeout;
    if (settings.at_point) {
      options.at_point = [rank, f = settings.at_point](std::string_view at) { f(rank, at); };
    }
    train::Saver saver(options, store, meeting, sharded);
    RankOfTest self{rank, context, &sharded, &saver, {}, {}, {}, {}, {}};
    self.gather = [&](const std::string& mine) { return flags.exchange("flags", mine); };
    try {
      body(self);
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  };
  test::on_threads(settings.world, rank_main);
  return errors;
}

float value_of(const fs::path& checkpoint) {
  const auto reader = io::CheckpointReader::open(checkpoint);
  std::set<float> values;
  for (const auto& section : reader.index().tensor_sections()) {
    for (const auto& [name, tensor] : reader.tensors(section)) {
      std::vector<float> read(static_cast<std::size_t>(numel(tensor.shape)));
      reader.read(section, name, 0, numel(tensor.shape), read.data(), DType::F32);
      values.insert(read.begin(), read.end());
    }
  }
  return values.size() == 1 ? *values.begin() : -1.0F;
}

std::vector<std::int64_t> steps_in(const fs::path& dir) {
  std::vector<std::int64_t> steps;
  for (const auto& entry : io::find_checkpoints(dir)) steps.push_back(entry.step);
  return steps;
}

}  // namespace

TEST_CASE("each save contains its own step, however steps and saves overlap") {
  for (const bool in_background : {true, false}) {
    for (const int world : {1, 3}) {
      CAPTURE(in_background);
      CAPTURE(world);
      const test::TempDir dir;
      std::mutex mutex;
      const auto errors = run_ranks(dir.path(), {.world = world, .in_background = in_background},
                                    [&](RankOfTest& self) {
                                      for (int i = 0; i < 9; ++i) self.step(/*due=*/i % 2 == 0);
                                      self.saver->finish(self.state);
                                      self.look();
                                      const std::lock_guard lock(mutex);
                                      CHECK(self.saved.size() == 5);
                                      CHECK(self.saved.back().step == 9);
                                      for (const train::Saved& saved : self.saved) {
                                        CHECK(saved.bytes > 0);
                                        CHECK(saved.seconds > 0);
                                        CHECK(saved.stall_seconds > 0);
                                        if (!in_background)
                                          CHECK(saved.stall_seconds >= saved.seconds);
                                      }
                                    });
      for (const auto& error : errors) CHECK(error == "");
      CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 3, 5, 7, 9});
      for (const auto step : steps_in(dir.path())) {
        CAPTURE(step);
        const fs::path path = dir.path() / io::checkpoint_name(step);
        CHECK(value_of(path) == static_cast<float>(step));
        const auto text = io::CheckpointReader::open(path).trainer_json();
        CHECK(train::parse_trainer_state(text, "trainer.json").step == step);
      }
    }
  }
}

TEST_CASE("a save that is due during another waits for it, on all ranks, and says so") {
  const test::TempDir dir;
  std::mutex mutex;
  const auto errors = run_ranks(dir.path(),
                                {.world = 3,
                                 .at_point =
                                     [](int rank, std::string_view at) {
                                       if (rank == 1 && at == "shard-created")
                                         std::this_thread::sleep_for(200ms);
                                     }},
                                [&](RankOfTest& self) {
                                  self.step(true);
                                  const auto begin = Clock::now();
                                  self.step(false);
                                  CHECK(Clock::now() - begin < 150ms);
                                  self.step(true);
                                  CHECK(Clock::now() - begin > 150ms);
                                  self.saver->finish(self.state);
                                  self.look();
                                  const std::lock_guard lock(mutex);
                                  CHECK(holds(self.notes, "step 3: waited"));
                                  CHECK(holds(self.notes, "for the save of step 1 to end"));
                                  CHECK(self.saved.size() == 2);
                                  CHECK(self.saved[0].stall_seconds < 0.15);
                                  CHECK(self.saved[1].stall_seconds > 0.15);
                                });
  for (const auto& error : errors) CHECK(error == "");
  CHECK(value_of(dir.path() / "step-00000001") == 1.0F);
  CHECK(value_of(dir.path() / "step-00000003") == 3.0F);
}

TEST_CASE("a failed save is reported with its culprit, and training continues or ends by policy") {
  for (const bool in_background : {true, false}) {
    for (const bool stop : {false, true}) {
      CAPTURE(in_background);
      CAPTURE(stop);
      const test::TempDir dir;
      std::atomic<bool> broken = false;
      std::mutex mutex;
      const auto errors = run_ranks(
          dir.path(),
          {.world = 2,
           .in_background = in_background,
           .stop_on_error = stop,
           .at_point =
               [&](int rank, std::string_view at) {
                 if (broken && rank == 1 && at == "shard-written")
                   throw IoError("cannot write rank-1: the disk is on fire");
               }},
          [&](RankOfTest& self) {
            self.step(true);
            self.wait_until_idle();
            self.gather("");
            broken = true;
            self.step(true);
            self.wait_until_idle();
            {
              const std::lock_guard lock(mutex);
              CHECK(holds(self.notes, "warning: step 2 was not saved, training"));
              CHECK(holds(self.notes, "rank 1: cannot write rank-1: the disk is on fire"));
              CHECK(holds(self.notes, stop ? "checkpoint.on_error is stop" : "continues"));
            }
            self.gather("");
            broken = false;
            self.step(false);
            CHECK(self.ends == stop);
            if (!stop) self.step(true);
            self.saver->finish(self.state);
          });
      for (const auto& error : errors) {
        CHECK(holds(error, "the disk is on fire") == stop);
        CHECK(holds(error, "training ended because a save failed") == stop);
      }
      CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, stop ? 3 : 4});
      for (const auto& item : fs::directory_iterator(dir.path())) {
        CHECK(item.path().extension() != ".tmp");
      }
    }
  }
}

TEST_CASE("non-finite weights are not saved, and end training on all ranks") {
  const test::TempDir dir;
  const auto errors = run_ranks(dir.path(), {.world = 2}, [&](RankOfTest& self) {
    self.step(true);
    ++self.state.step;
    self.fill(self.rank == 1 ? std::numeric_limits<float>::infinity() : 1.0F);
    self.saver->save(self.state);
    self.wait_until_idle();
    self.step(false);
    CHECK(self.ends);
    self.saver->finish(self.state);
  });
  for (const auto& error : errors) {
    CHECK(holds(error, "step 1: after its update, weights or optimizer state of rank 1 are not"));
  }
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1});
}

TEST_CASE("a hung writer stops neither training nor the program's end") {
  const test::TempDir dir;
  const auto hang = std::make_shared<std::promise<void>>();
  const auto hanging = std::make_shared<std::shared_future<void>>(hang->get_future().share());
  const auto left = std::make_shared<std::atomic<bool>>(false);
  const auto begin = Clock::now();
  std::mutex mutex;
  Settings settings;
  settings.timeout = 500ms;
  settings.at_point = [hanging, left](int rank, std::string_view at) {
    if (rank != 1 || at != "shard-created" || *left) return;
    *left = hanging->wait_for(30s) == std::future_status::ready;
  };
  const auto errors = run_ranks(dir.path(), settings, [&](RankOfTest& self) {
    self.step(true);
    // The other rank times out and names the missing one.
    if (self.rank == 0) {
      self.wait_until_idle();
      const std::lock_guard lock(mutex);
      CHECK(holds(self.notes, "warning: step 1 was not saved, training continues"));
      CHECK(holds(self.notes, "missing: rank 1"));
    }
    self.step(true);
    {
      const std::lock_guard lock(mutex);
      CHECK(holds(self.notes, "step 2 was not saved"));
      CHECK(holds(self.notes, "the save of step 1 has hung for 500 ms on rank 1"));
    }
    // The hang has been detected.
    const auto start = Clock::now();
    self.step(true);
    CHECK(Clock::now() - start < 400ms);
    self.saver->finish(self.state);
  });
  CHECK(Clock::now() - begin < 15s);
  for (const auto& error : errors) {
    CHECK(holds(error, "step 3 was not saved"));
    CHECK(holds(error, "on rank 1"));
  }
  CHECK(steps_in(dir.path()).empty());
  hang->set_value();
  const auto deadline = Clock::now() + 20s;
  while (!*left && Clock::now() < deadline) std::this_thread::sleep_for(1ms);
  CHECK(*left);
}

TEST_CASE("all wait while rank 0 removes old checkpoints, and name it if it hangs") {
  for (const bool in_background : {true, false}) {
    CAPTURE(in_background);
    const test::TempDir dir;
    std::promise<void> hang;
    const std::shared_future<void> hanging = hang.get_future().share();
    const auto hangs = std::make_shared<std::atomic<bool>>(false);
    Settings settings;
    settings.in_background = in_background;
    settings.timeout = 500ms;
    settings.retention = {
        .keep = 1, .keep_every = 0, .keep_best = 1, .loss = [hanging, hangs](const fs::path&) {
          if (*hangs) hanging.wait_for(20s);
          return std::optional<double>(1.0);
        }};
    const auto errors = run_ranks(dir.path(), settings, [&](RankOfTest& self) {
      self.step(true);
      self.wait_until_idle();
      self.gather("");
      *hangs = true;
      self.step(false);
      const auto begin = Clock::now();
      if (self.rank == 0) {
        self.saver->finish(self.state);
        return;
      }
      try {
        self.saver->finish(self.state);
      } catch (...) {
        CHECK(Clock::now() - begin < 10s);
        hang.set_value();
        throw;
      }
    });
    CHECK(holds(errors[1], "missing: rank 0"));
    if (in_background) {
      CHECK(holds(errors[0],
                  "step 2 is committed, but reading it back and removing old ones has hung "
                  "for 500 ms on this rank"));
    }
    CHECK(value_of(dir.path() / "step-00000002") == 2.0F);
  }
}

TEST_CASE("a leaving rank waits for its save up to the timeout") {
  const test::TempDir dir;
  const auto errors = run_ranks(dir.path(),
                                {.world = 2,
                                 .at_point =
                                     [](int, std::string_view at) {
                                       if (at == "shard-created")
                                         std::this_thread::sleep_for(200ms);
                                     }},
                                [&](RankOfTest& self) {
                                  self.step(true);
                                  CHECK(self.saver->in_flight() == 1);
                                  self.saver->leave(20s);
                                  CHECK(!self.saver->in_flight());
                                });
  for (const auto& error : errors) CHECK(error == "");
  CHECK(value_of(dir.path() / "step-00000001") == 1.0F);
}

TEST_CASE("replicated state is written in equal parts") {
  const test::TempDir dir;
  const auto errors = run_ranks(dir.path(), {.world = 4, .mode = "none"}, [&](RankOfTest& self) {
    self.step(true);
    self.saver->finish(self.state);
  });
  for (const auto& error : errors) CHECK(error == "");
  const fs::path path = dir.path() / "step-00000001";
  CHECK(value_of(path) == 1.0F);
  std::int64_t whole = 0;
  std::vector<std::int64_t> parts;
  const auto reader = io::CheckpointReader::open(path);
  for (const auto& [name, size] : reader.index().files) {
    parts.push_back(size);
    whole += size;
  }
  REQUIRE(parts.size() == 4);
  // Segments are whole cache lines, for three values per weight, plus a header.
  for (const std::int64_t part : parts) CHECK(part < whole / 4 + 3 * 256 * 2 + 2048);
}

TEST_CASE("retention uses the losses stored with the checkpoints") {
  const test::TempDir dir;
  const std::vector<double> losses{3, 1, 2, 4, 5, 6};
  const io::Retention retention{
      .keep = 1, .keep_every = 3, .keep_best = 1, .loss = stored_val_loss};
  const auto errors =
      run_ranks(dir.path(), {.world = 2, .retention = retention}, [&](RankOfTest& self) {
        for (const double loss : losses) {
          self.state.val_loss = loss;
          self.step(true);
        }
        self.saver->finish(self.state);
      });
  for (const auto& error : errors) CHECK(error == "");
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{2, 3, 6});
  CHECK(train::stored_val_loss(dir.path() / "step-00000002") == 1.0);
  CHECK_FALSE(train::stored_val_loss(dir.path()));
}

TEST_CASE("a trainer state of a newer format is distinguished from a broken one") {
  std::string text = train::format_trainer_state({});
  const std::string version = "\"version\": 1";
  const auto at = text.find(version);
  REQUIRE(at != text.npos);
  text.replace(at, version.size(), "\"version\": 2");
  CHECK_THROWS_HOLDING(io::NewerFormat,
                       "x/trainer.json has format version 2; this build reads up to 1: use a newer",
                       train::parse_trainer_state(text, "x/trainer.json"));
  text.replace(at, version.size(), "\"version\": 0");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "version: expected a whole number from 1",
                       train::parse_trainer_state(text, "x/trainer.json"));
}

namespace {

enum class Damage { Bit, Cut, Missing, Trainer, Index };

void damage(const fs::path& checkpoint, Damage kind) {
  const fs::path shard = checkpoint / "rank-00001-of-00002.safetensors";
  if (kind == Damage::Cut) {
    fs::resize_file(shard, fs::file_size(shard) - 1);
  } else if (kind == Damage::Missing) {
    fs::remove(shard);
  } else {
    const fs::path path = kind == Damage::Bit       ? shard
                          : kind == Damage::Trainer ? checkpoint / "trainer.json"
                                                    : checkpoint / "index.json";
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-1, std::ios::end);
    file.put('\x01');
  }
}

// Two saved steps, of which one is kept; the second is saved only at the end of the run if
// `is_last`. The second checkpoint is damaged right after its commit, at most `times` times.
struct DamagedSave {
  test::TempDir dir;
  std::vector<std::string> errors;
  std::string notes;
  std::vector<train::Saved> saved;  // rank 0's
  std::vector<std::string> ends;    // per rank: "1" if training ends, else "0"

  struct Options {
    bool in_background = true;
    bool stop_on_error = false;
    int times = 1;
    Damage kind = Damage::Bit;
    bool is_last = false;
    int more_steps = 0;
  };
  explicit DamagedSave(const Options& options) {
    const fs::path damaged = dir.path() / "step-00000002";
    Settings settings;
    settings.in_background = options.in_background;
    settings.stop_on_error = options.stop_on_error;
    settings.retention = {.keep = 1};
    int times = options.times;
    settings.at_point = [&](int rank, std::string_view at) {
      if (rank != 0 || at != "latest-written" || !fs::exists(damaged) || times-- <= 0) return;
      damage(damaged, options.kind);
    };
    errors = run_ranks(dir.path(), settings, [&](RankOfTest& self) {
      for (int step = 0; step < 2; ++step) {
        self.step(step == 0 || !options.is_last);
        self.wait_until_idle();
      }
      for (int step = 0; step < options.more_steps; ++step) self.step(false);
      const auto answers = self.gather(self.ends ? "1" : "0");
      if (self.rank == 0) ends = answers;
      const auto keep_what_is_known = [&] {
        self.look();
        if (self.rank != 0) return;
        notes = self.notes;
        saved = self.saved;
      };
      try {
        self.saver->finish(self.state);
      } catch (...) {
        keep_what_is_known();
        throw;
      }
      keep_what_is_known();
    });
  }
};

}  // namespace

TEST_CASE("a checkpoint found damaged by verification counts as not saved") {
  using Options = DamagedSave::Options;
  const char* const what[] = {"step-00000002 is not verified: rank 1: ",
                              "rank-00001-of-00002.safetensors: tensor optimizer/exp_avg_sq/",
                              "elements ", "(bytes ",
                              "the checksum is wrong; no other checkpoint was removed"};
  const std::string warning = "warning: step 2 was not saved, ";
  const auto is_saved_again = [&](const DamagedSave& run) {
    for (const auto& error : run.errors) CHECK(error == "");
    CHECK(run.ends == std::vector<std::string>{"0", "0"});
    CAPTURE(run.notes);
    CHECK(holds(run.notes, warning));
    CHECK(holds(run.notes, "step-00000002 is not verified: rank "));
    CHECK(steps_in(run.dir.path()) == std::vector<std::int64_t>{2});
    CHECK(value_of(run.dir.path() / "step-00000002") == 2.0F);
    CHECK(run.saved.size() == 2);
  };
  for (const bool in_background : {true, false}) {
    CAPTURE(in_background);
    SUBCASE("it is saved again at the end of the run") {
      const DamagedSave run(Options{.in_background = in_background});
      is_saved_again(run);
      for (const char* part : what) CHECK(holds(run.notes, part));
    }
    SUBCASE("any damage has this effect, with any checkpoint.on_error") {
      for (const Damage kind : {Damage::Cut, Damage::Missing, Damage::Trainer, Damage::Index}) {
        CAPTURE(static_cast<int>(kind));
        is_saved_again(DamagedSave(
            Options{.in_background = in_background, .stop_on_error = true, .kind = kind}));
      }
    }
    SUBCASE("also the one saved at the end") {
      const DamagedSave run(Options{.in_background = in_background, .is_last = true});
      is_saved_again(run);
      CHECK(holds(run.notes, warning + "trying again: "));
    }
    SUBCASE("if it is damaged again, the run fails and the former one is kept") {
      const DamagedSave run(Options{.in_background = in_background, .times = 3});
      for (const auto& error : run.errors) {
        CAPTURE(error);
        for (const char* part : what) CHECK(holds(error, part));
      }
      CHECK(steps_in(run.dir.path()) == std::vector<std::int64_t>{1, 2});
      CHECK(value_of(run.dir.path() / "step-00000001") == 1.0F);
      CHECK(run.saved.size() == 1);
    }
    SUBCASE("during training, checkpoint.on_error decides") {
      for (const bool stop : {false, true}) {
        CAPTURE(stop);
        const DamagedSave run(
            Options{.in_background = in_background, .stop_on_error = stop, .more_steps = 2});
        CHECK(run.ends == std::vector<std::string>(2, stop ? "1" : "0"));
        CHECK(holds(run.notes, warning + (stop ? "training ends (checkpoint.on_error is stop): "
                                               : "training continues: ")));
        for (const auto& error : run.errors) {
          CAPTURE(error);
          if (!stop) CHECK(error == "");
          if (stop) CHECK(holds(error, "training ended because a save failed: "));
          if (stop) CHECK(holds(error, "step-00000002 is not verified: rank 1: "));
        }
        CHECK(value_of(run.dir.path() / "step-00000004") == 4.0F);
        // It displaced no intact checkpoint.
        CHECK(steps_in(run.dir.path()) == std::vector<std::int64_t>{4});
      }
    }
  }
}
