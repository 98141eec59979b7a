#include "io/pump/compare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/base/convert.h"
#include "io/pump/arrange.h"
#include "io/pump/pump.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 17;  // 1 MiB of the widest dtype
constexpr std::int64_t kLaneBlock = std::int64_t{1} << 20;      // bytes
constexpr std::int64_t kWidened = 256;  // elements converted to double at once, on the stack
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
void widen(const char* data, std::int64_t n, double* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    T value;
    std::memcpy(&value, data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    out[i] = static_cast<double>(value);
  }
}

/// @param n  at most kWidened
void widen(DType dtype, const char* data, std::int64_t n, double* out) {
  switch (dtype) {
    case DType::F64:
      return widen<double>(data, n, out);
    case DType::F32:
      return widen<float>(data, n, out);
    case DType::F16:
    case DType::BF16: {
      std::array<float, kWidened> floats;
      convert_elements(dtype, data, DType::F32, floats.data(), n);
      return widen<float>(reinterpret_cast<const char*>(floats.data()), n, out);
    }
    case DType::I64:
      return widen<std::int64_t>(data, n, out);
    case DType::I32:
      return widen<std::int32_t>(data, n, out);
    case DType::I16:
      return widen<std::int16_t>(data, n, out);
    case DType::I8:
      return widen<std::int8_t>(data, n, out);
    case DType::U16:
      return widen<std::uint16_t>(data, n, out);
    case DType::U8:
    case DType::Bool:
      return widen<std::uint8_t>(data, n, out);
  }
}

/// Elements of a pair that one thread compares.
struct Piece {
  std::size_t pair;
  std::int64_t begin, end;
};

void add_difference(std::int64_t element, double x, double y, double absolute,
                    TensorDifference& result) {
  const bool finite = std::isfinite(x) && std::isfinite(y);
  if (!finite && absolute != 0) absolute = kInfinity;
  if (result.count == 0) result.first = element;
  if (result.count == 0 || absolute > result.max_absolute) {
    result.max_absolute = absolute;
    result.max_element = element;
    result.a = x;
    result.b = y;
  }
  const double relative = absolute == 0 ? 0
                          : finite      ? absolute / std::max(std::abs(x), std::abs(y))
                                        : kInfinity;
  result.max_relative = std::max(result.max_relative, relative);
  ++result.count;
}

// Number of elements of a narrower floating-point dtype that are not the other's, rounded to it.
// @param n  at most kWidened
std::int64_t count_unrounded(const TensorDifference& dtypes, const char* a, const char* b,
                             std::int64_t n) {
  DType wide = dtypes.dtype_a, narrow = dtypes.dtype_b;
  if (dtype_size(wide) < dtype_size(narrow)) {
    std::swap(wide, narrow);
    std::swap(a, b);
  }
  if (dtype_size(wide) == dtype_size(narrow) || !can_convert(wide, narrow)) return n;
  std::array<char, kWidened * sizeof(float)> rounded;
  convert_elements(wide, a, narrow, rounded.data(), n);
  const std::size_t width = dtype_size(narrow);
  if (std::memcmp(rounded.data(), b, static_cast<std::size_t>(n) * width) == 0) return 0;
  std::array<double, kWidened> xs, ys;
  widen(narrow, rounded.data(), n, xs.data());
  widen(narrow, b, n, ys.data());
  std::int64_t count = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
    count += xs[i] == ys[i] || (std::isnan(xs[i]) && std::isnan(ys[i])) ? 0 : 1;
  return count;
}

void compare_values(const Piece& piece, const char* a, const char* b, const DiffOptions& options,
                    TensorDifference& result) {
  const auto width_a = static_cast<std::int64_t>(dtype_size(result.dtype_a));
  const auto width_b = static_cast<std::int64_t>(dtype_size(result.dtype_b));
  const bool same_dtype = result.dtype_a == result.dtype_b;
  // Compares bits, which distinguishes +0 from -0 and NaN payloads.
  const bool exact = same_dtype && options.absolute == 0 && options.relative == 0;
  const auto same_bits = [&](std::int64_t i, std::int64_t n) {
    return same_dtype && std::memcmp(a + i * width_a, b + i * width_b,
                                     static_cast<std::size_t>(n * width_a)) == 0;
  };
  std::array<double, kWidened> xs, ys;
  for (std::int64_t begin = 0; begin < piece.end - piece.begin; begin += kWidened) {
    const std::int64_t n = std::min(kWidened, piece.end - piece.begin - begin);
    if (same_bits(begin, n)) continue;
    if (!same_dtype)
      result.unrounded += count_unrounded(result, a + begin * width_a, b + begin * width_b, n);
    widen(result.dtype_a, a + begin * width_a, n, xs.data());
    widen(result.dtype_b, b + begin * width_b, n, ys.data());
    for (std::int64_t i = 0; i < n; ++i) {
      const double x = xs[static_cast<std::size_t>(i)], y = ys[static_cast<std::size_t>(i)];
      const bool same = x == y || (std::isnan(x) && std::isnan(y));
      if (same && (!exact || same_bits(begin + i, 1))) continue;
      const double absolute = same ? 0 : std::abs(x - y);
      // A difference of NaN or infinity exceeds every tolerance.
      const bool close =
          std::isfinite(absolute) &&
          absolute <= options.absolute + options.relative * std::max(std::abs(x), std::abs(y));
      if (!exact && close) continue;
      add_difference(piece.begin + begin + i, x, y, absolute, result);
    }
  }
}

