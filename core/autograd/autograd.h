#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tessera::autograd {

/// A tensor saved for backward, outside the graph. Reading it checks for in-place changes.
class SavedTensor {
 public:
  SavedTensor() = default;
  explicit SavedTensor(Tensor tensor);
  /// @throws InvalidArgument naming `operation` if the storage changed in place or a leaf was
  /// rebound. Memory may be released and restored in between.
  const Tensor& get(std::string_view operation) const;
  bool defined() const { return tensor_.defined(); }

 private:
  Tensor tensor_;
  std::uint64_t version_ = 0;
  std::uint32_t bindings_ = 0;
};

/// Destination of a gradient that is zero outside of some rows of its tensor, such as a lookup's.
struct RowGradient {
  TensorView rows{};     ///< [n, ...]: rows of the gradient, in the accumulator dtype
  TensorView indices{};  ///< [n] i32: which row of the tensor each is, all distinct; -1: none
  explicit operator bool() const { return rows.defined(); }
};

/// Receives the gradient of a leaf as rows; see Tensor::set_row_receiver().
class RowReceiver {
 public:
  virtual ~RowReceiver() = default;
  /// @return a destination with n >= count, all of which the operation writes; undefined: the gradient
  ///   must be dense
  virtual RowGradient receive(std::int64_t count) = 0;
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
  /// Destination of at most `count` rows of input i's gradient. Undefined: use weight_target().
  virtual RowGradient row_target(int i, std::int64_t count) = 0;
  /// Destination of the sums over rows, [last dim] in the accumulator dtype, of input i's gradient as it is once
  /// target(i) is written; call that first. Undefined unless the operation that computed input i wants the sums
  /// and no other contribution follows.
  virtual GradientView sums_target(int i) = 0;
  /// These sums for the gradient of the operation's first result; undefined: not computed.
  virtual const Tensor& gradient_sums() const = 0;
  /// Passes `grad` on as input i's gradient. Copies it only if it is shared or added to another.
  virtual void pass(int i, Tensor grad) = 0;
  /// True if the gradient of the operation's result is backward()'s default gradient of 1: for the
  /// root, and for terms of a sum that is the root.
  virtual bool is_default_seed() const = 0;
};

using Backward = std::function<void(const Tensor& grad_output, InputGradients& into)>;

/// Records `output` as the result of an operation on `inputs`. Does nothing if recording is off or
/// no input requires a gradient (unless `always`). `backward` is destroyed as soon as it has run.
/// @param operation  static string, for messages
void record(std::string_view operation, Tensor& output, const std::vector<Tensor>& inputs,
            Backward backward, bool always = false);

/// Gets the gradients of all outputs; at least one is defined, the others were not reached.
using JointBackward =
    std::function<void(std::span<const Tensor> grad_outputs, InputGradients& into)>;

/// The same for an operation with several outputs, whose gradients arrive together.
void record(std::string_view operation, std::span<Tensor> outputs,
            const std::vector<Tensor>& inputs, JointBackward backward, bool always = false);

/// Asks whatever completes the gradient of `result`, an operation's first, for its sums over rows: the gradient of
/// a bias. A norm computes them while it writes the gradient. Does nothing if `result` isn't recorded.
void want_gradient_sums(const Tensor& result);
/// Whether `tensor` is the result of an operation that wants them.
bool wants_gradient_sums(const Tensor& tensor);

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

/// A part of a forward pass that is told when backward enters and leaves it, such as one run of a
/// unit. Operations belong to the innermost scope that is open while they are recorded.
class Scope {
 public:
  virtual ~Scope() = default;
  /// Called before the first of the scope's operations runs backward.
  virtual void before_backward() = 0;
  /// Called after the last one: gradients from this part of the forward pass are complete.
  virtual void after_backward() = 0;
  /// Number of operations recorded in this scope and in scopes inside it.
  std::int64_t operations() const { return operations_; }

 private:
  friend class ScopeGuard;
  friend class OpenScopes;
  friend void record(std::string_view, std::span<Tensor>, const std::vector<Tensor>&, JointBackward,
                     bool);
  std::shared_ptr<Scope> parent_;
  std::int64_t operations_ = 0;
};

/// Opens a scope for the lifetime of the guard.
class ScopeGuard {
 public:
  /// @param scope  a scope that has not been opened before
  ScopeGuard(Context& context, const std::shared_ptr<Scope>& scope);
  ~ScopeGuard();
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  Context& context_;
  std::shared_ptr<Scope> before_;
};

/// When the result of an operation is computed late, while backward runs a recomputed function again.
enum class Late : std::uint8_t {
  Always,       ///< products
  IfAnInputIs,  ///< cheap operations, which often follow a function's last product
};

/// A dense tensor for the result of an operation, written by `compute`: at once, or late, when its
/// contents are first read. Often nobody reads the result of a recomputed function's last operation, which
/// then costs neither time nor memory.
/// @param inputs  what compute reads: checked for in-place changes, as by SavedTensor
/// @param compute  may run during backward
Tensor result(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
              std::string_view operation, const std::vector<Tensor>& inputs,
              std::function<void(const TensorView&)> compute, Late late = Late::Always);

/// Lets backward compute `y`, a new dense result, again with `compute` instead of keeping it, if the context
/// has a list of cheap results, to which it is added. For operations that keep their large inputs anyway. Memory of
/// `y` is freed with its last handle outside of saved tensors.
void recompute_if_cheap(
    const Tensor& y, std::string_view operation, const std::vector<Tensor>& inputs,
    std::function<void(std::span<const Tensor> inputs, const TensorView& to)> compute);

/// y = function(inputs) without saved tensors: backward runs the function again, with the same
/// random numbers.
/// @param function  a function of `inputs`, leaves and constants alone. If it uses other results of
///   recorded operations, whose gradients would be lost, backward throws InvalidArgument.
Tensor recompute(std::function<Tensor(std::span<const Tensor> inputs)> function,
                 std::vector<Tensor> inputs);
/// The same for a function with several results. Those that are undefined, or not of a floating
/// dtype, are returned as they are.
std::vector<Tensor> recompute(
    std::function<std::vector<Tensor>(std::span<const Tensor> inputs)> function,
    std::vector<Tensor> inputs);

}  // namespace tessera::autograd
