// User errors and damaged files: one sentence with cause and place, and the matching exit code.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <optional>

#include "io/base/crc.h"
#include "io/checkpoint/index.h"
#include "tests/e2e/small_run.h"
#include "tests/io/support.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

enum Code { kFailed = 1, kUsage = 2, kIo = 3 };

void refuse(int code, const Arguments& arguments, const std::vector<std::string>& parts,
            const Variables& variables = {}) {
  const auto result = run_to(code, arguments, variables);
  CHECK(result.out.empty());
  const std::string marker = "tessera: error: ";
  REQUIRE(count(result.err, marker) == 1);
  // The sentence is the last line.
  const std::string sentence = result.err.substr(result.err.find(marker));
  CHECK(count(sentence, "\n") == 1);
  CHECK_FALSE(holds(sentence, "bug"));
  CHECK_FALSE(holds(sentence, "terminate"));
  for (const std::string& part : parts) {
    INFO("expected: ", part);
    CHECK(holds(sentence, part));
  }
}

void damage_tensor(const fs::path& shard) {
  flip_bit(shard, static_cast<std::int64_t>(fs::file_size(shard)) - 5000);
}

// A run of 20 steps with checkpoints at 10 and 20, made once; read-only.
const std::string& finished_run() {
  static const TempDir dir;
  static const std::string run = [] {
    const std::string text = dir.write("text.txt", make_text()), out = dir.file("used");
    run_to(0, joined(small_run(text, out, 1, 20), {"--checkpoint.every=10"}));
    return out;
  }();
  return run;
}

struct Finished : Fixture {
  const std::string& used = finished_run();

  Arguments train(const Arguments& more = {}, int world = 1, int steps = 20) const {
    return joined(small_run(text, dir.file("run"), world, steps), more);
  }
  std::string tokens(const std::string& name, const std::vector<std::uint16_t>& ids) const {
    return dir.write(name, std::string_view(reinterpret_cast<const char*>(ids.data()),
                                            ids.size() * sizeof(ids[0])));
  }

  fs::path copy(const std::string& name) const {
    fs::copy(used, dir.path() / name, fs::copy_options::recursive);
    return dir.path() / name;
  }
  Arguments resume(const fs::path& run, int world = 1) const {
    return small_run(text, run, world, 25);
  }
};

