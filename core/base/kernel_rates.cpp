#include "core/base/kernel_rates.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <tuple>

#include "core/base/error.h"

namespace tessera {
namespace {

// Different works of one kernel from which on more than one rate is fitted.
constexpr std::size_t kWorksForMoreRates = 3;

using Columns = std::array<double, 3>;

struct Point {
  KernelWork work;
  double seconds = 0;  // of a call
};

// Non-negative x that minimize the sum of (rows . x - 1)^2, by coordinate descent.
Columns least_squares(const std::vector<Columns>& rows) {
  Columns x{};
  std::vector<double> rest(rows.size(), 1.0);
  for (int pass = 0; pass < 10'000; ++pass)
    for (std::size_t c = 0; c < x.size(); ++c) {
      double square = 0, product = 0;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        square += rows[r][c] * rows[r][c];
        product += rows[r][c] * rest[r];
      }
      if (square == 0) continue;
      const double moved = std::max(0.0, x[c] + product / square) - x[c];
      x[c] += moved;
      for (std::size_t r = 0; r < rows.size(); ++r) rest[r] -= rows[r][c] * moved;
    }
  return x;
}

double bytes(const KernelWork& work) { return work.read + work.written; }

std::vector<Point> medians(std::vector<KernelTime>& times) {
  const auto key = [](const KernelTime& t) {
    return std::tuple(t.work.flops, t.work.read, t.work.written);
  };
  std::ranges::sort(times, {}, [&](const KernelTime& t) { return std::tuple(key(t), t.seconds); });
  std::vector<Point> points;
  for (auto first = times.begin(); first != times.end();) {
    const auto last = std::find_if(first, times.end(),
                                   [&](const KernelTime& t) { return key(t) != key(*first); });
    points.push_back({first->work, first[(last - first) / 2].seconds});
    first = last;
  }
  std::erase_if(points, [](const Point& p) { return p.seconds <= 0; });
  return points;
}

// @param byte  seconds of a byte over all kernels
KernelRate fit_kernel(const std::vector<Point>& points, double byte) {
  const bool computes =
      std::ranges::any_of(points, [](const Point& p) { return p.work.flops > 0; });
  const bool several = points.size() >= kWorksForMoreRates;
  if (!computes && !several) {
    // One size says little of others: its bytes take no longer than all kernels' do, and the rest is the call's.
    const Point& p =
        *std::ranges::max_element(points, {}, [](const Point& q) { return bytes(q.work); });
    const double at_most = bytes(p.work) > 0 ? std::min(byte, p.seconds / bytes(p.work)) : 0;
    return {.call = p.seconds - at_most * bytes(p.work), .read = at_most, .written = at_most};
  }
  std::vector<Columns> rows;
  for (const Point& p : points) {
    Columns row = {1.0, bytes(p.work), 0};
    if (computes) row = {p.work.flops, several ? p.work.read : 0, several ? p.work.written : 0};
    for (double& value : row) value /= p.seconds;
    rows.push_back(row);
  }
  const Columns x = least_squares(rows);
  if (computes) return {.flop = x[0], .read = x[1], .written = x[2]};
  return {.call = x[0], .read = x[1], .written = x[1]};
}

}  // namespace

KernelRates KernelRates::fit(std::span<const KernelTime> times, double gap) {
  require(!times.empty(), "there are no kernels to fit rates to");
  std::map<std::string, std::vector<KernelTime>, std::less<>> by_kernel;
  KernelTime moving, computing;  // sums
  for (const KernelTime& time : times) {
    by_kernel[time.kernel].push_back(time);
    KernelTime& sum = time.work.flops > 0 ? computing : moving;
    sum.seconds += time.seconds;
    sum.work.flops += time.work.flops;
    sum.work.read += bytes(time.work);
  }
  const double byte = moving.work.read > 0 ? moving.seconds / moving.work.read : 0;
  const double flop = computing.work.flops > 0 ? computing.seconds / computing.work.flops : 0;
  KernelRates result({}, {.call = gap, .flop = flop, .read = byte, .written = byte});
  for (auto& [kernel, its_times] : by_kernel) {
    const std::vector<Point> points = medians(its_times);
    if (points.empty()) continue;
    KernelRate rate = fit_kernel(points, byte);
    rate.call += gap;
    result.rates_.emplace(kernel, rate);
  }
  return result;
}

double KernelRates::seconds(std::string_view kernel, const KernelWork& work) const {
  const auto found = rates_.find(kernel);
  return (found == rates_.end() ? others_ : found->second).seconds(work);
}

}  // namespace tessera
