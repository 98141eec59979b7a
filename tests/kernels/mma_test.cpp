// Fragment products, matrix loads and asynchronous copies on fibers, tested apart from the kernels.
#include "kernels/cuda/device/mma.h"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <string>

#include "tests/support/fiber/fiber.h"
#include "tests/support/text.h"

namespace tessera::test {
namespace {

using fiber::ModelError;
using fiber::run_grid;
using kernels::cuda::commit_copies;
using kernels::cuda::copy_async;
using kernels::cuda::FragmentA;
using kernels::cuda::FragmentB;
using kernels::cuda::FragmentC;
using kernels::cuda::kAllLanes;
using kernels::cuda::load_matrices;
using kernels::cuda::load_matrices_transposed;
using kernels::cuda::mma;
using kernels::cuda::pack_bf16;
using kernels::cuda::SharedArray;
using kernels::cuda::SharedMemory;
using kernels::cuda::wait_copies;
using kernels::cuda::widen;

template <typename T, int kRows, int kColumns>
using Matrix = std::array<std::array<T, kColumns>, kRows>;

int lane_number() { return static_cast<int>(threadIdx.x); }

template <typename F>
void run_warp(int shared_bytes, F&& body) {
  run_grid("k", {1, 1, 1}, {32, 1, 1}, static_cast<std::size_t>(shared_bytes), body);
}

// Small integers, whose products and sums are exact.
template <int kRows, int kColumns>
Matrix<float, kRows, kColumns> numbers(int seed) {
  Matrix<float, kRows, kColumns> m;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kColumns; ++j)
      m[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] =
          static_cast<float>((i * 7 + j * 3 + seed + i * j % 5) % 11 - 5);
  return m;
}

using Place = std::array<std::size_t, 2>;  // row, column

// The tables of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
Place place_in_a(std::size_t lane, std::size_t i) {
  return {lane / 4 + (i / 2 % 2) * 8, lane % 4 * 2 + i % 2 + i / 4 * 8};
}
Place place_in_b(std::size_t lane, std::size_t i) {
  return {lane % 4 * 2 + i % 2 + i / 2 * 8, lane / 4};
}
Place place_in_c(std::size_t lane, std::size_t i) {
  return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}

TEST_CASE("mma multiplies the matrices in the fragments") {
  // Lane 5 in the manual's figures.
  CHECK(place_in_a(5, 0) == Place{1, 2});
  CHECK(place_in_a(5, 3) == Place{9, 3});
  CHECK(place_in_a(5, 4) == Place{1, 10});
  CHECK(place_in_a(5, 7) == Place{9, 11});
  CHECK(place_in_b(5, 1) == Place{3, 1});
  CHECK(place_in_b(5, 2) == Place{10, 1});
  CHECK(place_in_c(5, 1) == Place{1, 3});
  CHECK(place_in_c(5, 2) == Place{9, 2});

  const auto a = numbers<16, 16>(1);
  const auto b = numbers<16, 8>(2);
  const auto c = numbers<16, 8>(3);
  Matrix<float, 16, 8> got{};
  run_warp(0, [&] {
    const auto lane = static_cast<std::size_t>(lane_number());
    const auto of = [&](const auto& m, const Place& p) { return m[p[0]][p[1]]; };
    FragmentA fa{};
    FragmentB fb{};
    FragmentC fc{};
    for (std::size_t i = 0; i < 8; i += 2)
      fa.x[i / 2] = pack_bf16(of(a, place_in_a(lane, i)), of(a, place_in_a(lane, i + 1)));
    for (std::size_t i = 0; i < 4; i += 2)
      fb.x[i / 2] = pack_bf16(of(b, place_in_b(lane, i)), of(b, place_in_b(lane, i + 1)));
    for (std::size_t i = 0; i < 4; ++i) fc.x[i] = of(c, place_in_c(lane, i));
    mma(fc, fa, fb);
    for (std::size_t i = 0; i < 4; ++i) {
      const Place p = place_in_c(lane, i);
      got[p[0]][p[1]] = fc.x[i];
    }
  });
  Matrix<float, 16, 8> want = c;
  for (std::size_t i = 0; i < 16; ++i)
    for (std::size_t j = 0; j < 8; ++j)
      for (std::size_t k = 0; k < 16; ++k) want[i][j] += a[i][k] * b[k][j];
  CHECK(got == want);
}

TEST_CASE("load_matrices gives each lane its pairs of four matrices") {
  const auto value = [](int matrix, int row, int column) {
    return static_cast<float>(matrix * 64 + row * 8 + column);
  };
  for (const bool transposed : {false, true}) {
    std::array<std::array<unsigned, 4>, 32> got{};
    run_warp(32 * 16, [&] {
      const auto rows = SharedMemory().take<BFloat16>(32 * 8);
      const int lane = lane_number();
      const int own = 31 - lane;  // row order differs from lane order
      for (int c = 0; c < 8; ++c)
        rows[own * 8 + c] = kernels::cuda::narrow<BFloat16>(value(lane / 8, lane % 8, c));
      __syncwarp(kAllLanes);
      unsigned x[4];
      if (transposed)
        load_matrices_transposed(x, rows.from(own * 8));
      else
        load_matrices(x, rows.from(own * 8));
      for (std::size_t i = 0; i < 4; ++i) got[static_cast<std::size_t>(lane)][i] = x[i];
    });
    bool all = true;
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int major = lane / 4, minor = lane % 4 * 2;
        const unsigned want = transposed
                                  ? pack_bf16(value(i, minor, major), value(i, minor + 1, major))
                                  : pack_bf16(value(i, major, minor), value(i, major, minor + 1));
        all = all && got[static_cast<std::size_t>(lane)][static_cast<std::size_t>(i)] == want;
      }
    CHECK(all);
  }
}

