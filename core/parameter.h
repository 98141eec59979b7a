#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "core/tensor.h"

namespace tessera {

struct Initialization {
  enum class Kind : std::uint8_t { Zeros, Ones, Normal };
  Kind kind = Kind::Zeros;
  float std = 0.0F;  ///< standard deviation of Normal
};

/// A named weight of a model. Its tensor is unbound until a sharded run or materialize() binds it
/// to memory.
struct Parameter {
  std::string name;
  Tensor tensor;
  Initialization init;
  bool decay = false;  ///< apply weight decay; set for tensors of two or more dims
};

/// Parameters that are gathered and released together: a transformer block, or the root
/// (embeddings, final norm, head).
struct Unit {
  std::string name;
  std::vector<Parameter*> parameters;
};

/// Layout of a unit's flat buffer, split over `world_size` ranks.
ShardLayout layout_of(const Unit& unit, int world_size);

/// Callbacks of a model around its units: in order of units() during forward, in reverse during
/// backward. The root (unit 0) is in use from before_forward(0) to the end of backward and gets
/// no backward calls.
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  virtual void before_forward(int unit) = 0;
  virtual void after_forward(int unit) = 0;
  virtual void before_backward(int unit) = 0;
  /// Called when all gradients of the unit's parameters are complete.
  virtual void after_backward(int unit) = 0;
};

/// Computes elements [begin, end) of a parameter's initial value. They depend only on seed, name
/// and element number, so that any rank can compute any part.
void initialize_range(const Parameter& parameter, std::uint64_t seed, std::int64_t begin,
                      std::int64_t end, float* out);

/// Supplies elements [begin, end), row-major, of the named parameter as float32.
using ParameterSource = std::function<void(const Parameter& parameter, std::int64_t begin,
                                           std::int64_t end, float* out)>;

/// Fills a dense f32, bf16 (rounded to nearest) or f64 tensor part by part, through a bounded host
/// buffer where needed. Does nothing on the meta device.
void fill_from_host(
    const Tensor& tensor,
    const std::function<void(std::int64_t begin, std::int64_t end, float* out)>& source);

/// Binds the parameters of an unsharded model to one buffer per unit (category Parameters) in
/// `dtype` (f32, bf16 or f64) and fills them from `source`.
void materialize(const std::vector<Unit>& units, const std::shared_ptr<Context>& context,
                 DType dtype, const ParameterSource& source);

}  // namespace tessera
