#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace tessera {

struct Initialization {
  enum class Kind : std::uint8_t { Zeros, Ones, Normal, Uniform };
  Kind kind = Kind::Zeros;
  float std = 0.0F;  ///< standard deviation of Normal and Uniform, whose mean is 0
};

namespace nn {
class Module;
}

/// A named weight of a module. Unbound until a sharded run or materialize() gives it memory.
///
/// As a member of its module: Parameter weight{*this, "weight", {out, in}, normal};
struct Parameter {
  /// Adds the parameter to `owner`, which must outlive it, and to the modules above it.
  /// @param name   unique within the owner, without '.'
  /// @param decay  apply weight decay
  /// @throws InvalidArgument if the owner has a parameter of this name, or on a '.' in it
  Parameter(nn::Module& owner, std::string_view name, const Shape& shape, Initialization init,
            bool decay);
  /// With weight decay for tensors of two or more dims.
  Parameter(nn::Module& owner, std::string_view name, const Shape& shape, Initialization init)
      : Parameter(owner, name, shape, init, shape.size() >= 2) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;
  operator const Tensor&() const { return tensor; }  // so that operations take parameters

  std::string name;  ///< path in the tree: "h.0.attn.c_attn.weight"
  Tensor tensor;     ///< dtype f32 until it is bound
  Initialization init;
  bool decay = false;
  float lr_scale = 1.0F;  ///< factor of the learning rate; set it before the model is sharded
  /// Weight of a linear layer within the model, neither embedding nor head: optimizers may treat it as
  /// a matrix. Set it before the model is sharded.
  bool is_matrix = false;
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
void materialize(const nn::Module& model, const std::shared_ptr<Context>& context, DType dtype,
                 const ParameterSource& source);

}  // namespace tessera
