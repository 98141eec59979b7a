#include "tools/tessera/train/fingerprint.h"

#include <doctest/doctest.h>

#include <set>

#include "comm/control/memory_store.h"
#include "comm/control/rendezvous.h"
#include "core/base/error.h"
#include "tests/comm/ranks.h"
#include "tests/support/text.h"
#include "tools/tessera/config/fields.h"

using namespace tessera;
using namespace tessera::test;
using namespace tessera::tools;

namespace {

constexpr Device kCpu{DeviceType::CPU, 0};

void change(Config& config, const Field& field) {
  std::visit(
      [](auto* value) {
        using T = std::remove_cvref_t<decltype(*value)>;
        if constexpr (std::is_same_v<T, std::string>) {
          *value += "x";
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          value->push_back("x");
        } else {
          *value += 1;
        }
      },
      field.ref(config));
}

std::string changed_fingerprint(const Field& field) {
  Config config;
  change(config, field);
  return fingerprint(config, kCpu);
}

// Errors at a rendezvous in which rank `odd` has another fingerprint.
std::string meet(int world, int odd, const std::string& theirs) {
  comm::MemoryStore store;
  const std::string usual = fingerprint({}, kCpu);
  const auto results = run_ranks(world, [&](int rank) {
    comm::rendezvous(store, comm::make_hello(rank, world, "run", rank == odd ? theirs : usual),
                     60s);
  });
  for (const RankResult& result : results) CHECK(result.error == results[0].error);
  return results[0].error;
}

}  // namespace

TEST_CASE("a field of the configuration that one rank has differently is named, whichever it is") {
  const std::set<std::string_view> free = {"train.threads", "train.memory_limit", "train.device",
                                           "comm.bind"};
  for (const Field& field : fields()) {
    CAPTURE(field.key);
    for (int world = 2; world <= 4; ++world) {
      for (int odd = 0; odd < world; ++odd) {
        CAPTURE(world);
        CAPTURE(odd);
        const std::string error = meet(world, odd, changed_fingerprint(field));
        if (free.contains(field.key)) {
          CHECK(error == "");
          continue;
        }
        // With two ranks, the lower one is taken as the reference.
        const int named = world == 2 ? 1 : odd;
        CHECK(holds(error, fmt::format("rendezvous: rank {} differs from the others in one field: "
                                       "{}: rank {} (",
                                       named, field.key, named)));
      }
    }
  }
}

TEST_CASE("version, build and device are compared, and all that differs is told at once") {
  const std::string usual = fingerprint({}, kCpu);
  for (const std::string key : {"tessera", "build", "device"}) {
    CAPTURE(key);
    const std::size_t at = ("\n" + usual).find("\n" + key + " = ");
    REQUIRE(at != std::string::npos);
    std::string theirs = usual;
    theirs.insert(at + key.size() + 3, "another ");
    for (int world = 2; world <= 4; ++world) {
      CAPTURE(world);
      CHECK(
          holds(meet(world, 1, theirs), fmt::format("rank 1 differs from the others in one field: "
                                                    "{}: rank 1 (",
                                                    key)));
    }
  }
  const std::string device = meet(2, 1, fingerprint({}, {DeviceType::CUDA, 0}));
  CHECK(holds(device, "device: rank 1 ("));
  CHECK(holds(device, ") has 'cuda', rank 0 ("));
  Config config;
  config.optim.lr = 0.5;
  config.model.n_layer = 7;
  const std::string error = meet(3, 1, fingerprint(config, kCpu));
  CHECK(holds(error, "2 fields: model.n_layer: rank 1 ("));
  CHECK(holds(error, "has '7', ranks 0, 2 have '4'; optim.lr: rank 1 ("));
}
