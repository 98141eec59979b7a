#include <doctest/doctest.h>

#include <cstring>
#include <limits>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/storage.h"
#include "core/base/thread_pool.h"

namespace tessera {
namespace {

TEST_CASE("a storage is booked while it exists") {
  const auto context = Context::create();
  {
    const auto storage = Storage::allocate(context, 1000, MemoryCategory::Activations, "gelu");
    std::memset(storage->data(), 1, 1000);
    CHECK(storage->bytes() == 1000);
    CHECK(storage->is_materialized());
    CHECK(context->ledger().usage(MemoryCategory::Activations).current == 1000);
  }
  CHECK(context->ledger().total().current == 0);
  CHECK(context->ledger().total().peak == 1000);
}

TEST_CASE("a storage can release its memory and materialize again") {
  const auto context = Context::create();
  const auto storage = Storage::reserve(context, 256, MemoryCategory::Gathered, "h.3");
  CHECK_FALSE(storage->is_materialized());
  CHECK(context->ledger().total().current == 0);
  CHECK_THROWS_WITH_AS(storage->data(), "memory of h.3 (256 B) was read after its release",
                       InternalError);
  storage->materialize();
  CHECK(storage->data() != nullptr);
  storage->materialize();
  CHECK(context->ledger().usage(MemoryCategory::Gathered).current == 256);
  storage->release();
  storage->release();
  CHECK(context->ledger().usage(MemoryCategory::Gathered).current == 0);
  CHECK_THROWS_AS(storage->data(), InternalError);
  CHECK(storage->version() == 0);
  storage->bump_version();
  CHECK(storage->version() == 1);
}

TEST_CASE("a wrapped storage books nothing and keeps its owner alive") {
  const auto context = Context::create();
  auto numbers = std::make_shared<std::vector<int>>(10, 7);
  const std::weak_ptr<std::vector<int>> watch = numbers;
  auto storage = Storage::wrap(context, numbers->data(), 40, numbers);
  numbers.reset();
  CHECK(context->ledger().total().peak == 0);
  CHECK(static_cast<int*>(storage->data())[9] == 7);
  storage->release();  // not ours to release
  CHECK(storage->is_materialized());
  storage.reset();
  CHECK(watch.expired());
}

TEST_CASE("a storage outlives its context handle") {
  auto context = Context::create();
  auto storage = Storage::allocate(context, 64, MemoryCategory::Data, "tokens");
  context.reset();
  CHECK(storage->context()->ledger().total().current == 64);
  storage.reset();
}

TEST_CASE("a failed allocation names owner, device and the ledger") {
  const auto context = Context::create();
  const auto held = Storage::allocate(context, 3 << 20, MemoryCategory::Parameters, "wte");
  const auto hopeless = std::numeric_limits<std::size_t>::max() / 2 + 1;
  try {
    Storage::allocate(context, hopeless, MemoryCategory::Activations, "logits");
    FAIL("no error");
  } catch (const OutOfMemory& error) {
    const std::string text = error.what();
    CHECK(text.find("logits (activations) on cpu") != std::string::npos);
    CHECK(text.find("wte") != std::string::npos);
    CHECK(text.find("3.00 MiB") != std::string::npos);
  }
  CHECK(context->ledger().total().current == 3 << 20);
}

TEST_CASE("a meta storage is booked but has no memory") {
  const auto meta = Context::create({.device = {DeviceType::Meta, 0}});
  const auto storage = Storage::allocate(meta, std::size_t{1} << 50, MemoryCategory::Data, "plan");
  CHECK(storage->data() == nullptr);
  CHECK(meta->ledger().total().current == std::int64_t{1} << 50);
}

TEST_CASE("a context returns its construction options") {
  const auto context = Context::create({.threads = 2, .cpu_level = cpu_levels().front()});
  CHECK(context->threads().size() == 2);
  CHECK(context->cpu_level() == cpu_levels().front());
  CHECK(context->device().str() == "cpu");
  const auto first = context->next_sequence();
  CHECK(context->next_sequence() == first + 1);
  CHECK_THROWS_WITH_AS(Context::create({.device = {DeviceType::CUDA, 1}, .plugin = "/no/such.so"}),
                       doctest::Contains("the CUDA backend can't be loaded: /no/such.so"),
                       Unsupported);
}

TEST_CASE("gradient mode is restored at the end of a scope, even by an exception") {
  const auto context = Context::create();
  CHECK(context->grad_enabled());
  try {
    const NoGradGuard outer(*context);
    CHECK_FALSE(context->grad_enabled());
    {
      const GradModeGuard inner(*context, true);
      CHECK(context->grad_enabled());
    }
    CHECK_FALSE(context->grad_enabled());
    throw InvalidArgument("out");
  } catch (const InvalidArgument&) {
  }
  CHECK(context->grad_enabled());
}

}  // namespace
}  // namespace tessera
