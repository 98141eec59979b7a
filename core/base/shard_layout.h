#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/shape.h"

namespace tessera {

/// One parameter inside a flat buffer. Offsets in elements.
struct ParameterSlot {
  std::string name;
  Shape shape;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  bool decay = false;      ///< weight decay applies
  float lr_scale = 1.0F;   ///< factor of the learning rate
  bool is_matrix = false;  ///< weight of a linear layer within the model
};

/// The part of a parameter that lies in a range of the flat buffer. All in elements.
struct SlotRange {
  int slot = 0;             ///< index into ShardLayout::slots()
  std::int64_t begin = 0;   ///< first element within the parameter
  std::int64_t end = 0;     ///< one past the last element within the parameter
  std::int64_t offset = 0;  ///< position of `begin` within the segment or range
};

/// Positions of a unit's parameters in one flat buffer, and the buffer's split over ranks. Pure
/// data.
///
/// Each parameter starts at a multiple of kAlignment elements, independent of the world size. The
/// end is padded, so that all world_size segments are equal and multiples of kAlignment.
/// Rank r owns elements [r * segment_size, (r + 1) * segment_size).
class ShardLayout {
 public:
  static constexpr std::int64_t kAlignment = 64;  // elements: 256 bytes of float32, 128 of bf16

  struct Parameter {
    std::string name;
    Shape shape;
    bool decay = false;
    float lr_scale = 1.0F;
    bool is_matrix = false;
  };
  ShardLayout() = default;
  /// @throws InvalidArgument on world_size < 1 or a duplicate name
  ShardLayout(std::string unit, const std::vector<Parameter>& parameters, int world_size);

  const std::string& unit() const { return unit_; }
  int world_size() const { return world_size_; }
  const std::vector<ParameterSlot>& slots() const { return slots_; }
  /// Elements of one rank's segment, padding included.
  std::int64_t segment_size() const { return segment_size_; }
  /// Elements of the whole buffer, padding included.
  std::int64_t padded_size() const { return segment_size_ * world_size_; }
  /// Elements of all parameters, without padding.
  std::int64_t parameter_count() const { return parameter_count_; }

  /// Parts of parameters inside [begin, end) of the flat buffer, in order of offset.
  std::vector<SlotRange> ranges(std::int64_t begin, std::int64_t end) const;
  /// Parts of parameters that a rank owns, with offsets from the start of its segment.
  std::vector<SlotRange> ranges_of_rank(int rank) const;

 private:
  std::string unit_;
  std::vector<ParameterSlot> slots_;
  int world_size_ = 1;
  std::int64_t segment_size_ = 0;
  std::int64_t parameter_count_ = 0;
};

}  // namespace tessera
