#include "io/torch/mesh.h"

#include <algorithm>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {
namespace {

// The axes that shard a dim, in the order in which they cut it.
std::vector<MeshAxis> cutting_order(std::span<const MeshAxis> axes, int dim,
                                    const std::string& where) {
  std::vector<MeshAxis> order;
  for (std::size_t i = axes.size(); i-- > 0;) {
    const MeshAxis& axis = axes[i];
    if (axis.dim != dim) continue;
    std::int64_t parts = 1;
    auto place = order.begin();
    while (parts < axis.split_factor && place != order.end()) {
      const std::int64_t size = place->size;
      ++place;
      if (__builtin_mul_overflow(parts, size, &parts)) break;
    }
    require<Unsupported>(
        parts == axis.split_factor,
        "{}: axis {} of the mesh shards dim {} with a split factor of {}, which is "
        "no product of sizes of later axes",
        where, i, dim, axis.split_factor);
    order.insert(place, axis);
  }
  return order;
}

}  // namespace

Box local_box(const Shape& shape, std::span<const MeshAxis> axes, const std::string& where) {
  for (const MeshAxis& axis : axes) {
    require<CorruptCheckpoint>(axis.coordinate >= 0 && axis.coordinate < axis.size,
                               "{}: a coordinate of {} on an axis of {} ranks", where,
                               axis.coordinate, axis.size);
    require<CorruptCheckpoint>(!axis.dim || (*axis.dim >= 0 && *axis.dim < shape.size()),
                               "{}: dim {} of shape {} is sharded", where, axis.dim.value_or(0),
                               shape);
  }
  Box box{Shape(std::vector<std::int64_t>(static_cast<std::size_t>(shape.size()))), shape};
  for (int dim = 0; dim < shape.size(); ++dim) {
    std::int64_t& n = box.shape[dim];
    for (const MeshAxis& axis : cutting_order(axes, dim, where)) {
      const std::int64_t part = n / axis.size + (n % axis.size != 0 ? 1 : 0);
      // Division, because a product of coordinate and part may overflow.
      const std::int64_t begin =
          part == 0 || axis.coordinate > n / part ? n : axis.coordinate * part;
      box.offsets[dim] += begin;
      n = std::min(part, n - begin);
    }
  }
  return box;
}

}  // namespace tessera::io
