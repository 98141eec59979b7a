#include "comm/sharding/layout_text.h"

#include <doctest/doctest.h>

#include "comm/single.h"
#include "comm/threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;

namespace {

struct Given {
  std::string name = "weight";
  Shape shape = {8, 4};
  bool decay = true;
  std::string unit = "h0";
  DType compute = DType::F32, master = DType::F32;
};

// A rank's layout text for a root and one block.
std::string text(const Given& given, comm::Communicator& communicator, std::string mode = "full") {
  nn::Module model;
  const Parameter table(model, "table", {5, 4}, {});
  nn::Module block(model, given.unit);
  const Parameter first(block, given.name, given.shape, {}, given.decay);
  const Parameter second(block, "bias", {8}, {});
  const comm::Mesh mesh = test::mesh_of(mode, communicator);
  return comm::layout_text(comm::ShardedModel(
      model, mesh, test::spec_of(mode, given.compute, given.master), Context::create()));
}

std::string text(const Given& given) {
  const auto alone = comm::make_single_communicator();
  return text(given, *alone);
}

}  // namespace

TEST_CASE("one line per unit, equal for equal models") {
  const std::string usual = text({});
  CHECK(usual == text({}));
  CHECK(usual.find("units = 2\nunit root = 1 parameters of 20 elements in a buffer of 64, ") == 0);
  CHECK(usual.find("\nunit h0 = 2 parameters of 40 elements in a buffer of 128, ") !=
        std::string::npos);
}

TEST_CASE("any difference in a unit changes its line") {
  const std::string usual = text({});
  for (const Given& given :
       {Given{.name = "other"}, Given{.shape = {4, 8}}, Given{.shape = {8, 5}},
        Given{.decay = false}, Given{.unit = "h1"}, Given{.compute = DType::BF16},
        Given{.compute = DType::BF16, .master = DType::BF16}}) {
    CHECK(text(given) != usual);
  }
  // Shapes with equal element counts differ only in the hash of this unit's line.
  const std::string turned = text({.shape = {4, 8}});
  const auto root_of = [](const std::string& lines) { return lines.substr(0, lines.find("h0")); };
  CHECK(root_of(turned) == root_of(usual));
}

TEST_CASE("all ranks produce the same text, although they hold different shards") {
  for (const std::string mode : {"full", "none"}) {
    const auto group = std::make_shared<comm::ThreadGroup>(2);
    const auto first = comm::make_threads_communicator(group, 0);
    const auto second = comm::make_threads_communicator(group, 1);
    CHECK(text({}, *first, mode) == text({}, *second, mode));
  }
}
