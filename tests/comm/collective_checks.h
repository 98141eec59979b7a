#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "comm/communicator.h"
#include "tests/comm/ranks.h"

// Checks every collective against expected values; shared by the tests of all communicators.
namespace tessera::test {

// Sizes for every code path: empty, within the header, direct, split, several chunks, not a
// multiple of the world size.
inline constexpr std::int64_t kCollectiveCounts[] = {0, 1, 3, 23, 49, 1000, 20011, 70001};

// Values whose float32 sums depend on the order.
template <typename T>
T value(int rank, std::int64_t i) {
  const std::int64_t mixed = (i * 7919 + rank * 104729) % 20011;
  const double x = static_cast<double>(mixed - 10005) / 10005 * (1 + 1000 * (rank % 2));
  if constexpr (std::is_same_v<T, std::int64_t>) {
    return static_cast<T>(x * 1000) + (std::int64_t{1} << 53);  // inexact in double
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(x);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16(static_cast<float>(x));
  } else {
    return static_cast<T>(static_cast<std::int64_t>(x * 100));
  }
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Compares sums of value(): exactly, or within the rounding of another summation order.
template <typename T>
bool same_sums(const std::vector<T>& a, const std::vector<T>& b, bool exact) {
  constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;
  if (exact || !(std::is_floating_point_v<T> || kIsBf16)) return same_bits(a, b);
  constexpr double kLargestTerm = 1001.0, kRounding = kIsBf16          ? 4e-3
                                                      : sizeof(T) == 4 ? 1e-6
                                                                       : 1e-15;
  const auto wide = [](T x) {
    if constexpr (kIsBf16)
      return static_cast<double>(static_cast<float>(x));
    else
      return static_cast<double>(x);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](T x, T y) {
    return std::abs(wide(x) - wide(y)) <= kRounding * 8 * kLargestTerm;
  });
}

// Throws instead of using CHECK, as it runs on many threads; run_ranks collects the exceptions.
inline void expect(bool ok, const char* what, int rank, std::int64_t count) {
  if (!ok) throw std::runtime_error(fmt::format("{} on rank {} with count {}", what, rank, count));
}

template <typename T>
void check_all_gather(comm::Communicator& c, std::int64_t part) {
  const int world = c.world_size();
  std::vector<T> buffer(static_cast<std::size_t>(part * world)), wanted(buffer.size());
  for (int r = 0; r < world; ++r) {
    for (std::int64_t i = 0; i < part; ++i) {
      const auto at = static_cast<std::size_t>(r * part + i);
      wanted[at] = value<T>(r, i);
      if (r == c.rank()) buffer[at] = wanted[at];
    }
  }
  Mirror<T> mirror(buffer);
  c.all_gather(mirror.view(), {.label = "gather", .deadline = 20s});
  mirror.fetch();
  expect(same_bits(buffer, wanted), "all_gather", c.rank(), part);
}

template <typename T, typename Sum = float>
void check_reduce_scatter(comm::Communicator& c, std::int64_t part, bool exact) {
  const int world = c.world_size();
  std::vector<T> in(static_cast<std::size_t>(part * world));
  for (std::size_t i = 0; i < in.size(); ++i) {
    in[i] = value<T>(c.rank(), static_cast<std::int64_t>(i));
  }
  const std::vector<T> before = in;
  std::vector<Sum> out(static_cast<std::size_t>(part), Sum(-1.0F)), wanted(out.size());
  for (std::int64_t i = 0; i < part; ++i) {
    const std::int64_t at = c.rank() * part + i;
    Sum sum(static_cast<float>(value<T>(0, at)));
    for (int r = 1; r < world; ++r)
      sum = Sum(static_cast<float>(sum) + static_cast<float>(value<T>(r, at)));
    wanted[static_cast<std::size_t>(i)] = sum;
  }
  Mirror<T> in_mirror(in);
  Mirror<Sum> out_mirror(out);
  c.reduce_scatter(in_mirror.view(), out_mirror.view(), {.label = "scatter", .deadline = 20s});
  in_mirror.fetch();
  out_mirror.fetch();
  expect(same_sums(out, wanted, exact), "reduce_scatter", c.rank(), part);
  expect(same_bits(in, before), "input of reduce_scatter", c.rank(), part);
}

template <typename T>
void check_all_reduce(comm::Communicator& c, std::int64_t count, comm::ReduceOp op, bool exact) {
  std::vector<T> buffer(static_cast<std::size_t>(count)), wanted(buffer.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    buffer[at] = value<T>(c.rank(), i);
    wanted[at] = value<T>(0, i);
    for (int r = 1; r < c.world_size(); ++r) {
      const T next = value<T>(r, i);
      wanted[at] = op == comm::ReduceOp::Sum ? static_cast<T>(wanted[at] + next)
                                             : std::max(wanted[at], next);
    }
  }
  Mirror<T> mirror(buffer);
  c.all_reduce(mirror.view(), op, {.label = "reduce", .deadline = 20s});
  mirror.fetch();
  expect(same_sums(buffer, wanted, exact), "all_reduce", c.rank(), count);
}

template <typename T>
void check_broadcast(comm::Communicator& c, std::int64_t count, int root) {
  std::vector<T> buffer(static_cast<std::size_t>(count)), wanted(buffer.size());
  for (std::int64_t i = 0; i < count; ++i) {
    buffer[static_cast<std::size_t>(i)] = value<T>(c.rank(), i);
    wanted[static_cast<std::size_t>(i)] = value<T>(root, i);
  }
  Mirror<T> mirror(buffer);
  c.broadcast(mirror.view(), root, {.label = "cast", .deadline = 20s});
  mirror.fetch();
  expect(same_bits(buffer, wanted), "broadcast", c.rank(), count);
}

// A group of three collectives gives the same values as three separate ones.
inline void check_group(comm::Communicator& c, std::int64_t part) {
  const int world = c.world_size(), last = world - 1;
  const auto size = static_cast<std::size_t>(part * world);
  std::vector<std::int64_t> own(size), sums(size), cast(size), wanted_own(size), wanted_sums(size),
      wanted_cast(size);
  for (std::int64_t i = 0; i < part * world; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto owner = static_cast<int>(i / part);
    sums[at] = cast[at] = value<std::int64_t>(c.rank(), i);
    if (owner == c.rank()) own[at] = sums[at];
    wanted_own[at] = value<std::int64_t>(owner, i);
    wanted_cast[at] = value<std::int64_t>(last, i);
    for (int r = 0; r < world; ++r) wanted_sums[at] += value<std::int64_t>(r, i);
  }
  Mirror<std::int64_t> own_mirror(own), sums_mirror(sums), cast_mirror(cast);
  const auto options = [](const char* label) { return comm::CollectiveOptions{label, 20s}; };
  comm::CollectiveGroup group(c);
  const auto gather = c.start_all_gather(own_mirror.view(), options("grouped gather"));
  const auto reduce =
      c.start_all_reduce(sums_mirror.view(), comm::ReduceOp::Sum, options("grouped sum"));
  const auto broadcast = c.start_broadcast(cast_mirror.view(), last, options("grouped cast"));
  group.end();
  for (const auto& work : {gather, reduce, broadcast}) work->wait();
  own_mirror.fetch();
  sums_mirror.fetch();
  cast_mirror.fetch();
  expect(same_bits(own, wanted_own), "all_gather of a group", c.rank(), part);
  expect(same_bits(sums, wanted_sums), "all_reduce of a group", c.rank(), part);
  expect(same_bits(cast, wanted_cast), "broadcast of a group", c.rank(), part);
}

/// Limits of a communicator.
struct CollectiveLimits {
  bool sums_in_rank_order = true;
  bool floating_max = true;
};

/// Checks every collective with every count.
inline void check_everything(comm::Communicator& c, const CollectiveLimits& limits = {},
                             std::span<const std::int64_t> counts = kCollectiveCounts) {
  for (const std::int64_t count : counts) {
    check_all_gather<float>(c, count);
    check_all_gather<BFloat16>(c, count);
    check_all_gather<std::uint8_t>(c, count);
    const bool exact = limits.sums_in_rank_order;
    check_reduce_scatter<float>(c, count, exact);
    if (c.scattered_dtype(DType::BF16) == DType::BF16)
      check_reduce_scatter<BFloat16, BFloat16>(c, count, exact);
    else
      check_reduce_scatter<BFloat16>(c, count, exact);
    for (const comm::ReduceOp op : {comm::ReduceOp::Sum, comm::ReduceOp::Max}) {
      check_all_reduce<std::int64_t>(c, count, op, exact);
      if (op == comm::ReduceOp::Max && !limits.floating_max) continue;
      check_all_reduce<float>(c, count, op, exact);
      check_all_reduce<double>(c, count, op, exact);
    }
    check_broadcast<float>(c, count, 0);
    check_broadcast<std::int16_t>(c, count, c.world_size() - 1);
    check_group(c, count);
    c.barrier({});
  }
}

}  // namespace tessera::test
