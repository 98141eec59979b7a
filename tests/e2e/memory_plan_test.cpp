// The memory that a run uses is the memory that was planned, to the byte, on every rank.

#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "tests/e2e/small_run.h"
#include "tests/support/paths.h"

using namespace tessera::test;
namespace fs = std::filesystem;

namespace {

std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  int number(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random_);
  }
  std::string one_of(const std::vector<std::string>& words) {
    return words[static_cast<std::size_t>(number(0, static_cast<int>(words.size()) - 1))];
  }

 private:
  std::mt19937_64 random_;
};

// A training run of a few steps, with an evaluation, a save and perhaps a sample in between.
// @param base  a model to adapt
Arguments random_run(Draw& draw, bool on_fibers, const std::string& text, const std::string& run,
                     const std::string& base, int& world) {
  const int some = on_fibers ? 2 : 3;  // fibers are slow
  world = draw.number(1, some + 1);
  const int heads = draw.number(1, some), micro = draw.number(1, some), passes = draw.number(1, 4);
  Arguments words = {"train", "--json"};
  if (world > 1) words = {"train", "--json", "--nproc", std::to_string(world)};
  const auto add = [&](const std::string& key, const std::string& value) {
    words.push_back("--" + key + "=" + value);
  };
  const auto add_number = [&](const std::string& key, int value) {
    add(key, std::to_string(value));
  };
  add("run.out", run);
  add("data.train", text);
  add_number("train.steps", 5);
  add_number("train.eval_every", draw.number(0, 3));
  add_number("train.eval_batches", 1);
  add_number("train.micro_batch", micro);
  add_number("train.global_batch", micro * passes * world);
  add_number("train.threads", draw.number(1, 3));
  add("train.precision", draw.one_of({"fp32", "bf16", "bf16-true"}));
  add("train.recompute", draw.one_of({"none", "cheap", "mlp", "block", "every 2"}));
  const int start = draw.number(0, 5);
  bool has_experts = false;
  if (start < 2) {
    add("model.init_from", base);
    add_number("model.seq_len", draw.number(2, 32));
  } else {
    const std::string arch = draw.one_of({"gpt2", "gpt2", "mixtral", "qwen3_moe"});
    add("model.arch", arch);
    if (arch != "gpt2") {
      const int experts = draw.number(1, 5);
      add_number("model.n_expert", experts);
      add_number("model.n_expert_used", draw.number(1, experts));
      add_number("model.n_inner", 8 * draw.number(1, 5));
      if (arch == "qwen3_moe") add_number("model.n_expert_inner", 4 * draw.number(1, 8));
      add("model.aux_loss", draw.one_of({"0", "0.01"}));
      has_experts = true;
    }
    add_number("model.n_layer", draw.number(1, some + 1));
    add_number("model.n_head", heads);
    add_number("model.n_embd", heads * 4 * draw.number(1, 6));
    add_number("model.vocab_size", draw.number(256, on_fibers ? 600 : 3000));
    add_number("model.seq_len", draw.number(2, 70));
  }
  if (start == 0) {
    add_number("lora.rank", draw.number(1, 9));
    add("lora.dropout", draw.one_of({"0", "0.1"}));
    add("lora.targets", draw.one_of({"all-linear", "c_attn", "mlp.c_proj"}));
  }
  if (start > 0 && !has_experts && draw.number(0, 2) == 0)
    add("optim.freeze", draw.one_of({"h.0.*", "wte.weight", "h.*.weight"}));
  if (start > 0) add("optim.name", draw.one_of({"adamw", "adamw8bit", "muon"}));
  add("model.dropout", draw.one_of({"0", "0.1"}));
  add("shard.mode", draw.one_of({"full", "full", "gradients", "optimizer", "hybrid", "none"}));
  if (words.back().ends_with("hybrid") && world == 4) add_number("shard.group", 2);
  add_number("shard.gather_ahead", draw.number(0, 3));
  add_number("shard.reduce_behind", draw.number(0, 2));
  add("shard.units", draw.one_of({"block", "block", "2K", "1B",
                                  has_experts ? "layers.*.mlp.experts.*,layers.0.attention"
                                              : "h.*.mlp,h.0.attn"}));
  add_number("shard.check_replicas_every", draw.number(0, 3));
  add("shard.reshard_after_forward", draw.one_of({"on", "off"}));
  add("shard.accumulate", draw.one_of({"sharded", "sharded", "whole"}));
  add("shard.gradient_dtype", draw.one_of({"f32", "f32", "bf16"}));
  add("shard.reduce_dtype", draw.one_of({"f32", "f32", "bf16"}));
  add_number("checkpoint.every", draw.number(0, 3));
  add("checkpoint.async", draw.one_of({"on", "off"}));
  add("checkpoint.what", draw.one_of({"all", "model"}));
  if (words.back().ends_with("all")) add("optim.ema", draw.one_of({"0", "0.99"}));
  add("comm.backend", draw.one_of({"shm", "tcp"}));
  if (draw.number(0, 1) == 1) {
    add("train.sample_prompt", "once");
    add_number("train.sample_tokens", 5);
  }
  if (on_fibers) add("train.device", "cuda");
  return words;
}

