#include <doctest/doctest.h>

#include "core/base/error.h"
#include "core/tensor.h"
#include "tests/support/check_throws.h"
#include "tests/support/text.h"
#include "tools/tessera/train/memory_advice.h"
#include "tools/tessera/train/memory_plan.h"
#include "tools/tessera/train/setup.h"

using namespace tessera;
using namespace tessera::tools;
using test::holds;

namespace {

Config config_of(int world_size) {
  Config config;
  config.data.train = {"tokens.bin"};
  config.train.global_batch = 24;
  config.validate(world_size);
  return config;
}

// Activations of 0.5 MiB per sequence and state of 2 MiB, by made-up rules.
std::optional<std::int64_t> peak_of(const Config& config) {
  constexpr std::int64_t kKiB = 1024;
  std::int64_t each = 512 * kKiB, state = 2048 * kKiB;
  if (config.train.recompute == "cheap") each = each * 3 / 4;
  if (config.train.recompute == "mlp") each /= 2;
  if (config.train.recompute == "block") each /= 4;
  if (config.train.precision != "fp32") each /= 2;
  if (config.train.precision == "bf16-true") state /= 2;
  if (config.shard.mode == "full") state /= 2;
  return config.train.micro_batch * each + state;
}

}  // namespace

TEST_CASE("advice has planned flags that the configuration leaves open, and that help") {
  Config config = config_of(1);
  std::string advice = memory_advice(config, 1, DeviceType::CUDA, peak_of).text();
  CAPTURE(advice);
  CHECK(holds(advice, "--train.micro_batch 12         # 7.00 MiB per rank: activations of 12 "));
  CHECK(holds(advice, "--train.recompute cheap        # 10.0 MiB per rank"));
  CHECK(holds(advice, "--train.recompute mlp          # 7.00 MiB per rank"));
  CHECK(holds(advice, "--train.recompute block        # 4.00 MiB per rank"));
  CHECK(holds(advice, "--train.precision bf16 "));
  CHECK(holds(advice, "--nproc 2 "));
  CHECK_FALSE(holds(advice, "shard.mode"));

  // CPU ranks share the host's memory.
  advice = memory_advice(config, 1, DeviceType::CPU, peak_of).text();
  CHECK_FALSE(holds(advice, "nproc"));

  config = config_of(2);
  config.given.insert("train.micro_batch");
  config.train.micro_batch = 3;
  config.train.recompute = "every 2";
  config.train.precision = "bf16";
  config.shard.mode = "none";
  advice = memory_advice(config, 2, DeviceType::CUDA, peak_of).text();
  CHECK_FALSE(holds(advice, "recompute mlp"));
  CHECK(holds(advice, "--train.recompute block"));
  CHECK(holds(advice, "--train.micro_batch 2 "));
  CHECK(holds(advice, "--shard.mode full"));
  CHECK(holds(advice, "1/2 of weights"));
  CHECK(holds(advice, "--train.precision bf16-true"));
  CHECK(holds(advice, "--nproc 4 "));  // 3 ranks of 3 sequences don't make 24
  const auto same = [](const Config&) { return std::optional<std::int64_t>(1); };
  CHECK(memory_advice(config, 2, DeviceType::CPU, same).text().empty());

  config.train.micro_batch = 1;
  config.train.recompute = "block";
  config.train.precision = "bf16-true";
  config.shard.mode = "full";
  CHECK(memory_advice(config, 24, DeviceType::CUDA, peak_of).text().empty());
}

TEST_CASE("an out-of-memory error gets a ledger and advice; other errors are unchanged") {
  const Config config = config_of(1);
  const auto context = Context::create();
  const Tensor kept = Tensor::full(context, {8}, DType::F32, 1.0);
  const auto message = [&](const std::function<int()>& work) -> std::string {
    try {
      with_memory_advice(config, 1, *context, peak_of, work);
    } catch (const OutOfMemory& error) {
      return error.what();
    }
    return "";
  };
  const std::string bare = message([]() -> int { throw OutOfMemory("the driver has no memory"); });
  CAPTURE(bare);
  CHECK(bare.starts_with("the driver has no memory\ncategory"));
  CHECK(holds(bare, "total"));
  CHECK(bare.find("--train.micro_batch 12") > bare.find("total"));

  const std::string whole = message([&]() -> int {
    Tensor::empty(context, {std::int64_t{1} << 55}, DType::F32);
    return 0;
  });
  CAPTURE(whole);
  CHECK(whole.find("category") == whole.rfind("category"));
  CHECK(holds(whole, "--train.recompute block"));

  // Where the system refuses memory, nothing is planned.
  const std::string refused = message([&]() -> int {
    Tensor::empty(context, {std::int64_t{1} << 50}, DType::F32);
    return 0;
  });
  CAPTURE(refused);
  CHECK(holds(refused, "host memory is exhausted: "));
  CHECK(refused.find("`tessera plan` with the same flags") > refused.find("total"));
  CHECK(!holds(refused, "--train."));

  CHECK(with_memory_advice(config, 1, *context, peak_of, [] { return 7; }) == 7);
  CHECK_THROWS_AS(
      with_memory_advice(config, 1, *context, peak_of, []() -> int { throw IoError("a disk"); }),
      IoError);
}

TEST_CASE("head dims that no GPU kernel supports are refused by name") {
  models::Arch model;
  model.n_embd = 2048;
  model.n_head = 8;
  const Device gpu{DeviceType::CUDA, 0};
  CHECK_NOTHROW(require_head_dim(model, gpu, "--device cpu"));
  model.n_head = 4;
  CHECK_NOTHROW(require_head_dim(model, {}, "--device cpu"));
  CHECK_THROWS_WITH_AS(
      require_head_dim(model, gpu, "--device cpu"),
      "model.n_embd 2048 over model.n_head 4 is a head_dim of 512, and the GPU kernels support "
      "at most 256; raise model.n_head, or compute on the CPU (--device cpu)",
      Unsupported);
}

TEST_CASE("a run is refused if total memory is too small, and warned if free memory is") {
  constexpr std::int64_t kMiB = 1 << 20;
  MemoryNeed need;
  const auto advice = [] {
    MemoryAdvice flags;
    flags.add("--flag 1", "less");
    return flags;
  };
  need.plan.peak = 10 * kMiB;
  need.plan.at_peak[static_cast<std::size_t>(MemoryCategory::Parameters)] = 10 * kMiB;
  need.ranks = 4;
  need.there = "this host has";
  CHECK(check_memory(need, advice, true).empty());  // unknown memory size
  need.memory = {50 * kMiB, 40 * kMiB};
  CHECK(check_memory(need, advice, true).empty());
  need.memory = {40 * kMiB, 39 * kMiB};
  CHECK(
      check_memory(need, advice, true) ==
      "the 4 ranks here need up to 40.0 MiB of memory, and this host has 40.0 MiB (39.0 MiB of it "
      "free now); a rank's share: parameters 10.0 MiB");
  need.memory = {39 * kMiB, 39 * kMiB};
  CHECK_THROWS_HOLDING(OutOfMemory, "and this host has 39.0 MiB; a rank's share: parameters",
                       check_memory(need, advice, true));
  CHECK_THROWS_HOLDING(
      OutOfMemory, "--train.memory_check warn\nto use less memory, set one or more of:\n  --flag 1",
      check_memory(need, advice, true));
  CHECK(check_memory(need, advice, false).find("need up to 40.0 MiB") != std::string::npos);
}
