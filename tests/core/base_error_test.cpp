#include <doctest/doctest.h>

#include <type_traits>

#include "core/base/error.h"

namespace tessera {
namespace {

TEST_CASE("an error contains its formatted message and its type") {
  CHECK_THROWS_WITH_AS(throw InvalidArgument("expected {}, got {}", 3, "x"), "expected 3, got x",
                       InvalidArgument);
  CHECK_THROWS_AS(throw IoError("cannot open {}", "a"), Error);
  CHECK_THROWS_AS(throw CorruptCheckpoint("cut at byte {}", 8), std::runtime_error);
  CHECK_FALSE(std::is_base_of_v<InvalidArgument, Unsupported>);
}

TEST_CASE("require throws the requested type only if the condition fails") {
  CHECK_NOTHROW(require(true, "not thrown: {}", 1));
  CHECK_THROWS_WITH_AS(require(1 > 2, "{} > {} does not hold", 1, 2), "1 > 2 does not hold",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(require<Unsupported>(false, "no {}", "GPU"), "no GPU", Unsupported);
}

TEST_CASE("a communication error contains its kind and culprits") {
  try {
    throw CommError(CommFailure::PeerLost, {2, 3}, "{} ranks are gone", 2);
  } catch (const Error& error) {
    CHECK(std::string(error.what()) == "2 ranks are gone");
    const auto* comm = dynamic_cast<const CommError*>(&error);
    REQUIRE(comm != nullptr);
    CHECK(comm->failure() == CommFailure::PeerLost);
    CHECK(comm->culprits() == std::vector<int>{2, 3});
  }
}

}  // namespace
}  // namespace tessera
