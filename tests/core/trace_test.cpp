#include "core/base/trace.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/tensor.h"
#include "kernels/elementwise.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

void check_trace(const std::shared_ptr<Context>& context, int device_track) {
  nlohmann::json events;
  const Tensor x = Tensor::full(context, {1000}, DType::F32, 1.0);
  {
    Trace trace(*context);
    CHECK_THROWS_AS(std::make_unique<Trace>(*context), InvalidArgument);
    {
      const Range outer(*context, "outer \"range\"");
      const Range inner(*context, "inner");
      kernels::add(*context, x.view(), x.view(), x.view());
    }
    kernels::fill(*context, x.view(), 2.0);
    events = nlohmann::json::parse(trace.to_json(3, "rank 3")).at("traceEvents");
  }
  CHECK(context->trace() == nullptr);
  const auto find = [&](const std::string& name) {
    for (const auto& event : events)
      if (event.at("name") == name) return event;
    FAIL("no event ", name);
    return nlohmann::json();
  };
  const auto begin = [](const nlohmann::json& e) { return e.at("ts").get<double>(); };
  const auto end = [&](const nlohmann::json& e) { return begin(e) + e.at("dur").get<double>(); };
  const auto outer = find("outer \"range\""), inner = find("inner"), add = find("add");
  CHECK(outer.at("pid") == 3);
  CHECK(outer.at("tid") == 0);
  CHECK(begin(outer) <= begin(inner));
  CHECK(end(inner) <= end(outer));
  CHECK(add.at("tid") == device_track);
  CHECK(add.at("dur").get<double>() > 0);
  CHECK(begin(find("fill")) >= end(add));
  CHECK(add.at("args") == nlohmann::json{{"read", 8000}, {"written", 4000}, {"flops", 0}});
}

TEST_CASE("a trace contains ranges and kernels, nested and in order") {
  check_trace(Context::create(), 0);
  check_trace(Context::create({.device = {DeviceType::CUDA, 0}, .plugin = test::fiber_plugin()}),
              1);
}

TEST_CASE("rates that are fitted to times give the times back") {
  std::vector<KernelTime> times;
  const KernelRate product = {.flop = 2e-12, .read = 1e-10, .written = 3e-10};
  const KernelRate moved = {.call = 5e-6, .read = 4e-10, .written = 4e-10};
  for (const double size : {1.0, 2.0, 3.0, 5.0}) {
    const KernelWork work = {
        .read = 1e6 * size, .written = 1e6 * (6 - size), .flops = 1e9 * size * size};
    times.push_back({"matmul", work, product.seconds(work)});
    times.push_back({"matmul", work, 7.0});  // the median of three calls is the first
    times.push_back({"matmul", work, product.seconds(work)});
    const KernelWork bytes = {.read = 1e4 * size, .written = 1e4 * size};
    times.push_back({"add", bytes, moved.seconds(bytes)});
  }
  const KernelRates rates = KernelRates::fit(times, 1e-6);
  const KernelWork other = {.read = 3e6, .written = 1e6, .flops = 7e9};
  CHECK(rates.seconds("matmul", other) ==
        doctest::Approx(product.seconds(other) + 1e-6).epsilon(1e-3));
  const KernelWork bytes = {.read = 7e4, .written = 1e3};
  CHECK(rates.seconds("add", bytes) == doctest::Approx(moved.seconds(bytes) + 1e-6).epsilon(1e-3));
  // Unknown kernels take what the bytes of all known ones do.
  CHECK(rates.seconds("unknown", {.read = 4e4, .written = 0}) > 1e-6);
  CHECK_THROWS_AS(KernelRates::fit({}, 0), InvalidArgument);
}

TEST_CASE("ranges and kernels outside of a trace are not recorded") {
  const auto context = Context::create();
  const Tensor x = Tensor::full(context, {10}, DType::F32, 1.0);
  const Range range(*context, "unseen");
  Trace trace(*context);
  CHECK(trace.to_json(0, "rank 0").find("unseen") == std::string::npos);
}

}  // namespace
}  // namespace tessera
