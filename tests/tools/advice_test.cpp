#include "tools/tessera/train/advice.h"

#include <doctest/doctest.h>

using namespace tessera::tools;

TEST_CASE("usual learning rates are near those of published models") {
  CHECK(usual_lr(124'000'000) == doctest::Approx(6e-4).epsilon(0.1));      // GPT-3 Small: 6e-4
  CHECK(usual_lr(1'300'000'000) == doctest::Approx(3.1e-4).epsilon(0.1));  // GPT-3 XL: 2e-4
  CHECK(usual_lr(1000) == 1e-3);
  CHECK(usual_lr(70'000'000'000) == 3e-5);
}

TEST_CASE("settings that are rarely meant are noted, and usual ones are not") {
  Config config;
  CHECK(advice(config, 1'000'000, true, 4, 4).empty());
  config.train.steps = 100;
  config.optim.lr = 0.1;
  const auto notes = advice(config, 1'000'000, true, 2, 4);
  REQUIRE(notes.size() == 3);
  CHECK(notes[0] ==
        "note: the learning rate does not reach optim.lr: train.steps 100 is not above "
        "optim.warmup_steps 100");
  CHECK(notes[1] ==
        "note: optim.lr 0.1 is 100 times the rate that is usual for 1 million weights, 0.001");
  CHECK(notes[2] == "note: 4 ranks share 2 processors: fewer ranks would be as fast");
  config.optim.warmup_steps = 0;
  CHECK(advice(config, 1'000'000, false, 4, 0).empty());  // fine-tuning, on GPUs
  config.optim.lr = 1e-6;
  REQUIRE(advice(config, 1'000'000, true, 4, 4).size() == 1);
  CHECK(advice(config, 1'000'000, true, 4, 4)[0].find("is 1/1000 of the rate") !=
        std::string::npos);
}
