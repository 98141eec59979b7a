#include "io/pump/box.h"

#include <vector>

#include "core/base/error.h"

namespace tessera::io {
namespace {

bool disjoint(const Box& a, const Box& b) {
  for (int i = 0; i < a.shape.size(); ++i) {
    if (a.offsets[i] >= b.offsets[i] + b.shape[i] || b.offsets[i] >= a.offsets[i] + a.shape[i]) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::int64_t count_elements(const Shape& shape, const std::string& where) {
  try {
    return numel(shape);
  } catch (const InvalidArgument& error) {
    throw CorruptCheckpoint("{}: {}", where, error.what());
  }
}

bool is_inside(const Box& box, const Shape& shape) {
  bool inside = box.offsets.size() == shape.size() && box.shape.size() == shape.size();
  for (int i = 0; inside && i < shape.size(); ++i) {
    inside = box.shape[i] <= shape[i] && box.offsets[i] <= shape[i] - box.shape[i];
  }
  return inside;
}

void check_boxes(const Shape& shape, std::span<const Box* const> boxes, std::size_t most,
                 const std::string& where) {
  const std::int64_t total = count_elements(shape, where);
  bool slabs = !shape.empty();  // all boxes are complete in all dims but the first
  for (const Box* box : boxes) {
    require<CorruptCheckpoint>(is_inside(*box, shape),
                               "{}: the box at {} of shape {} is outside the shape {}", where,
                               box->offsets, box->shape, shape);
    for (int i = 1; i < shape.size(); ++i) slabs = slabs && box->shape[i] == shape[i];
  }
  // Earlier boxes that share rows with the current box; no other earlier box can overlap it.
  std::vector<const Box*> open;
  std::int64_t covered = 0, rows = 0;  // rows of dim 0, if `slabs`
  const auto check_rows = [&](std::int64_t next) {
    require<CorruptCheckpoint>(!slabs || rows == next,
                               "{}: rows {} to {} of shape {} are in no chunk", where, rows, next,
                               shape);
  };
  for (const Box* box : boxes) {
    const std::int64_t size = numel(box->shape);
    if (size == 0) continue;
    std::erase_if(open, [&](const Box* other) {
      return !shape.empty() && other->offsets[0] + other->shape[0] <= box->offsets[0];
    });
    for (const Box* other : open) {
      require<CorruptCheckpoint>(disjoint(*other, *box),
                                 "{}: the boxes at {} of shape {} and at {} of shape {} overlap",
                                 where, other->offsets, other->shape, box->offsets, box->shape);
    }
    open.push_back(box);
    require<CorruptCheckpoint>(
        open.size() <= most, "{}: more than {} boxes share a row of shape {}", where, most, shape);
    if (slabs) {
      check_rows(box->offsets[0]);
      rows += box->shape[0];
    }
    covered += size;  // at most `total`, because boxes are disjoint and inside
  }
  if (covered > 0) check_rows(slabs ? shape[0] : 0);
  require<CorruptCheckpoint>(covered == total, "{}: chunks hold {} of the {} elements of shape {}",
                             where, covered, total, shape);
}

}  // namespace tessera::io
