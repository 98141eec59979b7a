#include "tools/tessera/config/depth.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"
#include "tools/tessera/config/load.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

Config with_depth(const std::vector<std::string>& words) {
  return load_config(parse_train_arguments(words), {});
}

}  // namespace

TEST_CASE("the depth sets width, heads, batch, steps and rates") {
  const Config twelve = with_depth({"--model.depth", "12"});
  CHECK(twelve.model.arch == "nanochat");
  CHECK(twelve.model.n_layer == 12);
  CHECK(twelve.model.n_embd == 768);
  CHECK(twelve.model.n_head == 6);
  CHECK(twelve.train.global_batch * twelve.model.seq_len == 1 << 19);
  // Blocks and head have 110,100,480 parameters; twelve tokens each.
  CHECK(twelve.train.steps == 2520);
  CHECK(twelve.optim.name == "muon");
  CHECK(twelve.optim.lr == 0.00361);  // 0.1 / sqrt(768)
  CHECK(twelve.optim.schedule == "wsd");

  const Config four = with_depth({"--model.depth=4"});
  CHECK(four.model.n_embd == 256);
  CHECK(four.train.global_batch * four.model.seq_len == 1 << 18);
  CHECK(four.train.steps == 528);
  CHECK(with_depth({"--model.depth=5"}).model.n_embd == 384);  // a multiple of the head's width
  CHECK(with_depth({"--model.depth=1"}).model.n_head == 1);
  for (int depth = 1; depth <= 512; ++depth)
    CHECK_NOTHROW(with_depth({"--model.depth", std::to_string(depth)}).validate(1, false));
}

TEST_CASE("given keys stay, and the depth's others follow from them") {
  const Config config = with_depth({"--model.depth=12", "--model.seq_len=1024",
                                    "--train.global_batch=128", "--optim.schedule=linear"});
  CHECK(config.model.seq_len == 1024);
  CHECK(config.train.global_batch == 128);
  CHECK(config.train.steps == 10080);
  CHECK(config.optim.lr == 0.0018);  // half of depth 12's, for a quarter of its batch
  CHECK(config.optim.schedule == "linear");
  CHECK(with_depth({"--model.depth=12", "--model.vocab_size=4096"}).train.steps <
        config.train.steps / 4);
  const Config adamw = with_depth({"--model.depth=12", "--optim.name=adamw"});
  CHECK(adamw.optim.lr == Config{}.optim.lr);
}

TEST_CASE("the keys that a depth sets are listed as flags, and mean the same without it") {
  const Config config = with_depth({"--model.depth=4", "--model.n_embd=128"});
  const auto lines = depth_lines(config);
  REQUIRE(lines.size() == 3);
  CHECK(lines[0] ==
        "--model.arch nanochat --model.n_layer 4 --model.n_head 1 --model.seq_len 2048");
  CHECK(lines[1] == "--train.global_batch 64 --train.steps 456");
  CHECK(
      lines[2].starts_with("--optim.name muon --optim.warmup_steps 40 --optim.lr 0.00442 "
                           "--optim.lr_scale 'embed.*=2' 'head.*=2'"));
  CHECK(depth_lines(with_depth({"--model.n_layer=4"})).empty());

  test::TempDir dir;
  const std::string file = dir.write("config.json", to_json(config).dump());
  const Config again = with_depth({file});
  CHECK(to_json(again) == to_json(config));
  CHECK(again.from_depth.empty());
  CHECK_THROWS_HOLDING(InvalidArgument, "model.depth is 8, but model.n_layer is 4",
                       with_depth({file, "--model.depth=8"}));
}

TEST_CASE("a depth and a model that exists exclude each other") {
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "model.depth 4 makes a new model, and model.preset names one",
                       with_depth({"--model.depth=4", "--model.preset=gpt2-124m"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "and model.init_from names one",
                       with_depth({"--model.depth=4", "--model.init_from=there"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "model.depth must be at least 0",
                       with_depth({"--model.depth=-1"}));
}
