#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera {

/// How a parameter starts.
struct Initialization {
  enum class Kind : std::uint8_t { Zeros, Ones, Normal };
  Kind kind = Kind::Zeros;
  float std = 0.0F;  ///< of Normal
};

/// A named weight of a model. The tensor is unbound until somebody gives it memory: a sharded run
/// binds it into the buffer of its unit, materialize() into a buffer of its own.
struct Parameter {
  std::string name;
  Tensor tensor;
  Initialization init;
  bool decay = false;  ///< weight decay applies: tensors of two or more dims
};

/// Parameters that are gathered and released together: one transformer block, or the root (what all
/// blocks share: embeddings, final norm, head).
struct Unit {
  std::string name;
  std::vector<Parameter*> parameters;
};

/// Called by a model around its units, in the order of units() forward and the reverse backward.
/// The root (unit 0) is in use from before_forward(0) to the end of backward; it gets no backward
/// calls of its own.
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  virtual void before_forward(int unit) = 0;
  virtual void after_forward(int unit) = 0;
  virtual void before_backward(int unit) = 0;
  /// All gradients of the unit's parameters are complete.
  virtual void after_backward(int unit) = 0;
};

/// Elements [begin, end) of a parameter's starting value: a pure function of seed, name and element
/// number, so any rank can make any part.
void initialize_range(const Parameter& parameter, std::uint64_t seed, std::int64_t begin,
                      std::int64_t end, float* out);

/// Supplies elements [begin, end), row-major, of the named parameter as float32.
using ParameterSource = std::function<void(const Parameter& parameter, std::int64_t begin,
                                           std::int64_t end, float* out)>;

/// Writes a dense f32 or bf16 tensor (rounded to nearest), part by part: f32 straight into its
/// memory on the CPU, else through a bounded buffer of the host; on the meta device nothing.
void fill_from_host(
    const Tensor& tensor,
    const std::function<void(std::int64_t begin, std::int64_t end, float* out)>& source);

/// Binds every parameter of the units to memory of its own (one buffer a unit, category Parameters)
/// in `dtype` (f32, bf16 or f64) and fills it from `source`: for models that are not sharded.
void materialize(const std::vector<Unit>& units, const std::shared_ptr<Context>& context,
                 DType dtype, const ParameterSource& source);

}  // namespace tessera
