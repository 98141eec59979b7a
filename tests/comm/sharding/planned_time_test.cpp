#include <doctest/doctest.h>

#include "comm/planned.h"
#include "core/base/trace.h"
#include "core/tensor.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera {

TEST_CASE("kernels of a planned trace take the time of their rates, and wait for collectives") {
  const auto context =
      Context::create({.device = {DeviceType::Meta, 0}, .planned = {DeviceType::CUDA, 0}});
  const KernelRates rates({{"matmul", {.call = 1e-3, .flop = 1e-9, .read = 1e-6, .written = 2e-6}}},
                          {.call = 0.5});
  const auto communicator = comm::make_planned_communicator(context, "nccl", 0, 16,
                                                            {.in_host = 1e9,
                                                             .between_hosts = 0.5e9,
                                                             .per_host = 2,
                                                             .start = 0,
                                                             .step_in_host = 1e-6,
                                                             .step_between_hosts = 1e-5});
  const Tensor x = Tensor::empty(context, {16, 16}, DType::F32);
  const Tensor buffer = Tensor::empty(context, {4'000'000}, DType::F32);
  Trace trace(*context, rates);
  const auto multiply = [&] { kernels::matmul(*context, {x.view(), x.view(), x.view()}); };
  multiply();
  const double product = 1e-3 + 2 * 16 * 16 * 16 * 1e-9 + 2048e-6 + 2048e-6;
  CHECK(trace.planned_now() == doctest::Approx(product));
  // 16 ranks on 8 hosts: both ranks of a host send at once, 15/16 of the buffer each.
  const auto first = communicator->start_all_gather(buffer.view(), {"first", {}});
  const auto second = communicator->start_all_gather(buffer.view(), {"second", {}});
  const double gather = 16e6 * 15 / 16 / 1e9 + 8 * 1e-6 + 7 * 1e-5;
  multiply();
  first->wait();
  CHECK(trace.planned_now() == doctest::Approx(product + gather));
  CHECK(trace.planned_waits() == doctest::Approx(gather - product));
  second->wait();
  CHECK(trace.planned_now() == doctest::Approx(product + 2 * gather));
  second->wait();
  CHECK(trace.planned_waits() == doctest::Approx(2 * gather - product));
  kernels::fill(*context, x.view(), 0.0);
  CHECK(trace.planned_now() == doctest::Approx(product + 2 * gather + 0.5));
  const std::vector<KernelTime> kernels = trace.planned_kernels();
  REQUIRE(kernels.size() == 3);
  CHECK(kernels[1].kernel == "matmul");
  CHECK(kernels[1].seconds == doctest::Approx(product));
  CHECK(context->planned_flops() == 2 * 2 * 16 * 16 * 16);
}

}  // namespace tessera
