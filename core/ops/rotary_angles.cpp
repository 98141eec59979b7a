#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/base/error.h"
#include "core/ops/rotary.h"
#include "kernels/rotary.h"

namespace tessera::ops {
namespace {

using Scaling = RotaryScaling::Kind;

void check_rotary(const RotaryOptions& o, std::int64_t head_dim, std::int64_t dims) {
  constexpr std::int64_t kMostDims = 2 * kernels::RotaryAngles::kMostPairs;
  require(dims > 0 && dims % 2 == 0 && dims <= head_dim && dims <= kMostDims,
          "rotary: {} of {} numbers of a head turn; expected an even number of at most {}", dims,
          head_dim, std::min(head_dim, kMostDims));
  require(std::isfinite(o.base) && o.base >= 1.0, "rotary: base must be 1 or more, got {}", o.base);
  const RotaryScaling& s = o.scaling;
  if (s.kind == Scaling::None) return;
  require(s.kind == Scaling::LongRope || s.factor >= 1.0,
          "rotary: the scaling's factor must be 1 or more, got {}", s.factor);
  require(std::isfinite(s.magnitude) && s.magnitude > 0.0,
          "rotary: the scaling's magnitude must be above 0, got {}", s.magnitude);
  require(s.kind == Scaling::Linear || s.original > 0,
          "rotary: this scaling needs the original number of positions, got {}", s.original);
  require(s.kind != Scaling::Dynamic || dims > 2,
          "rotary: dynamic scaling needs more than one pair");
  require(s.kind != Scaling::Llama3 || s.high_freq > s.low_freq,
          "rotary: high_freq {} must be above low_freq {}", s.high_freq, s.low_freq);
  const auto pairs = static_cast<std::size_t>(dims / 2);
  require(s.kind != Scaling::LongRope ||
              (s.short_factors.size() == pairs && s.long_factors.size() == pairs),
          "rotary: expected {} short and long factors, one for each pair, got {} and {}", pairs,
          s.short_factors.size(), s.long_factors.size());
}

// Index of the pair that makes `turns` turns over the original positions.
double pair_of(double turns, const RotaryOptions& o, double dims) {
  const double length = static_cast<double>(o.scaling.original) / (2.0 * std::numbers::pi * turns);
  return dims * std::log(length) / (2.0 * std::log(o.base));
}

double llama3(double frequency, const RotaryScaling& s) {
  const double turns = frequency * static_cast<double>(s.original) / (2.0 * std::numbers::pi);
  if (turns < s.low_freq) return frequency / s.factor;
  if (turns > s.high_freq) return frequency;
  const double kept = (turns - s.low_freq) / (s.high_freq - s.low_freq);
  return frequency * ((1.0 - kept) / s.factor + kept);
}

}  // namespace

kernels::RotaryAngles rotary_angles(const RotaryOptions& o, std::int64_t head_dim,
                                    std::int64_t length) {
  const std::int64_t count = o.dims == 0 ? head_dim : o.dims;
  check_rotary(o, head_dim, count);
  const auto dims = static_cast<double>(count);
  const RotaryScaling& s = o.scaling;

  double base = o.base;
  if (s.kind == Scaling::Dynamic && length > s.original) {
    const double ratio = static_cast<double>(length) / static_cast<double>(s.original);
    base *= std::pow(s.factor * ratio - (s.factor - 1.0), dims / (dims - 2.0));
  }
  double first = 0.0, last = 0.0;  // Yarn: pairs between which frequencies are interpolated
  if (s.kind == Scaling::Yarn) {
    first = pair_of(s.fast, o, dims);
    last = pair_of(s.slow, o, dims);
    if (s.truncate) {
      first = std::floor(first);
      last = std::ceil(last);
    }
    first = std::max(first, 0.0);
    last = std::min(last, dims - 1.0);
    if (first == last) last += 0.001;
  }
  const auto& factors = length > s.original ? s.long_factors : s.short_factors;

  kernels::RotaryAngles angles;
  angles.pairs = static_cast<int>(count / 2);
  angles.factor = s.magnitude;
  const double exponent = -2.0 / dims * std::log2(base);
  for (int i = 0; i < angles.pairs; ++i) {
    double frequency = std::exp2(exponent * i);
    if (s.kind == Scaling::Linear) frequency /= s.factor;
    if (s.kind == Scaling::Llama3) frequency = llama3(frequency, s);
    if (s.kind == Scaling::Yarn) {
      const double scaled = std::clamp((i - first) / (last - first), 0.0, 1.0);
      frequency = frequency / s.factor * scaled + frequency * (1.0 - scaled);
    }
    if (s.kind == Scaling::LongRope) frequency /= factors[static_cast<std::size_t>(i)];
    angles.step[static_cast<std::size_t>(i)] = o.reverse ? -frequency : frequency;
  }
  return angles;
}

}  // namespace tessera::ops
