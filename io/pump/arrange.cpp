#include "io/pump/arrange.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "io/base/convert.h"

namespace tessera::io {
namespace {

/// Calls f(begin, row, from, to) for the elements [first, last) of the swapped order: elements
/// [from, to) of a row of the matrix of [rows, columns, inner] elements that begins at `begin`.
template <typename F>
void for_each_swapped_run(const Swap& swap, std::int64_t first, std::int64_t last, F&& f) {
  const std::int64_t stride = swap.rows * swap.inner, size = stride * swap.columns;
  // Elements of a row that are before element `end` of the swapped order.
  const auto before = [&](std::int64_t row, std::int64_t end) {
    const std::int64_t rest =
        std::clamp(end % stride - row * swap.inner, std::int64_t{0}, swap.inner);
    return end / stride * swap.inner + rest;
  };
  for (std::int64_t begin = first / size * size; begin < last; begin += size) {
    const std::int64_t low = std::max(first - begin, std::int64_t{0});
    const std::int64_t high = std::min(last - begin, size);
    for (std::int64_t row = 0; row < swap.rows; ++row) {
      const std::int64_t from = before(row, low), to = before(row, high);
      if (from < to) f(begin, row, from, to);
    }
  }
}

// Elements [first, last) in the source's order.
void gather_stored(Pump::Lane& lane, PumpTensor& tensor, Encoding stored, std::int64_t first,
                   std::int64_t last, DType dtype, char* out, std::int64_t block) {
  if (stored == Encoding::Plain) {
    lane.gather(tensor, std::vector{first, last}, dtype, out);
    return;
  }
  const auto width = static_cast<std::int64_t>(dtype_size(dtype));
  const std::int64_t most = block / 16 / kQ8Elements;  // blocks read at once
  std::vector<char> blocks;
  std::vector<float> values;
  for (std::int64_t at = first, end; at < last; at = end) {
    const std::int64_t begin = at / kQ8Elements;
    end = std::min(last, (begin + most) * kQ8Elements);
    const std::int64_t n = (end + kQ8Elements - 1) / kQ8Elements - begin;
    blocks.resize(static_cast<std::size_t>(n * kQ8Bytes));
    values.resize(static_cast<std::size_t>(n * kQ8Elements));
    lane.gather(tensor, std::vector{begin * kQ8Bytes, (begin + n) * kQ8Bytes}, DType::U8,
                blocks.data());
    decode_q8_0(blocks.data(), n * kQ8Elements, values.data());
    convert_elements(DType::F32, values.data() + (at - begin * kQ8Elements), dtype,
                     out + (at - first) * width, end - at);
  }
}

}  // namespace

void gather_arranged(Pump::Lane& lane, PumpTensor& tensor, const std::optional<Swap>& swap,
                     Encoding stored, std::int64_t first, std::int64_t last, DType dtype, char* out,
                     std::int64_t block) {
  if (!swap) {
    gather_stored(lane, tensor, stored, first, last, dtype, out, block);
    return;
  }
  const auto width = static_cast<std::int64_t>(dtype_size(dtype));
  const std::int64_t inner = swap->inner, stride = swap->rows * inner;
  const std::int64_t most = block / 2 / width;  // elements read at once
  std::vector<char> run;
  for_each_swapped_run(
      *swap, first, last,
      [&](std::int64_t begin, std::int64_t row, std::int64_t from, std::int64_t to) {
        const std::int64_t source = begin + row * swap->columns * inner;
        for (std::int64_t end; from < to; from = end) {
          end = std::min(from + most, to);
          run.resize(static_cast<std::size_t>((end - from) * width));
          gather_stored(lane, tensor, stored, source + from, source + end, dtype, run.data(),
                        block);
          const char* in = run.data();
          for (std::int64_t n = 0, at = from; at < end; at += n) {
            const std::int64_t within = at % inner;
            n = std::min(inner - within, end - at);
            const std::int64_t to_element = begin + at / inner * stride + row * inner + within;
            std::memcpy(out + (to_element - first) * width, in,
                        static_cast<std::size_t>(n * width));
            in += n * width;
          }
        }
      });
}

}  // namespace tessera::io