// Merges so that the result does not depend on the order of the pieces.
void merge(const TensorDifference& part, TensorDifference& whole) {
  whole.unrounded += part.unrounded;
  if (part.count == 0) return;
  const bool none = whole.count == 0;
  if (none || part.first < whole.first) whole.first = part.first;
  if (none || part.max_absolute > whole.max_absolute ||
      (part.max_absolute == whole.max_absolute && part.max_element < whole.max_element)) {
    whole.max_absolute = part.max_absolute;
    whole.max_element = part.max_element;
    whole.a = part.a;
    whole.b = part.b;
  }
  whole.max_relative = std::max(whole.max_relative, part.max_relative);
  whole.count += part.count;
}

/// A tensor that pieces share. It is open only from the first of them to the last, because its record
/// may be large.
struct SharedPumpTensor {
  std::size_t left = 0;  // pieces
  std::shared_ptr<PumpTensor> tensor{};
};

}  // namespace

std::int64_t compare_pairs(std::vector<ComparedPair>& pairs, const DiffOptions& options) {
  std::vector<Piece> pieces;
  std::vector<std::array<SharedPumpTensor, 2>> tensors(pairs.size());
  std::int64_t total = 0, done = 0;
  const auto widths = [](const TensorDifference& pair) {
    return static_cast<std::int64_t>(dtype_size(pair.dtype_a) + dtype_size(pair.dtype_b));
  };
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const std::int64_t size = pairs[i].difference.elements;
    for (std::int64_t begin = 0; begin < size; begin += kPieceElements) {
      pieces.push_back({i, begin, std::min(size, begin + kPieceElements)});
      for (SharedPumpTensor& tensor : tensors[i]) ++tensor.left;
    }
    total += size * widths(pairs[i].difference);
  }
  std::mutex opening;  // guards tensors
  std::mutex mutex;    // guards done and the differences of pairs
  Pump pump({.threads = options.threads, .block = kLaneBlock, .direct_io = false});
  const auto read = [&](Pump::Lane& lane, const Piece& piece, const ComparedTensor& from,
                        SharedPumpTensor& shared, DType dtype) {
    std::shared_ptr<PumpTensor> tensor;
    {
      const std::lock_guard lock(opening);
      if (!shared.tensor) shared.tensor = std::make_shared<PumpTensor>(*from.source, from.name);
      tensor = shared.tensor;
      if (--shared.left == 0) shared.tensor.reset();
    }
    std::vector<char> values(static_cast<std::size_t>(piece.end - piece.begin) * dtype_size(dtype));
    gather_arranged(lane, *tensor, from.swap, from.stored, piece.begin, piece.end, dtype,
                    values.data(), kLaneBlock);
    return values;
  };
  pump.run(pieces.size(), [&](std::size_t i, Pump::Lane& lane) {
    const Piece& piece = pieces[i];
    ComparedPair& pair = pairs[piece.pair];
    TensorDifference part;
    part.dtype_a = pair.difference.dtype_a;
    part.dtype_b = pair.difference.dtype_b;
    const std::vector<char> a = read(lane, piece, pair.a, tensors[piece.pair][0], part.dtype_a);
    const std::vector<char> b = read(lane, piece, pair.b, tensors[piece.pair][1], part.dtype_b);
    compare_values(piece, a.data(), b.data(), options, part);
    const std::lock_guard lock(mutex);
    merge(part, pair.difference);
    done += (piece.end - piece.begin) * widths(part);
    if (options.progress) options.progress(done, total);
  });
  return total;
}

}  // namespace tessera::io