// Runs `runs` configurations, and compares planned and measured memory of every rank.
void compare(const Fixture& fixture, std::uint64_t runs, bool on_fibers) {
  Draw draw(number_of("TESSERA_CAMPAIGN_SEED", 0));
  const std::string base = fixture.dir.file("base");
  run_to(0, joined(small_run(fixture.text, base, 1, 1), {"--checkpoint.every=1"}));
  std::string lines;
  for (int i = 0; i < 400; ++i) lines += fmt::format("{{\"text\":\"{:0{}}\"}}\n", i, 3 + i % 30);
  const std::string packed = fixture.dir.write("packed.jsonl", lines);
  for (std::uint64_t i = 0; i < runs; ++i) {
    const std::string run = fixture.dir.file("run");
    int world = 1;
    const Arguments words =
        random_run(draw, on_fibers, i % 4 == 0 ? packed : fixture.text, run, base, world);
    std::string line;
    for (const std::string& word : words) line += word + " ";
    CAPTURE(line);
    const auto result = run_to(
        0, words, on_fibers ? Variables{{"TESSERA_CUDA_PLUGIN", fiber_plugin()}} : Variables{});
    const auto summary = nlohmann::json::parse(result.out);
    CHECK(summary["memory_peak_bytes"] == summary["memory_planned_bytes"]);
    int ranks = 0;
    for (const auto& entry : fs::recursive_directory_iterator(run)) {
      if (entry.path().extension() != ".log") continue;
      std::ifstream file(entry.path());
      const std::string log(std::istreambuf_iterator<char>(file), {});
      CAPTURE(entry.path().string());
      const std::regex peaks(R"(memory.*: peak (.*?)(?: bytes)?[,;] planned (.*?)(?: bytes)?\n)");
      int compared = 0;
      for (std::sregex_iterator found(log.begin(), log.end(), peaks), end; found != end; ++found) {
        CHECK((*found)[1].str() == (*found)[2].str());
        ++compared;
      }
      // All, by category, by operation, and of the host of a device.
      CHECK(compared == (on_fibers ? 4 : 3));
      ++ranks;
    }
    CHECK(ranks == world);
    fs::remove_all(run);
  }
}

}  // namespace

// Draws others with each commit; TESSERA_PLANNED_RUNS sets their number.
TEST_CASE_FIXTURE(Fixture, "planned and measured peak are equal to the byte on every rank") {
  compare(*this, number_of("TESSERA_PLANNED_RUNS", 40), false);
}

TEST_CASE_FIXTURE(Fixture, "a process on the CPU holds little more than was planned") {
  for (const Arguments& keys :
       {Arguments{"--train.precision=fp32"},
        Arguments{"--train.precision=bf16", "--train.recompute=cheap", "--checkpoint.every=1"}}) {
    const auto result =
        run_to(0, joined(joined(small_run(text, dir.file("run"), 1, 3), keys),
                         {"--json", "--train.device=cpu", "--train.threads=2", "--model.n_layer=8",
                          "--model.n_head=4", "--model.n_embd=256", "--model.seq_len=128",
                          "--train.global_batch=16", "--train.eval_every=1"}));
    const auto summary = nlohmann::json::parse(result.out);
    const auto planned = summary["memory_planned_bytes"].get<std::int64_t>();
    CHECK(planned > 200 << 20);
    // Program and libraries, buffers of products, and gaps between tensors.
    CHECK(summary["resident_peak_bytes"].get<std::int64_t>() < planned + (64 << 20));
    fs::remove_all(dir.file("run"));
  }
}

// Calls, bytes, operations and time of a kernel in a step.
struct Counted {
  double calls = 0, bytes = 0, flops = 0, milliseconds = 0;
};

