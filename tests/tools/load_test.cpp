#include "tools/tessera/config/load.h"

#include <doctest/doctest.h>

#include <cstdlib>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::tools;

using List = std::vector<std::string>;

TEST_CASE("flags: both forms, '-' as '_', the last one wins, lists take all following words") {
  const auto arguments =
      parse_train_arguments({"run.json", "--model.n-layer", "3", "--optim.lr", "-1",
                             "--model.n_layer=5", "--run.out=", "--data.train", "a.bin", "b.bin",
                             "--train.profile=--x=1", "--data.train=c.bin"});
  CHECK(arguments.config_file == "run.json");
  REQUIRE(arguments.overrides.size() == 5);
  CHECK(arguments.overrides[0].key == "model.n_layer");
  CHECK(arguments.overrides[0].values == List{"5"});
  CHECK(arguments.overrides[1].values == List{"-1"});
  CHECK(arguments.overrides[2].values == List{""});
  CHECK(arguments.overrides[3].values == List{"a.bin", "b.bin", "c.bin"});
  CHECK(arguments.overrides[4].values == List{"--x=1"});
}

TEST_CASE("unknown words are refused") {
  CHECK_THROWS_HOLDING(InvalidArgument, "--model.layers; did you mean --model.n_layer?",
                       parse_train_arguments({"--model.layers=3"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "unknown option --; ", parse_train_arguments({"--"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "--optim.lr needs a value",
                       parse_train_arguments({"--optim.lr", "--run.out", "x"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "--data.train needs a value",
                       parse_train_arguments({"--data.train"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "found a.json and b.json",
                       parse_train_arguments({"a.json", "b.json"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "unknown option -x", parse_train_arguments({"-x"}));
}

TEST_CASE("flag beats environment beats file beats default") {
  const test::TempDir dir;
  TrainArguments arguments;
  arguments.config_file = dir.write(
      "c.json", R"({"model": {"n_layer": 1, "n_head": 1, "n_embd": 16}, "data": {"train": "f"}})");
  arguments.overrides = {{"model.n_layer", {"3"}}};
  const Environment environment = {{"TESSERA_MODEL_N_LAYER", "2"},
                                   {"TESSERA_MODEL_N_HEAD", "2"},
                                   {"TESSERA_DATA_TRAIN", R"(["x","y"])"}};
  const Config config = load_config(arguments, environment);
  CHECK(config.model.n_layer == 3);
  CHECK(config.model.n_head == 2);
  CHECK(config.model.n_embd == 16);
  CHECK(config.model.seq_len == Config{}.model.seq_len);
  CHECK(config.data.train == List{"x", "y"});
}

TEST_CASE("a wrong value is reported with its source") {
  CHECK_THROWS_HOLDING(InvalidArgument, "--optim.lr: optim.lr must be a number, found 'fast'",
                       load_config(parse_train_arguments({"--optim.lr=fast"}), {}));
  CHECK_THROWS_HOLDING(InvalidArgument, "TESSERA_OPTIM_LR: optim.lr",
                       load_config({}, {{"TESSERA_OPTIM_LR", "fast"}}));
}

TEST_CASE("misspelled variable names are refused, unrelated variables are not") {
  CHECK_THROWS_HOLDING(InvalidArgument, "did you mean TESSERA_OPTIM_LR?",
                       load_config({}, {{"TESSERA_OPTIM_LRR", "1"}}));
  CHECK_NOTHROW(load_config({}, {{"TESSERA_RUN_ID", "abc"}, {"TESSERA_SOURCE_DIR", "/"}}));
  // These names are within two edits of each other, and both valid.
  CHECK(load_config({}, {{"TESSERA_OPTIM_BETA1", "0.5"}}).optim.beta1 == 0.5);
  CHECK(load_config({}, {{"TESSERA_OPTIM_BETA2", "0.5"}}).optim.beta2 == 0.5);
}

TEST_CASE("an unreadable configuration is an I/O error") {
  const test::TempDir dir;
  TrainArguments arguments;
  arguments.config_file = dir.file("absent.json");
  CHECK_THROWS_HOLDING(IoError, "does not exist", load_config(arguments, {}));
  arguments.config_file = dir.path().string();
  CHECK_THROWS_HOLDING(IoError, "not a regular file", load_config(arguments, {}));
  arguments.config_file = dir.write("empty.json", "");
  CHECK_THROWS_HOLDING(InvalidArgument, "empty.json:1: not valid JSON", load_config(arguments, {}));
}
