#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/onednn/packing_memory.h"
#include "kernels/onednn/primitive.h"
#include "kernels/product_library.h"

namespace tessera::test {
namespace {

using kernels::LibraryProduct;
using kernels::onednn::has_primitive;
using kernels::onednn::multiply_by_primitive;
using kernels::onednn::PackingBuffers;

/// Numbers of few bits, so that sums are exact in any order, and in bf16.
float value(std::int64_t i) { return static_cast<float>(i * 7919 % 5 - 2); }

template <typename T>
std::vector<T> values(std::int64_t n) {
  std::vector<T> all;
  for (std::int64_t i = 0; i < n; ++i) all.push_back(static_cast<T>(value(i)));
  return all;
}

/// @return whether oneDNN has a kernel
template <typename T, typename C>
bool check(LibraryProduct::Form f) {
  CAPTURE(f.m);
  CAPTURE(f.transpose_a);
  CAPTURE(f.transpose_b);
  CAPTURE(f.has_bias);
  CAPTURE(f.accumulate);
  if (!has_primitive(f)) return false;
  const auto a = values<T>((f.m + f.k) * f.a_stride), b = values<T>((f.k + f.n) * f.b_stride);
  const auto bias = values<T>(f.n), gap = values<T>(f.c_stride);
  auto c = values<C>(f.m * f.c_stride);
  REQUIRE(
      multiply_by_primitive({f, a.data(), b.data(), f.has_bias ? bias.data() : nullptr, c.data()}));
  for (std::int64_t i = 0; i < f.m; ++i)
    for (std::int64_t j = 0; j < f.c_stride; ++j) {
      const std::int64_t at = i * f.c_stride + j;
      float sum = f.accumulate || j >= f.n ? value(at) : 0.0F;
      if (j < f.n && f.has_bias) sum += value(j);
      for (std::int64_t p = 0; j < f.n && p < f.k; ++p)
        sum += value(f.transpose_a ? p * f.a_stride + i : i * f.a_stride + p) *
               value(f.transpose_b ? j * f.b_stride + p : p * f.b_stride + j);
      REQUIRE(static_cast<float>(c[static_cast<std::size_t>(at)]) == sum);
    }
  return true;
}

}  // namespace

TEST_CASE("packing buffers are kept, and used again for the same size") {
  constexpr std::size_t kLeast = PackingBuffers::kLeast;
  const auto buffers = std::make_unique<PackingBuffers>();
  void* const small = buffers->take(300 << 10);
  void* const large = buffers->take(kLeast + 1);
  std::memset(large, 1, 2 * kLeast);
  CHECK(buffers->take(kLeast) != small);
  CHECK(buffers->give_back(small));
  CHECK(buffers->take(2 * kLeast) != small);
  CHECK(buffers->take(kLeast) == small);
  std::thread([&] { CHECK(buffers->give_back(large)); }).join();
  CHECK(buffers->take(2 * kLeast) == large);
  CHECK_FALSE(buffers->give_back(nullptr));
  CHECK_FALSE(buffers->give_back(static_cast<std::byte*>(small) + 64));
  void* const foreign = std::aligned_alloc(kLeast, kLeast);
  CHECK_FALSE(buffers->give_back(foreign));
  std::free(foreign);

  // Threads that fill and check their buffers.
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int id = 1; id <= 4; ++id)
    threads.emplace_back([&, id] {
      for (int i = 0; i < 2000; ++i) {
        const std::size_t bytes = (kLeast << (i % 3)) - 8;
        auto* const mine = static_cast<volatile int*>(buffers->take(bytes));
        volatile int* const last = mine + bytes / sizeof(int) - 1;
        *mine = id;
        *last = id;
        std::this_thread::yield();
        if (*mine != id || *last != id) ++wrong;
        if (!buffers->give_back(const_cast<int*>(mine))) ++wrong;  // NOLINT(*-const-cast)
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("oneDNN's primitive computes all forms") {
  const bool has_bf16 = kernels::product_library().has_bf16;
  for (const std::int64_t m : {97, 160})
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true})
        for (const bool has_bias : {false, true})
          for (const bool accumulate : {false, true}) {
            LibraryProduct::Form form{
                DType::F32, DType::F32, transpose_a, transpose_b, has_bias,
                accumulate, m,          50,          33,          transpose_a ? m + 3 : 36,
                53,         57};
            const bool computed = check<float, float>(form);
            CHECK(computed);
            if (!has_bf16) continue;
            form.operands = DType::BF16;
            const bool computed_bf16 = check<BFloat16, float>(form);
            CHECK(computed_bf16);
            form.result = DType::BF16;
            const bool computed_to_bf16 = check<BFloat16, BFloat16>(form);
            CHECK(computed_to_bf16);
          }
}

}  // namespace tessera::test