TEST_CASE_FIXTURE(Fixture,
                  "the planned time of a step counts the kernels that run, and takes their times") {
  const std::string profile = dir.file("profile.json");
  // Five micro-batches, so that the last ones are extrapolated.
  const Arguments keys = {"--train.global_batch=20", "--train.micro_batch=4",
                          "--train.threads=1",       "--train.precision=bf16",
                          "--model.dropout=0.1",     "--train.eval_every=1",
                          "--checkpoint.every=1"};
  run_to(0, joined(joined(small_run(text, dir.file("run"), 1, 9), keys),
                   {"--train.profile=" + profile}));

  // Gives every event a time that follows from its work: nothing is measured on a machine with other load.
  std::map<std::string, Counted> measured;
  std::ifstream file(profile);
  auto trace = nlohmann::json::parse(file);
  double now = 0;
  for (auto& event : trace.at("traceEvents")) {
    if (!event.contains("args") || !event.at("args").contains("step")) continue;
    const auto& args = event.at("args");
    const double bytes = args.at("read").get<double>() + args.at("written").get<double>();
    const auto flops = args.at("flops").get<double>();
    const double microseconds = flops > 0 ? flops * 1e-4 : bytes * 1e-3;
    event["ts"] = now;
    event["dur"] = microseconds;
    now += microseconds;
    Counted& sum = measured[event.at("name")];
    sum.calls += 1.0 / 3;  // steps
    sum.bytes += bytes / 3;
    sum.flops += flops / 3;
    sum.milliseconds += microseconds / 3e3;
  }
  std::ofstream(profile) << trace;
  Arguments plan = joined(small_run(text, dir.file("run"), 1, 9), keys);
  plan[0] = "plan";
  const auto time =
      nlohmann::json::parse(
          run_to(0, joined(plan, {"--json", "--model.vocab_size=256", "--time", profile})).out)
          .at("time");
  double planned = 0;
  for (const auto& item : time.at("kernels").items()) {
    const std::string& kernel = item.key();
    const auto& row = item.value();
    CAPTURE(kernel);
    const Counted& real = measured[kernel];
    CHECK(row.at("calls").get<double>() == doctest::Approx(real.calls));
    CHECK(row.at("bytes").get<double>() == doctest::Approx(real.bytes));
    CHECK(row.at("flops").get<double>() == doctest::Approx(real.flops));
    CHECK(row.at("ms").get<double>() == doctest::Approx(real.milliseconds).epsilon(1e-3));
    measured.erase(kernel);
    planned += row.at("ms").get<double>();
  }
  CHECK(measured.empty());
  const auto milliseconds = time.at("ms_per_step").get<double>();
  CHECK(planned == doctest::Approx(milliseconds));
  CHECK(time.at("tokens_per_s").get<double>() == doctest::Approx(20 * 32 / milliseconds * 1e3));

  // Two ranks wait for each other, and know nothing of their link from the profile.
  const auto ranks = [&](int global_batch) {
    return joined(plan,
                  {"--json", "--model.vocab_size=256", "--world=2", "--shard.mode=optimizer",
                   "--train.global_batch=" + std::to_string(global_batch), "--time", profile});
  };
  CHECK(run_to(2, ranks(40)).err.find("--link") != std::string::npos);
  const auto milliseconds_of = [&](int global_batch) {
    const auto result = run_to(0, joined(ranks(global_batch), {"--link", "1MB"}));
    const auto said = nlohmann::json::parse(result.out).at("time");
    CHECK(said.at("ms_waiting_for_collectives").get<double>() > 30);  // 70,400 bytes or more
    return said.at("ms_per_step").get<double>();
  };
  // Micro-batches 4 and 5 are extrapolated.
  const double three = milliseconds_of(24), two = milliseconds_of(16), five = milliseconds_of(40);
  CHECK(five == doctest::Approx(three + 2 * (three - two)));
  CHECK(three > two);
  const std::string timeline = dir.file("timeline.json");
  run_to(0, joined(ranks(24), {"--link", "1MB", "--timeline", timeline}));
  int steps = 0;
  const auto estimated = nlohmann::json::parse(dir.read("timeline.json"));
  for (const auto& event : estimated.at("traceEvents")) steps += event.at("name") == "optimizer";
  CHECK(steps == 1);
  CHECK(run_to(2, joined(plan, {"--train.threads=2", "--time", profile})).err.find("threads 2") !=
        std::string::npos);
  CHECK(run_to(2, joined(plan, {"--memory=10EB"})).err.find("--memory") != std::string::npos);
  CHECK(run_to(2, joined(plan, {"--time", profile, "--timeline", profile})).err.find("replace") !=
        std::string::npos);
  const std::string said =
      run_to(2, joined(plan, {"--train.precision=fp32", "--time", profile})).err;
  CHECK(said.find("precision bf16, and --time needs precision fp32") != std::string::npos);
  CHECK(run_to(2, joined(plan, {"--time", text})).err.find("--train.profile") != std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "the plan of a GPU is equal to the byte to what its kernels use") {
  compare(*this, number_of("TESSERA_PLANNED_RUNS", 4), true);
}