template <typename F>
std::string broken_rule(unsigned threads, F&& body) {
  try {
    run_grid("k", {1, 1, 1}, {threads, 1, 1}, 32 * 16, body);
  } catch (const ModelError& error) {
    return error.what();
  }
  return "none";
}

TEST_CASE("neither mma nor load_matrices is a memory barrier") {
  const auto read_after_write = [](bool barrier) {
    return broken_rule(32, [barrier] {
      const auto rows = SharedMemory().take<BFloat16>(32 * 8);
      const int lane = lane_number();
      rows.store<8>(lane * 8, {});
      FragmentC c{};
      mma(c, {}, {});
      if (barrier) __syncwarp(kAllLanes);
      unsigned x[4];
      load_matrices(x, rows.from(lane * 8));
    });
  };
  CHECK(holds(read_after_write(false), "wrote with no barrier between"));
  CHECK(read_after_write(true) == "none");
}

TEST_CASE("a copy completes when its group is waited for") {
  alignas(16) std::array<std::array<BFloat16, 8>, 3> from{};
  for (std::size_t i = 0; i < 3; ++i) from[i].fill(BFloat16(static_cast<float>(i + 1)));
  std::array<float, 5> got{};
  run_grid("k", {1, 1, 1}, {1, 1, 1}, 3 * 16, [&] {
    const auto to = SharedMemory().take<BFloat16>(3 * 8);
    const auto first_of = [&](int copy) { return widen(static_cast<BFloat16>(to[copy * 8 + 7])); };
    copy_async(to, from[0].data(), false);
    commit_copies();
    copy_async(to.from(8), from[1].data(), false);
    copy_async(to.from(16), from[2].data(), true);
    commit_copies();
    wait_copies<1>();
    got[0] = first_of(0);
    got[1] = first_of(1);
    wait_copies<0>();
    got[2] = first_of(0);
    got[3] = first_of(1);
    got[4] = first_of(2);
  });
  CHECK(got[0] == 1);
  CHECK(std::isnan(got[1]));
  CHECK(got[2] == 1);
  CHECK(got[3] == 2);
  CHECK(got[4] == 0);
}

TEST_CASE("copies are checked like other writes") {
  alignas(16) static const std::array<BFloat16, 16> from{};
  CHECK(holds(broken_rule(1, [] { copy_async(SharedMemory().take<BFloat16>(8), &from[1], false); }),
              "not aligned"));
  CHECK(holds(broken_rule(1,
                          [] {
                            const auto to = SharedMemory().take<BFloat16>(16);
                            copy_async(to.from(4), from.data(), false);
                          }),
              "not aligned"));
  CHECK(holds(
      broken_rule(
          1, [] { copy_async(SharedMemory().take<BFloat16>(8).from(256), from.data(), false); }),
      "outside of"));
  const auto read_after_copy = [](bool barrier) {
    return broken_rule(32, [barrier] {
      const auto to = SharedMemory().take<BFloat16>(32 * 8);
      const int lane = lane_number();
      copy_async(to.from(lane * 8), from.data(), false);
      commit_copies();
      wait_copies<0>();
      if (barrier) __syncthreads();
      (void)to.load<8>((lane ^ 1) * 8);
    });
  };
  CHECK(holds(read_after_copy(false), "nobody wrote"));
  CHECK(read_after_copy(true) == "none");
  // A copy starts while others may still read its target.
  CHECK(holds(broken_rule(64,
                          [] {
                            const auto to = SharedMemory().take<BFloat16>(8);
                            if (lane_number() == 0) to.store<8>(0, {});
                            __syncthreads();
                            if (lane_number() == 0) (void)to.load<8>(0);
                            if (lane_number() == 40) copy_async(to, from.data(), false);
                          }),
              "with no barrier between"));
}

}  // namespace
}  // namespace tessera::test