// Waits at most 10 s.
void wait_until_opened(const fs::path& file, const std::function<void()>& begin) {
  const int events = ::inotify_init1(IN_CLOEXEC);
  REQUIRE(events >= 0);
  REQUIRE(::inotify_add_watch(events, file.c_str(), IN_OPEN) >= 0);
  begin();
  pollfd waiting{events, POLLIN, 0};
  CHECK(::poll(&waiting, 1, 10'000) == 1);
  ::close(events);
}

}  // namespace

TEST_CASE_FIXTURE(Finished, "data that are missing, invalid, too short or of another vocabulary") {
  const auto with_data = [&](const std::string& file, const Arguments& more = {}) {
    return joined(small_run(file, dir.file("run"), 1, 20), more);
  };
  refuse(kIo, with_data(dir.file("absent.txt")), {dir.file("absent.txt"), "No such file"});
  refuse(kIo, with_data(dir.write("data.txt", "\x1f\x8b\x08 and so on")),
         {"data.txt is a gzip file", "unpack it"});
  refuse(kUsage, with_data(tokens("short.bin", std::vector<std::uint16_t>(10, 1))),
         {"10 tokens", "model.seq_len + 1 = 33"});
  std::vector<std::uint16_t> ids(2000, 5);
  ids[700] = 77;
  refuse(kIo, with_data(tokens("ids.bin", ids), {"--model.vocab_size=60"}),
         {"ids.bin", "token 700 has id 77", "60 entries"});
}

TEST_CASE_FIXTURE(Finished,
                  "an invalid configuration is refused once for all ranks, with its place") {
  refuse(kUsage, train({"--train.global_batch=5"}, 2),
         {"train.global_batch is 5", "2 ranks", "4 or 6"});
  refuse(kUsage, train({"--train.step", "3"}, 2), {"--train.step;", "did you mean --train.steps?"});
  refuse(kUsage, train(), {"TESSERA_TRAIN_STEP;", "did you mean TESSERA_TRAIN_STEPS?"},
         {{"TESSERA_TRAIN_STEP", "3"}});
  Arguments words = train();
  words.insert(words.begin() + 1,
               dir.write("config.json", "{\n \"train\": {\n  \"stepz\": 3\n }\n}\n"));
  refuse(kUsage, words, {"config.json:3:", "\"train.stepz\"", "did you mean \"train.steps\"?"});
}

TEST_CASE_FIXTURE(
    Finished, "a truncated shard or a flipped bit is found, named, and its checkpoint skipped") {
  struct Damage {
    const char* name;
    std::string problem;
    void (*make)(const fs::path& file);
  };
  const Damage damages[] = {
      {"cut", "was truncated or replaced",
       [](const fs::path& file) { fs::resize_file(file, fs::file_size(file) - 100); }},
      {"flipped", "the checksum is wrong", damage_tensor},
      {"absent", "", [](const fs::path& file) { fs::remove(file); }}};
  for (const Damage& damage : damages) {
    CAPTURE(damage.name);
    const fs::path run = copy(damage.name);
    damage.make(shard(run, 20));
    const auto verified = run_to(kFailed, {"checkpoint", "verify", run});
    CHECK(holds(verified.out, "rank-00000-of-00001.safetensors"));
    CHECK(holds(verified.out, damage.problem));
    if (damage.name == std::string("flipped")) {
      // An explicit path has no fallback.
      refuse(kIo, train({"--checkpoint.resume", (run / "checkpoints/step-00000020/").string()}),
             {"rank-00000-of-00001.safetensors", damage.problem});
      const fs::path only = copy("only");
      fs::remove_all(only / "checkpoints/step-00000010");
      damage.make(shard(only, 20));
      refuse(kIo, resume(only),
             {"none of the 1 checkpoints", "step-00000020", damage.problem, "--run.out"});
      CHECK(read_metrics(only).steps.size() == 20);
    }

    const auto resumed = run_to(0, resume(run));
    CHECK(holds(resumed.err,
                "warning: " + (run / "checkpoints/step-00000020").string() + " is skipped"));
    CHECK(holds(resumed.err, "step 10 of 25, from"));
    CHECK(read_metrics(run).steps.size() == 25);
  }
}

TEST_CASE_FIXTURE(Finished,
                  "if one rank cannot read a checkpoint, all ranks load the previous one") {
  for (const int world : {2, 3, 4}) {
    CAPTURE(world);
    const fs::path run = dir.path() / fmt::format("run-{}", world);
    const auto command = [&](int steps) {
      return joined(small_run(text, run, world, steps),
                    {"--train.global_batch=12", "--checkpoint.every=5", "--checkpoint.keep=0"});
    };
    run_to(0, command(20));
    const fs::path checkpoints = run / "checkpoints";
    const std::string last = fmt::format("rank-{:05}-of-{:05}.safetensors", world - 1, world);
    const std::string first = fmt::format("rank-00000-of-{:05}.safetensors", world);
    damage_tensor(checkpoints / "step-00000020" / last);
    damage_tensor(checkpoints / "step-00000015" / first);
    const auto resumed = run_to(0, command(25));
    for (const std::string& why : {std::string("step-00000020 is skipped: rank "),
                                   std::string("step-00000015 is skipped: rank "), last, first})
      CHECK(count(resumed.err, why) >= 1);
    CHECK(count(resumed.err, ".safetensors: tensor ") >= 2);
    CHECK(count(resumed.err, "the checksum is wrong") >= 2);
    CHECK(holds(resumed.err, "step 10 of 25, from"));
    for (const char* step : {"step-00000015", "step-00000020"}) {
      CHECK(fs::exists(checkpoints / (std::string(step) + ".unusable")));
      run_to(0, {"checkpoint", "verify", checkpoints / step});  // saved again
    }
    CHECK(read_metrics(run).steps.size() == 25);
  }
}

TEST_CASE_FIXTURE(Finished,
                  "a shard that a network file system shows late is waited for, but not for long") {
  for (const int world : {2, 3, 4}) {
    const fs::path saved = dir.path() / fmt::format("saved-{}", world);
    const auto command = [&](const fs::path& run, int steps) {
      return joined(small_run(text, run, world, steps),
                    {"--train.global_batch=12", "--checkpoint.every=5", "--train.eval_every=0"});
    };
    run_to(0, command(saved, 10));
    for (const std::string how : {"late", "growing", "absent"}) {
      CAPTURE(world);
      CAPTURE(how);
      const fs::path run = dir.path() / fmt::format("{}-{}", how, world),
                     hidden = dir.file("hidden");
      fs::copy(saved, run, fs::copy_options::recursive);
      const fs::path file =
          run / "checkpoints/step-00000010" / fmt::format("rank-00001-of-{:05}.safetensors", world);
      fs::copy_file(file, hidden, fs::copy_options::overwrite_existing);
      if (how == "growing") {
        fs::resize_file(file, 100);
      } else {
        fs::remove(file);
      }
      std::optional<CliProcess> process;
      wait_until_opened(file.parent_path() / "index.json",
                        [&] { process.emplace(command(run, 12)); });
      if (how != "absent") fs::rename(hidden, file);
      const auto result = end_of(*process, 0);
      if (how == "absent") {
        CHECK(holds(result.err, "step 5 of 12, from"));
        CHECK(holds(result.err, "step-00000010 is skipped"));
        CHECK(holds(result.err, file.filename().string()));
      } else {
        CHECK(holds(result.err, "step 10 of 12, from"));
        CHECK_FALSE(holds(result.err, "is skipped"));
      }
    }
  }
}

TEST_CASE_FIXTURE(Finished,
                  "a checkpoint without index is skipped, and never makes a run start over") {
  const fs::path run = copy("newest");
  fs::remove(run / "checkpoints/step-00000020/index.json");
  refuse(kUsage, {"checkpoint", "verify", run / "checkpoints/step-00000020"},
         {"step-00000020 is not a checkpoint", "index.json"});
  const auto resumed = run_to(0, resume(run));
  CHECK(holds(resumed.err, "step-00000020 is skipped: it has no index.json"));
  CHECK(holds(resumed.err, "step 10 of 25, from"));

  const fs::path all = copy("all");
  for (const char* step : {"step-00000010", "step-00000020"}) {
    fs::remove(all / "checkpoints" / step / "index.json");
  }
  refuse(kIo, resume(all),
         {"none of the 2 checkpoints", "step-00000010 is skipped: it has no index.json",
          "step-00000020 is skipped: it has no index.json", "--run.out"});
  CHECK(read_metrics(all).steps.size() == 20);
  refuse(kUsage, {"consolidate", all, dir.path() / "model"},
         {"is not a checkpoint and contains none", "index.json"});

  const fs::path left = copy("left") / "checkpoints";
  fs::rename(left / "step-00000020", left / "step-00000020.unusable");
  fs::remove_all(left / "step-00000010");
  refuse(kIo, resume(left.parent_path()),
         {"has only checkpoints set aside as unusable", "step-00000020.unusable", "--run.out"});
}

TEST_CASE_FIXTURE(Finished, "a modified trainer.json is detected, and its checkpoint skipped") {
  const fs::path run = copy("changed"), both = copy("both");
  const auto change = [](const fs::path& of, const char* step) {
    flip_bit(of / "checkpoints" / step / "trainer.json", 40);
  };
  change(run, "step-00000020");
  const auto resumed = run_to(0, resume(run));
  CHECK(count(resumed.err, "step-00000020 is skipped: ") == 1);
  CHECK(count(resumed.err, "trainer.json: the checksum is wrong") == 1);
  CHECK(holds(resumed.err, "step 10 of 25, from"));

  change(both, "step-00000010");
  change(both, "step-00000020");
  refuse(kIo, resume(both),
         {"none of the 2 checkpoints", "step-00000010/trainer.json: the checksum is wrong",
          "step-00000020/trainer.json: the checksum is wrong", "--run.out"});
  CHECK(fs::exists(both / "checkpoints/step-00000020"));  // no checkpoint is renamed to .unusable
}

namespace {

// Rewrites the trainer state with a newer version, with correct checksums.
void renew_trainer_state(const fs::path& checkpoint) {
  std::string text = read_text(checkpoint / "trainer.json");
  const std::string version = "\"version\": 1";
  text.replace(text.find(version), version.size(), "\"version\": 12");
  write_text(checkpoint / "trainer.json", text);
  io::CheckpointIndex index = io::parse_index(read_text(checkpoint / "index.json"), "index.json");
  index.trainer->size = static_cast<std::int64_t>(text.size());
  index.trainer->crc64 = io::crc64(text.data(), text.size());
  write_text(checkpoint / "index.json", io::format_index(index));
}

}  // namespace

TEST_CASE_FIXTURE(Finished,
                  "a run does not fall back to checkpoints older than those of a newer tessera") {
  const fs::path index = copy("index"), state = copy("state");
  const char* const newest = "checkpoints/step-00000020";
  set_format_version(index / newest, 2);
  renew_trainer_state(state / newest);
  for (const fs::path& run : {index, state}) {
    const auto result = run_to(kIo, resume(run, 2));
    const std::string file =
        run == index ? "index.json has format version 2" : "trainer.json has format version 12";
    CHECK(count(result.err, (run / newest).string() + "/" + file) >= 1);
    CHECK(count(result.err, "use a newer tessera") >= 1);
    CHECK(fs::exists(run / newest));
    CHECK(read_metrics(run).steps.size() == 20);
    const auto list = run_cli({"checkpoint", "list", run});
    CHECK(count(list.out, "newer format") == 1);
    CHECK(count(list.out, "broken") == 0);
  }
}

TEST_CASE_FIXTURE(Finished, "run files that are not regular files are refused on all ranks") {
  const fs::path run = dir.path() / "run";
  for (const char* name : {"metrics.jsonl", "config.json"}) {
    CAPTURE(name);
    fs::create_directories(run);
    REQUIRE(::mkfifo((run / name).c_str(), 0600) == 0);
    const auto result = run_to(kIo, train({"--checkpoint.every=5"}, 2));
    const std::string reason = fmt::format(
        "cannot {} {}: it is no regular file",
        std::string(name) == "config.json" ? "replace" : "append to", (run / name).string());
    CHECK(count(result.err, "tessera: error: " + reason) == 1);
    const auto rank_1 = result.err.find("[rank 1] tessera: error: ");
    REQUIRE(rank_1 != std::string::npos);
    CHECK(result.err.find("culprit=rank 0 (", rank_1) != std::string::npos);
    CHECK(result.err.find("action=fix the error that this rank reports", rank_1) !=
          std::string::npos);
    CHECK(result.err.find(": " + reason, rank_1) != std::string::npos);
    fs::remove_all(run);
  }
  // A log that cannot be written does not prevent training.
  fs::create_directories(run / "logs");
  REQUIRE(::mkfifo((run / "logs/rank-0.log").c_str(), 0600) == 0);
  run_to(0, train({}, 1, 2));
}

TEST_CASE_FIXTURE(Finished, "paths that are no run, checkpoint or model") {
  const std::string absent = dir.file("absent"), file = text;
  refuse(kUsage, train({"--checkpoint.resume", absent}),
         {"checkpoint.resume is " + absent, "not a directory"});
  refuse(kIo, train({"--model.init_from", absent}), {absent, "does not exist"});
  refuse(kUsage, {"consolidate", file, absent}, {file, "is a file"});
  refuse(kUsage, {"eval", dir.path(), "--data", file}, {"is not a checkpoint"});
  refuse(kUsage, {"consolidate", file, ""}, {"CHECKPOINT and OUT"});
  refuse(kUsage, {"consolidate", file, absent, "--strip", "auto", "--strip", "x."},
         {"--strip auto cannot be combined"});
  refuse(kIo, {"checkpoint", "list", absent}, {absent, "No such file"});
  refuse(kUsage, {"checkpoint", "verify", file}, {file, "is a file"});
  fs::create_directory(dir.path() / "torch");
  dir.write("torch/config.json", "{}");
  dir.write("torch/pytorch_model.bin", "PK");
  refuse(kIo, {"eval", dir.file("torch"), "--data", file}, {"torch/pytorch_model.bin"});
  dir.write("torch/pytorch_model.bin", "\x80\x02\x8a");
  refuse(kUsage, {"eval", dir.file("torch"), "--data", file},
         {"torch/pytorch_model.bin", "PyTorch before 1.6"});
  refuse(kIo, small_run(text, text + "/run", 1, 5),
         {"cannot create the run directory " + text + "/run"});
  fs::create_directories(dir.path() / "blocked/metrics.jsonl");
  refuse(kIo, small_run(text, dir.file("blocked"), 1, 5),
         {"blocked/metrics.jsonl", "no regular file"});
}

TEST_CASE_FIXTURE(Finished, "a trace that cannot be written is refused before the first step") {
  const std::string absent = dir.file("absent/trace.json"), trace = dir.file("trace.json");
  refuse(kIo, train({"--train.profile", absent}),
         {"train.profile", dir.file("absent"), "No such file"});
  CHECK_FALSE(fs::exists(dir.file("run/metrics.jsonl")));
  run_to(0, train({"--train.profile", trace}));
  CHECK(fs::file_size(trace) > 100);
}

TEST_CASE_FIXTURE(Finished, "weights of another shape are refused with both shapes") {
  const auto start = [&](const Arguments& keys) {
    return train(joined({"--model.init_from", used}, keys));
  };
  const auto check = [](const Arguments& arguments, const std::vector<std::string>& parts) {
    const auto result = run_to(kUsage, arguments);
    CHECK(count(result.err, "tessera: error: ") == 1);
    for (const std::string& part : parts) {
      INFO("expected: ", part);
      CHECK(count(result.err, part) == 1);
    }
  };
  refuse(kUsage, start({"--model.layer_norm_eps=0.1"}),
         {"model.layer_norm_eps is 0.1", "leave the key out"});
  // All mismatches at once: configuration keys, and missing, misshapen and extra tensors.
  const Arguments keys{"--model.n_layer=1", "--model.n_embd=64", "--model.seq_len=64"};
  std::vector<std::string> parts{"model.n_layer is 1, but the model has 2",
                                 "model.n_embd is 64, but the model has 32",
                                 "leave these keys out",
                                 "\n  shape: h.0.ln_1.weight is [32], expected [64]\n",
                                 "\n  shape: wpe.weight is [32, 32], expected [64, 64]\n",
                                 "\n  unexpected: h.1.ln_1.weight [32]\n"};
  check(start(keys), parts);
  // A run keeps its positions, too.
  parts.emplace_back("model.seq_len is 64, but the model has 32 positions");
  check(joined(resume(copy("resumed")), keys), parts);
}

TEST_CASE_FIXTURE(Finished, "a full disk is reported once, as the error that ends the run") {
  for (const int world : {1, 2}) {
    CAPTURE(world);
    limit_files(0, 8'000);
    const auto result = run_cli(train({"--checkpoint.every=2", "--comm.backend=tcp"}, world, 60));
    limit_files(0, RLIM_INFINITY);
    CHECK(result.code == kIo);
    CHECK(count(result.err, "warning: step 2 was not saved, training continues") == 1);
    CHECK(count(result.err, "for the same reason as step 2\n") >= 1);
    CHECK(count(result.err, "metrics stay in memory") == 1);
    CHECK(count(result.err, "no loss curve") == 0);
    CHECK(count(result.err, "nothing was saved: no save succeeded") == 1);
    fs::remove_all(dir.file("run"));
  }
}

TEST_CASE_FIXTURE(Finished,
                  "output that cannot be written to a file is an error; a closed pipe is not") {
  const std::string second = (fs::path(used) / "checkpoints/step-00000010").string();
  const auto run_to = [&](const std::string& words, const std::string& where) {
    const std::string err = dir.file("err");
    const int status = std::system(  // as a user's shell runs it
        fmt::format("'{}' {} {} 2>'{}'", tessera_program(), words, where, err).c_str());
    CliResult result;
    result.code = WEXITSTATUS(status);
    result.err = read_text(err);
    return result;
  };
  for (const std::string& words : std::vector<std::string>{
           "checkpoint verify " + used, fmt::format("checkpoint diff {} {}", used, second),
           "--help", fmt::format("consolidate --json {} {}", used, dir.file("model"))}) {
    CAPTURE(words);
    const auto lost = run_to(words, ">/dev/full");
    CHECK(lost.code == kIo);
    CHECK(lost.err.starts_with("tessera: error: cannot write "));
    CHECK(holds(lost.err, "No space left on device"));
    CHECK(count(lost.err, "\n") == 1);
  }
  const auto left = run_to("checkpoint verify " + used, "| true");
  CHECK(left.err.empty());
  CHECK(run_to("checkpoint verify " + used, ">&-").err.empty());
}
