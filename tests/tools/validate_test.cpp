#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tools/tessera/config/config.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

template <typename Change>
Config changed(Change change) {
  Config config;
  config.data.train = {"t.txt"};
  change(config);
  return config;
}

}  // namespace

TEST_CASE("the defaults need only a data file") {
  Config config;
  CHECK_THROWS_HOLDING(InvalidArgument, "--data.train FILE", config.validate(1));
  config.data.train = {"t.txt"};
  CHECK_NOTHROW(config.validate(1));
  CHECK(config.train.micro_batch == 12);
  for (const int world : {2, 3, 4, 6, 12}) {
    Config shared = changed([](Config&) {});
    shared.validate(world);
    CHECK(shared.train.micro_batch * world == 12);
  }
}

TEST_CASE("indivisible batches are refused with the nearest valid sizes") {
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "is 12, which 5 ranks cannot share equally; the nearest values that fit are "
                       "10 or 15",
                       changed([](Config&) {}).validate(5));
  CHECK_THROWS_HOLDING(InvalidArgument, "the nearest values that fit are 16",
                       changed([](Config&) {}).validate(16));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "train.micro_batch 5; the nearest values that fit are train.micro_batch 4 "
                       "or 6, or train.global_batch 20 or 30",
                       changed([](Config& c) {
                         c.train.global_batch = 24;
                         c.train.micro_batch = 5;
                       }).validate(2));
  CHECK_THROWS_HOLDING(InvalidArgument, "train.micro_batch 12, or",
                       changed([](Config& c) { c.train.micro_batch = 100; }).validate(1));
  CHECK_NOTHROW(changed([](Config& c) { c.train.micro_batch = 3; }).validate(2));
}

TEST_CASE("texts of recomputation and units are checked before a run starts") {
  CHECK_NOTHROW(changed([](Config& c) { c.train.recompute = "every 2"; }).validate(1));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "train.recompute must be none, cheap, mlp, block or 'every N'",
                       changed([](Config& c) { c.train.recompute = "all"; }).validate(1));
  CHECK_THROWS_HOLDING(InvalidArgument, "shard.units must be block, a number of parameters",
                       changed([](Config& c) { c.shard.units = "50X"; }).validate(1));
}

TEST_CASE("heads must divide the width") {
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "model.n_head 3 does not divide model.n_embd 128; the nearest values that "
                       "fit are model.n_head 2 or 4, or model.n_embd 126 or 129",
                       changed([](Config& c) { c.model.n_head = 3; }).validate(1));
  CHECK_THROWS_HOLDING(InvalidArgument, "model.n_head 128, or model.n_embd 256",
                       changed([](Config& c) { c.model.n_head = 256; }).validate(1));
}

TEST_CASE("nccl is for GPUs") {
  Config nccl = changed([](Config& c) { c.comm.backend = "nccl"; });
  CHECK_NOTHROW(nccl.validate(1));
  nccl.train.device = "cpu";
  CHECK_THROWS_HOLDING(Unsupported, "comm.backend nccl is for ranks on GPUs", nccl.validate(1));
}

TEST_CASE("contradictory values are refused") {
  Config low = changed([](Config& c) { c.optim.lr = 5e-5; });
  low.validate(1);
  CHECK(low.optim.min_lr == 5e-5 / 10);  // follows lr unless given
  low.given.insert("optim.min_lr");
  low.optim.min_lr = 1e-4;
  CHECK_THROWS_HOLDING(InvalidArgument, "optim.min_lr 0.0001 is above optim.lr 5e-05",
                       low.validate(1));
  low.optim.schedule = "constant";
  CHECK_NOTHROW(low.validate(1));
  CHECK_THROWS_HOLDING(InvalidArgument, "auto, cpu, cuda or cuda:N, got 'gpu'",
                       changed([](Config& c) { c.train.device = "gpu"; }).validate(1));
  CHECK_NOTHROW(changed([](Config& c) { c.train.device = "cuda:7"; }).validate(1));
  CHECK_THROWS_HOLDING(InvalidArgument, "run.out is empty",
                       changed([](Config& c) { c.run.out = ""; }).validate(1));
  const auto chooses = [](Config& c) { c.checkpoint.load_tensors = {"h.0.*"}; };
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "checkpoint.load_tensors chooses tensors of model.init_from",
                       changed(chooses).validate(1));
  CHECK_NOTHROW(changed([&](Config& c) {
                  chooses(c);
                  c.model.init_from = "gpt2";
                }).validate(1));
  CHECK_THROWS_HOLDING(InvalidArgument, "got 0", changed([](Config&) {}).validate(0));
}
