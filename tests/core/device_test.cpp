// Tensors and operations on a device; its kernels run as fibers here.

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/autograd/autograd.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/nn/parameter.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera {
namespace {

std::shared_ptr<Context> device() {
  return Context::create({.device = {DeviceType::CUDA, 0}, .plugin = test::fiber_plugin()});
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST_CASE("values are copied to a device and back") {
  const auto context = device();
  const std::vector<float> values = {1.5F, -2.0F, 3.25F};
  const Tensor x = Tensor::from<float>(context, {3}, std::span<const float>(values));
  CHECK(x.device().str() == "cuda:0");
  CHECK(x.to_vector<float>() == values);
  CHECK(x.alias({1}, {1}, 2).item() == 3.25);
  CHECK(Tensor::full(context, {1}, DType::BF16, 0.5).item() == 0.5);
  CHECK_THROWS_AS(x.to_vector<double>(), InvalidArgument);
  CHECK_THROWS_AS(x.alias({2}, {2}, 0).to_vector<float>(), InvalidArgument);
  CHECK(Tensor::empty(context, {0, 4}, DType::F32).to_vector<float>().empty());

  const Tensor filled = Tensor::empty(context, {5}, DType::F32);
  fill_from_host(filled, [](std::int64_t begin, std::int64_t end, float* out) {
    for (std::int64_t i = begin; i < end; ++i) out[i - begin] = static_cast<float>(i);
  });
  CHECK(filled.to_vector<float>() == std::vector<float>{0, 1, 2, 3, 4});
}

TEST_CASE("kernels read the random number generator's step from device memory") {
  const Tensor meta =
      Tensor::empty(Context::create({.device = {DeviceType::Meta, 0}}), {2, 2}, DType::F32);
  meta.context()->set_rng_step({1, 2, 3});
  CHECK(meta.context()->rng_step() == nullptr);
  CHECK(ops::dropout(meta, 0.5F, 0).numel() == 4);
  CHECK(meta.context()->ledger().usage(MemoryCategory::Data).current == sizeof(RngStep));

  std::vector<std::vector<float>> masks;
  for (const auto& context : {Context::create(), device()}) {
    const Tensor ones = Tensor::full(context, {8, 8}, DType::F32, 1.0);
    const auto mask = [&](const RngStep& step, std::uint64_t place) {
      context->set_rng_step(step);
      return ops::dropout(ones, 0.5F, place).to_vector<float>();
    };
    const auto unset = ops::dropout(ones, 0.5F, 1).to_vector<float>();
    CHECK(mask({}, 1) == unset);
    masks.push_back(mask({1, 2, 3}, 4));
    for (const RngStep& other : {RngStep{9, 2, 3}, RngStep{1, 9, 3}, RngStep{1, 2, 9}})
      CHECK(mask(other, 4) != masks.back());
    CHECK(mask({1, 2, 3}, 9) != masks.back());
    CHECK(context->ledger().usage(MemoryCategory::Data).current == sizeof(RngStep));
  }
  CHECK(masks[0] == masks[1]);
}

TEST_CASE("an invalid or truncated plugin is refused without ending the process") {
  const test::TempDir dir;
  const auto refused = [](const std::string& path, const std::string& why) {
    CAPTURE(path);
    try {
      count_devices(path);
      FAIL("was loaded");
    } catch (const Unsupported& error) {
      CHECK(std::string(error.what()).find(why) != std::string::npos);
    }
  };
  const std::string whole = read_file(test::fiber_plugin());
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{5000}, whole.size() / 2})
    refused(dir.write("cut-" + std::to_string(bytes), whole.substr(0, bytes)),
            "the file is truncated");
  refused(dir.write("empty", ""), "can't be loaded");
  refused(dir.write("text", std::string(10'000, 'x')), "can't be loaded");
  refused(dir.file("absent"), "can't be loaded");
  std::filesystem::create_directory(dir.file("folder"));
  refused(dir.file("folder"), "not a regular file");
  REQUIRE(::mkfifo(dir.file("fifo").c_str(), 0600) == 0);
  refused(dir.file("fifo"), "not a regular file");
  // An unsearchable directory on the path; root may always search it.
  std::filesystem::create_directory(dir.file("closed"));
  REQUIRE(::chmod(dir.file("closed").c_str(), 0) == 0);
  const uid_t user = ::geteuid();
  constexpr uid_t kNobody = 65534;
  if (user == 0) REQUIRE(::seteuid(kNobody) == 0);
  refused(dir.file("closed/plugin.so"), "Permission denied");
  if (user == 0) REQUIRE(::seteuid(user) == 0);
  REQUIRE(::chmod(dir.file("closed").c_str(), 0700) == 0);
}

TEST_CASE("mixing contexts is refused, and errors leave the context usable") {
  const auto context = device(), other = device(), cpu = Context::create();
  const Tensor x = Tensor::full(context, {4}, DType::F32, 1.0);
  CHECK_THROWS_AS(ops::add(x, Tensor::full(cpu, {4}, DType::F32, 1.0)), InvalidArgument);
  CHECK_THROWS_AS(ops::add(x, Tensor::full(other, {4}, DType::F32, 1.0)), InvalidArgument);
  CHECK(ops::add(x, x).to_vector<float>() == std::vector<float>(4, 2.0F));
}

TEST_CASE("a token or target outside of the vocabulary gives NaN, not an out-of-bounds access") {
  const auto context = device();
  const auto integers = [&](const Shape& shape, const std::vector<std::int32_t>& values) {
    return Tensor::from<std::int32_t>(context, shape, std::span<const std::int32_t>(values));
  };
  const Tensor weight = Tensor::full(context, {5, 8}, DType::F32, 0.5);
  const auto rows = ops::embedding(integers({1, 2}, {4, 5}), weight, {}).to_vector<float>();
  CHECK(rows[7] == 0.5F);
  CHECK(std::isnan(rows[8]));

  const Tensor x = Tensor::full(context, {2, 8}, DType::F32, 0.25);
  CHECK(std::isfinite(ops::linear_cross_entropy(x, weight, integers({2}, {0, 4}), 1.0).item()));
  CHECK(std::isnan(ops::linear_cross_entropy(x, weight, integers({2}, {0, 5}), 1.0).item()));
}

TEST_CASE("the loss with gradients from forward must be the root of backward") {
  const auto context = device();
  Tensor x = Tensor::full(context, {2, 8}, DType::F32, 0.25);
  x.set_requires_grad(true);
  const Tensor weight = Tensor::full(context, {5, 8}, DType::F32, 0.5);
  const std::vector<std::int32_t> ids = {1, 3};
  const Tensor targets = Tensor::from<std::int32_t>(context, {2}, std::span(ids));
  autograd::backward(ops::linear_cross_entropy(x, weight, targets, 1.0));
  CHECK(x.grad().defined());
  const Tensor loss = ops::linear_cross_entropy(x, weight, targets, 1.0);
  CHECK_THROWS_AS(autograd::backward(loss, Tensor::full(context, {1}, DType::F32, 2.0)),
                  InvalidArgument);
}

}  // namespace
}  // namespace tessera
