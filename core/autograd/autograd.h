#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tessera::autograd {

/// A tensor saved for backward, outside the graph. Reading it checks for in-place changes.
class SavedTensor {
 public:
  SavedTensor() = default;
  explicit SavedTensor(Tensor tensor);
  /// @throws InternalError naming `operation` if the storage changed in place or a leaf was
  /// rebound. Memory may be released and restored in between.
  const Tensor& get(std::string_view operation) const;
  bool defined() const { return tensor_.defined(); }

 private:
  Tensor tensor_;
  std::uint64_t version_ = 0;
  std::uint32_t bindings_ = 0;
};

/// Destinations for the gradients of an operation's inputs, in the order given to record(): the
/// buffer of a leaf, or a gradient already started by another user of the same tensor.
class InputGradients {
 public:
  virtual ~InputGradients() = default;
  /// Destination of input i's gradient in the input's dtype.
  virtual GradientView target(int i) = 0;
  /// Destination in the accumulator dtype (f32 for bf16), for gradients of weights.
  virtual GradientView weight_target(int i) = 0;
  /// Passes `grad` on as input i's gradient. Copies it only if it is shared or added to another.
  virtual void pass(int i, Tensor grad) = 0;
  /// True if the operation's result is the root of backward() with the default gradient of 1.
  virtual bool is_default_seed() const = 0;
};

using Backward = std::function<void(const Tensor& grad_output, InputGradients& into)>;

/// Records `output` as the result of an operation on `inputs`. Does nothing if recording is off or
/// no input requires a gradient (unless `always`). `backward` is destroyed as soon as it has run.
/// @param operation  static string, for messages
void record(std::string_view operation, Tensor& output, const std::vector<Tensor>& inputs,
            Backward backward, bool always = false);

/// True if recording is on and any defined input requires a gradient.
bool needs_grad(std::initializer_list<const Tensor*> inputs);

/// Destination of a leaf's gradient, for operations that compute it during forward; counts as an
/// accumulation. Has the dtype of the leaf's gradient buffer.
/// @throws InvalidArgument if the tensor is not a leaf
GradientView leaf_target(const Tensor& leaf);

/// Runs the graph behind `root` in reverse order of recording and frees it on the way. Gradients of
/// leaves accumulate over calls until zero_grad().
/// @param grad  gradient of root, of the same shape and dtype; defaults to 1 for one element
/// @throws InvalidArgument, with all gradients unchanged, if root requires no gradient or part of
///   its graph has already run
void backward(const Tensor& root, const Tensor& grad = {});

/// y = x; calls `on_backward` when backward reaches y. Recorded even if x requires no gradient.
Tensor boundary(const Tensor& x, std::function<void()> on_backward);

/// y = block(x) without saved tensors: backward runs the block again, with the same random numbers.
/// @param block  a function of x, leaves and constants alone. If it uses other results of recorded
///               operations, whose gradients would be lost, backward throws InvalidArgument.
Tensor recompute(std::function<Tensor(const Tensor&)> block, const Tensor& x);

}  // namespace tessera::autograd
