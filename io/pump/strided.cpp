#include "io/pump/strided.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace tessera::io {
namespace {

constexpr std::int64_t kWindow = std::int64_t{256} << 10;  // bytes
constexpr std::int64_t kGap = 4096;  // bytes; a larger gap between elements starts another read

/// A dim of a box: its size in elements, and its strides in file and output in bytes.
struct Axis {
  std::int64_t size, in_file, in_out;
};

/// Bytes from the first element of a box through its last. Empty if there are too many for one
/// read, or if the gaps between elements are too large.
/// @param axes  sorted by in_file
std::optional<std::int64_t> window_bytes(std::span<const Axis> axes, std::int64_t width) {
  std::int64_t bytes = width;
  for (const Axis& axis : axes) {
    const std::int64_t more = (axis.size - 1) * axis.in_file;
    if (axis.in_file - bytes > kGap || more > kWindow - bytes) return std::nullopt;
    bytes += more;
  }
  return bytes;
}

/// Calls f(offset in the file, offset in the output), both in bytes, for each element of a box.
template <typename F>
void for_each_element(std::span<const Axis> axes, F&& f) {
  std::array<std::int64_t, Shape::kMaxDims> index{};
  std::int64_t in_file = 0, in_out = 0;
  for (;;) {
    f(in_file, in_out);
    std::size_t i = 0;
    for (; i < axes.size() && ++index[i] == axes[i].size; ++i) {
      index[i] = 0;
      in_file -= (axes[i].size - 1) * axes[i].in_file;
      in_out -= (axes[i].size - 1) * axes[i].in_out;
    }
    if (i == axes.size()) return;
    in_file += axes[i].in_file;
    in_out += axes[i].in_out;
  }
}

class Gather {
 public:
  Gather(const ReadBytes& read, const StridedBlock& block) : read_(read), block_(block) {}

  /// Reads elements [first, last) of the sub-block of dims >= d.
  /// @param at  first byte of the sub-block in the file
  void read_range(int d, std::int64_t at, std::int64_t first, std::int64_t last, char* out) {
    if (first == last) return;
    std::int64_t row = 0, rows = 1, inner = 1;
    if (d < block_.shape.size()) {
      for (int i = d + 1; i < block_.shape.size(); ++i) inner *= block_.shape[i];
      const std::int64_t step = block_.strides[d] * block_.width;
      row = first / inner;
      if (first % inner != 0) {  // `first` is inside a row
        const std::int64_t end = std::min(last, (row + 1) * inner);
        read_range(d + 1, at + row * step, first - row * inner, end - row * inner, out);
        return read_range(d, at, end, last, out + (end - first) * block_.width);
      }
      rows = last / inner - row;
      // Reads the incomplete last row.
      const std::int64_t whole = rows * inner;
      read_range(d + 1, at + (row + rows) * step, 0, last - first - whole,
                 out + whole * block_.width);
      at += row * step;
    }
    if (rows > 0) read_rows(d, at, rows, inner, out);
  }

 private:
  /// Reads `rows` whole rows of dim d, each of `inner` elements.
  void read_rows(int d, std::int64_t at, std::int64_t rows, std::int64_t inner, char* out) {
    std::vector<Axis> axes;
    std::int64_t size = rows, in_out = inner * block_.width;
    for (int i = d; i < block_.shape.size(); ++i) {
      if (i > d) {
        size = block_.shape[i];
        in_out /= size;
      }
      if (size > 1) axes.push_back({size, block_.strides[i] * block_.width, in_out});
    }
    std::ranges::sort(axes, {}, &Axis::in_file);
    read_box(axes, at, out);
  }

  void read_box(std::span<Axis> axes, std::int64_t at, char* out) {
    if (const auto bytes = window_bytes(axes, block_.width)) {
      return read_window(axes, *bytes, at, out);
    }
    // Splits the axis with the largest stride so that each part fits the window.
    Axis& outer = axes.back();
    const Axis whole = outer;
    const std::span<Axis> others = axes.first(axes.size() - 1);
    const auto row_bytes = window_bytes(others, block_.width);
    const bool joins = row_bytes && whole.in_file - *row_bytes <= kGap;
    const std::int64_t piece = joins ? 1 + (kWindow - *row_bytes) / whole.in_file : 1;
    for (std::int64_t i = 0; i < whole.size; i += piece) {
      outer.size = std::min(piece, whole.size - i);
      read_box(outer.size == 1 ? others : axes, at + i * whole.in_file, out + i * whole.in_out);
    }
    outer = whole;
  }

  void read_window(std::span<const Axis> axes, std::int64_t bytes, std::int64_t at, char* out) {
    window_.resize(std::max(window_.size(), static_cast<std::size_t>(bytes)));
    read_(at, window_.data(), static_cast<std::size_t>(bytes));
    auto run = static_cast<std::size_t>(block_.width);  // bytes contiguous in file and output
    if (!axes.empty() && axes[0].in_file == block_.width && axes[0].in_out == block_.width) {
      run *= static_cast<std::size_t>(axes[0].size);
      axes = axes.subspan(1);
    }
    for_each_element(axes, [&](std::int64_t in_file, std::int64_t in_out) {
      std::memcpy(out + in_out, window_.data() + in_file, run);
    });
  }

  const ReadBytes& read_;
  const StridedBlock& block_;
  std::vector<char> window_;
};

}  // namespace

void read_strided(const ReadBytes& read, const StridedBlock& block, std::int64_t first,
                  std::int64_t last, char* out) {
  Gather(read, block).read_range(0, block.begin, first, last, out);
}

}  // namespace tessera::io
