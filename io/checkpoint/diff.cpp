#include "io/checkpoint/diff.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/json.h"
#include "io/pump/pump.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 17;  // 1 MiB of the widest dtype
constexpr std::int64_t kBlock = 256;  // elements converted to double at once, on the stack
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
void widen(const char* data, std::int64_t n, double* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    T value;
    std::memcpy(&value, data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    out[i] = static_cast<double>(value);
  }
}

/// @param n  at most kBlock
void widen(DType dtype, const char* data, std::int64_t n, double* out) {
  switch (dtype) {
    case DType::F64:
      return widen<double>(data, n, out);
    case DType::F32:
      return widen<float>(data, n, out);
    case DType::F16:
    case DType::BF16: {
      std::array<float, kBlock> floats;
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

/// A tensor that both checkpoints have, with the same shape.
struct Pair {
  Section section;
  std::string name;
  const TensorRecord *a, *b;
  TensorDifference difference;
};

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
  std::array<double, kBlock> xs, ys;
  for (std::int64_t begin = 0; begin < piece.end - piece.begin; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, piece.end - piece.begin - begin);
    if (same_bits(begin, n)) continue;
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

class Comparison {
 public:
  Comparison(const CheckpointReader& a, const CheckpointReader& b, const DiffOptions& options)
      : a_(a), b_(b), options_(options) {}

  DiffReport run() {
    compare_settings();
    if (options_.model) match(kModelSection);
    if (options_.optimizer) {
      std::set<Section> states;
      for (const CheckpointReader* reader : {&a_, &b_})
        for (Section& section : reader->states()) states.insert(std::move(section));
      for (const Section& section : states) match(section);
    }
    read();
    for (const Pair& pair : pairs_) {
      const bool differs = pair.difference.kind == TensorDifference::Kind::Dtype;
      if (differs || pair.difference.count > 0) report_.differences.push_back(pair.difference);
    }
    // Sorts by section too, because "model/..." precedes "optimizer/...".
    std::ranges::stable_sort(report_.differences, {}, &TensorDifference::name);
    return std::move(report_);
  }

 private:
  void compare_settings() {
    const Json a = Json::parse(a_.index().model_config), b = Json::parse(b_.index().model_config);
    const auto text = [](const Json& json, const std::string& key) {
      const auto found = json.find(key);
      return found == json.end() ? std::string() : found->dump();
    };
    Json keys = a;
    keys.update(b);
    for (const auto& [key, unused] : keys.items()) {
      if (text(a, key) == text(b, key)) continue;
      report_.settings.push_back({key, text(a, key), text(b, key)});
    }
  }

  void match(const Section& section) {
    // A state tensor of another optimizer is absent as a whole.
    static const TensorMap kNone;
    const auto tensors_of = [&](const CheckpointReader& reader) -> const TensorMap& {
      return section.is_model() || reader.has(section) ? reader.tensors(section) : kNone;
    };
    const TensorMap &a = tensors_of(a_), &b = tensors_of(b_);
    const auto note = [&](const std::string& name, TensorDifference::Kind kind,
                          const TensorRecord* x, const TensorRecord* y) {
      TensorDifference difference;
      difference.name = fmt::format("{}/{}", section.name(), name);
      difference.kind = kind;
      if (x) difference.dtype_a = x->dtype, difference.shape_a = x->shape;
      if (y) difference.dtype_b = y->dtype, difference.shape_b = y->shape;
      return difference;
    };
    using Kind = TensorDifference::Kind;
    for (const auto& [name, record] : b) {
      if (!a.contains(name)) {
        report_.differences.push_back(note(name, Kind::OnlyInB, nullptr, &record));
      }
    }
    for (const auto& [name, record] : a) {
      const auto other = b.find(name);
      if (other == b.end()) {
        report_.differences.push_back(note(name, Kind::OnlyInA, &record, nullptr));
        continue;
      }
      ++report_.compared;
      if (record.shape != other->second.shape) {
        report_.differences.push_back(note(name, Kind::Shape, &record, &other->second));
        continue;
      }
      const bool same_dtype = record.dtype == other->second.dtype;
      const auto crc = tensor_checksum(record);
      if (same_dtype && crc && crc == tensor_checksum(other->second)) continue;
      Pair pair{section, name, &record, &other->second,
                note(name, same_dtype ? Kind::Values : Kind::Dtype, &record, &other->second)};
      pair.difference.elements = numel(record.shape);
      pairs_.push_back(std::move(pair));
    }
  }

  void read() {
    std::vector<Piece> pieces;
    std::vector<std::unique_ptr<PumpTensor>> as, bs;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const Pair& pair = pairs_[i];
      as.push_back(std::make_unique<PumpTensor>(a_.source(pair.section), pair.name));
      bs.push_back(std::make_unique<PumpTensor>(b_.source(pair.section), pair.name));
      const std::int64_t size = numel(pair.a->shape);
      for (std::int64_t begin = 0; begin < size; begin += kPieceElements) {
        pieces.push_back({i, begin, std::min(size, begin + kPieceElements)});
      }
      report_.bytes_read += size * (pair.a->width() + pair.b->width());
    }
    std::int64_t done = 0;
    std::mutex mutex;  // guards done and the differences of pairs
    Pump pump({.threads = options_.threads, .block = std::int64_t{1} << 20, .direct_io = false});
    pump.run(pieces.size(), [&](std::size_t i, Pump::Lane& lane) {
      const Piece& piece = pieces[i];
      Pair& pair = pairs_[piece.pair];
      const std::int64_t n = piece.end - piece.begin;
      const std::array<std::int64_t, 2> bounds{piece.begin, piece.end};
      std::vector<char> a(static_cast<std::size_t>(n * pair.a->width())),
          b(static_cast<std::size_t>(n * pair.b->width()));
      lane.gather(*as[piece.pair], bounds, pair.a->dtype, a.data());
      lane.gather(*bs[piece.pair], bounds, pair.b->dtype, b.data());
      TensorDifference part;
      part.dtype_a = pair.a->dtype;
      part.dtype_b = pair.b->dtype;
      compare_values(piece, a.data(), b.data(), options_, part);
      const std::lock_guard lock(mutex);
      merge(part, pair.difference);
      done += n * (pair.a->width() + pair.b->width());
      if (options_.progress) options_.progress(done, report_.bytes_read);
    });
  }

  const CheckpointReader &a_, &b_;
  const DiffOptions& options_;
  DiffReport report_;
  std::vector<Pair> pairs_;
};

}  // namespace

DiffReport diff_checkpoints(const CheckpointReader& a, const CheckpointReader& b,
                            const DiffOptions& options) {
  return Comparison(a, b, options).run();
}

}  // namespace tessera::io
