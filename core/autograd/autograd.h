#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tessera::autograd {

/// A tensor kept for backward, outside the graph. Reading it checks that nobody changed it in place
/// since.
class SavedTensor {
 public:
  SavedTensor() = default;
  explicit SavedTensor(Tensor tensor);
  /// @throws InternalError naming `operation` if the storage's version moved on, or a leaf was
  /// bound to other memory. Memory that was given back and restored in between is fine.
  const Tensor& get(std::string_view operation) const;
  bool defined() const { return tensor_.defined(); }

 private:
  Tensor tensor_;
  std::uint64_t version_ = 0;
  std::uint32_t bindings_ = 0;
};

/// Where the backward of an operation puts the gradients of its inputs, in the order given to
/// record(). Gradients go straight to their place: into the buffer of a leaf, or added to what
/// another user of the same tensor has put there; a kernel writes or adds as `accumulate` says.
class InputGradients {
 public:
  virtual ~InputGradients() = default;
  /// Place for the gradient of input i in the input's own dtype. Not wanted: skip it.
  virtual GradientView target(int i) = 0;
  /// The same in the accumulator dtype (f32 for bf16): what gradients of weights are kept in.
  virtual GradientView weight_target(int i) = 0;
  /// Hands over a gradient as it is (no copy unless somebody else holds it or one is there
  /// already).
  virtual void pass(int i, Tensor grad) = 0;
  /// Whether the gradient that backward was given is the one that it starts from by itself: the
  /// operation's result is its root, and no other gradient was named.
  virtual bool is_default_seed() const = 0;
};

using Backward = std::function<void(const Tensor& grad_output, InputGradients& into)>;

/// Makes `output` the result of an operation on `inputs` whose gradients `backward` computes. Does
/// nothing if recording is off or no input requires a gradient (unless `always`). What `backward`
/// captured is freed as soon as it has run.
/// @param operation  static string, for messages
void record(std::string_view operation, Tensor& output, const std::vector<Tensor>& inputs,
            Backward backward, bool always = false);

/// True if recording is on and any defined input requires a gradient.
bool needs_grad(std::initializer_list<const Tensor*> inputs);

/// Place for the gradient of a leaf, for operations that compute it during forward. Counts as an
/// accumulation. Its dtype is the leaf's gradient buffer's. Not wanted if the leaf asks for none.
/// @throws InvalidArgument if the tensor is not a leaf
GradientView leaf_target(const Tensor& leaf);

/// Runs the graph behind `root` once, in reverse order of recording, and frees it on the way.
/// Nothing is recorded meanwhile. Gradients of leaves add up over calls until zero_grad().
/// @param grad  gradient of root, its shape and dtype; may be left out for one element (1)
/// @throws InvalidArgument if root does not require a gradient, or a former backward has run (and
///         freed) a part of its graph already; in both cases no gradient is touched
void backward(const Tensor& root, const Tensor& grad = {});

/// y = x, and `on_backward` is called when the gradient passes by here on the way back. Always in
/// the graph when recording is on.
Tensor boundary(const Tensor& x, std::function<void()> on_backward);

/// y = block(x) without keeping what backward needs: it runs the block again then, with the same
/// random numbers (which are functions of place, not of history).
/// @param block  a function of x, leaves and constants alone; called again during backward, with
///               recording on. A result of recorded operations that it uses otherwise is an error
///               of backward (InvalidArgument): its gradient would be lost.
Tensor recompute(std::function<Tensor(const Tensor&)> block, const Tensor& x);

}  // namespace tessera::autograd
