#pragma once

#include "core/base/thread_pool.h"
#include "kernels/cpu/loops.h"
#include "kernels/strided.h"

TESSERA_CPU_BEGIN

/// Offsets of the first element of a row of a StridedLoop in each of its views.
template <int kViews>
class RowOffsets {
 public:
  RowOffsets(const StridedLoop& loop, std::int64_t row) : loop_(loop) {
    for (int d = loop.dims - 2; d >= 0; --d) {
      place_[d] = row % loop.sizes[d];
      row /= loop.sizes[d];
      for (int v = 0; v < kViews; ++v) offsets_[v] += place_[d] * loop.strides[v][d];
    }
  }
  std::int64_t operator[](int view) const { return offsets_[view]; }
  void next() {
    for (int d = loop_.dims - 2; d >= 0; --d) {
      for (int v = 0; v < kViews; ++v) offsets_[v] += loop_.strides[v][d];
      if (++place_[d] < loop_.sizes[d]) return;
      place_[d] = 0;
      for (int v = 0; v < kViews; ++v) offsets_[v] -= loop_.sizes[d] * loop_.strides[v][d];
    }
  }

 private:
  const StridedLoop& loop_;
  std::int64_t place_[Dims::kMaxDims] = {};
  std::int64_t offsets_[kViews] = {};
};

/// Calls body(const std::int64_t* offsets, count) for pieces of rows, of kPiece elements or those
/// that remain, split over threads. The pieces do not depend on the number of threads.
/// @param cost  of an element, in elements read
template <int kViews, int kPiece = 1024, typename Body>
void for_pieces(Context& context, const StridedLoop& loop, std::int64_t cost, const Body& body) {
  const std::int64_t width = loop.width();
  const std::int64_t pieces = (width + kPiece - 1) / kPiece;
  const std::int64_t piece_cost =
      std::max<std::int64_t>(std::min<std::int64_t>(width, kPiece) * cost, 1);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    RowOffsets<kViews> row(loop, begin / pieces);
    std::int64_t piece = begin % pieces;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = piece * kPiece;
      std::int64_t offsets[kViews];
      for (int v = 0; v < kViews; ++v) offsets[v] = row[v] + first * loop.stride(v);
      body(static_cast<const std::int64_t*>(offsets),
           std::min<std::int64_t>(kPiece, width - first));
      if (++piece == pieces) {
        piece = 0;
        row.next();
      }
    }
  };
  context.threads().parallel_for(loop.rows * pieces,
                                 std::max<std::int64_t>(kSerialElements / piece_cost, 1), run);
}

TESSERA_CPU_END
