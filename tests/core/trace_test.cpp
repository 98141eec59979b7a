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
}

TEST_CASE("a trace contains ranges and kernels, nested and in order") {
  check_trace(Context::create(), 0);
  check_trace(Context::create({.device = {DeviceType::CUDA, 0}, .plugin = test::fiber_plugin()}),
              1);
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
