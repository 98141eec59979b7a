#include <algorithm>

#include "core/autograd/node.h"
#include "kernels/elementwise.h"

namespace tessera::autograd {
namespace {

using Function = std::function<std::vector<Tensor>(std::span<const Tensor>)>;
using Compute = std::function<void(std::span<const Tensor> inputs, const TensorView& to)>;

bool takes_gradient(const Tensor& t) { return t.defined() && is_floating(t.dtype()); }

// A leaf with the contents of `input`, whose gradient is written to `place`.
Tensor leaf_of(const Tensor& input, const GradientView& place) {
  Tensor leaf = input.detach();
  if (!place) return leaf;
  auto memory = Storage::wrap(input.context(), place.view.data, place.view.bytes(), nullptr);
  leaf.set_requires_grad(true);
  leaf.set_grad_buffer(Tensor::window(std::move(memory), 0, leaf.shape(), leaf.dtype()));
  leaf.impl()->has_grad = place.accumulate;
  return leaf;
}

class RecomputingGuard {
 public:
  explicit RecomputingGuard(Context& context)
      : context_(context), before_(context.is_recomputing()) {
    context.set_recomputing(true);
  }
  ~RecomputingGuard() { context_.set_recomputing(before_); }
  RecomputingGuard(const RecomputingGuard&) = delete;
  RecomputingGuard& operator=(const RecomputingGuard&) = delete;

 private:
  Context& context_;
  const bool before_;
};

// Computes a tensor when it is first read.
class LateResult final : public StorageSupplier {
 public:
  LateResult(const TensorView& view, std::string_view operation, const std::vector<Tensor>& inputs,
             Compute compute, int depth)
      : depth(depth), view_(view), operation_(operation), compute_(std::move(compute)) {
    for (const Tensor& input : inputs)
      inputs_.push_back(input.defined() ? SavedTensor(input) : SavedTensor());
  }

  void supply(Storage& storage) override {
    std::vector<Tensor> inputs;
    for (const SavedTensor& input : inputs_) {
      inputs.push_back(input.defined() ? input.get(operation_) : Tensor());
      if (input.defined()) (void)inputs.back().view();
    }
    storage.materialize();
    view_.data = storage.data();
    try {
      compute_(inputs, view_);
    } catch (...) {
      storage.release();
      throw;
    }
  }

  const int depth;  // number of late results that one read computes

 private:
  TensorView view_;
  std::string operation_;
  std::vector<SavedTensor> inputs_;
  Compute compute_;
};

std::shared_ptr<Storage> reserve_late(const std::shared_ptr<Context>& context, const Shape& shape,
                                      DType dtype, std::string_view operation,
                                      const std::vector<Tensor>& inputs, Compute compute,
                                      int depth) {
  const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * dtype_size(dtype);
  auto storage = Storage::reserve(context, bytes, MemoryCategory::Activations, operation);
  const TensorView view{nullptr, dtype, shape, contiguous_strides(shape), context->device()};
  storage->own_supplier(
      std::make_shared<LateResult>(view, operation, inputs, std::move(compute), depth));
  return storage;
}

constexpr int kMostDepth = 3;  // a product, dropout, an addition

// 0: not late.
int late_depth(const Storage& storage) {
  const auto* const late = dynamic_cast<const LateResult*>(storage.owned_supplier());
  return late == nullptr ? 0 : late->depth;
}
int late_depth(const Tensor& tensor) {
  return tensor.defined() ? late_depth(*tensor.storage()) : 0;
}

void run_again(const Function& function, std::span<const SavedTensor> saved,
               std::span<const Tensor> grads, InputGradients& into) {
  const auto reached =
      std::find_if(grads.begin(), grads.end(), [](const Tensor& t) { return t.defined(); });
  const std::shared_ptr<Context>& context = reached->context();
  const std::uint64_t oldest = context->next_sequence();
  std::vector<GradientView> places;
  std::vector<Tensor> leaves;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    places.push_back(into.target(static_cast<int>(i)));
    leaves.push_back(saved[i].defined() ? leaf_of(saved[i].get("recompute"), places.back())
                                        : Tensor());
  }
  std::vector<Tensor> results;
  {
    const GradModeGuard on(*context, true);
    const RecomputingGuard recomputing(*context);
    results = function(leaves);
  }
  std::erase_if(results, [](const Tensor& t) { return !takes_gradient(t); });
  require(results.size() == grads.size(),
          "recompute: the function gave {} floating-point results in forward and {} when run again",
          grads.size(), results.size());
  std::vector<Tensor> roots;
  std::vector<Tensor> seeds;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const Tensor& y = results[i];
    if (!grads[i].defined()) continue;
    require(y.shape() == grads[i].shape() && y.dtype() == grads[i].dtype(),
            "recompute: the function gave {} {} in forward and {} {} when run again",
            grads[i].shape(), grads[i].dtype(), y.shape(), y.dtype());
    if (!y.requires_grad()) continue;
    roots.push_back(y);
    seeds.push_back(grads[i]);
  }
  results.clear();
  // A late result that only this function holds stays unread, and may drop its inputs. The last first,
  // because it may hold others.
  for (auto root = roots.rbegin(); root != roots.rend(); ++root)
    if (root->storage().use_count() == 1) root->storage()->drop_owned_supplier();
  if (!roots.empty()) run_backward(roots, seeds, oldest);
  for (std::size_t i = 0; i < places.size(); ++i)
    if (places[i] && !leaves[i].impl()->has_grad) kernels::fill(*context, places[i].view, 0.0);
}

}  // namespace

Tensor result(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
              std::string_view operation, const std::vector<Tensor>& inputs,
              std::function<void(const TensorView&)> compute, Late late) {
  int before = 0;
  if (context->is_recomputing())
    for (const Tensor& input : inputs) before = std::max(before, late_depth(input));
  const bool is_late =
      context->is_recomputing() && before < kMostDepth && (late == Late::Always || before > 0);
  if (!is_late) {
    for (const Tensor& input : inputs)
      if (late_depth(input) > 0) (void)input.view();  // before the result takes memory
    Tensor y = Tensor::empty(context, shape, dtype, MemoryCategory::Activations, operation);
    compute(y.view());
    return y;
  }
  const auto late_compute = [compute = std::move(compute)](std::span<const Tensor> /*inputs*/,
                                                           const TensorView& to) { compute(to); };
  return Tensor::window(
      reserve_late(context, shape, dtype, operation, inputs, late_compute, before + 1), 0, shape,
      dtype);
}

void recompute_if_cheap(const Tensor& y, std::string_view operation,
                        const std::vector<Tensor>& inputs, Compute compute) {
  const std::shared_ptr<Context>& context = y.context();
  if (context->cheap_results() == nullptr || !context->grad_enabled()) return;
  int depth = 1;
  for (const Tensor& input : inputs) {
    if (!input.defined()) continue;
    const auto saved = input.storage()->saved_as();
    depth = std::max(depth, late_depth(saved ? *saved : *input.storage()) + 1);
  }
  if (depth > kMostDepth) return;
  y.storage()->set_saved_as(
      reserve_late(context, y.shape(), y.dtype(), operation, inputs, std::move(compute), depth));
  context->cheap_results()->push_back(y.storage());
}

std::vector<Tensor> recompute(Function function, std::vector<Tensor> inputs) {
  const auto first =
      std::find_if(inputs.begin(), inputs.end(), [](const Tensor& t) { return t.defined(); });
  require(first != inputs.end(), "recompute needs at least one input tensor");
  Context& context = *first->context();
  if (!context.grad_enabled()) return function(inputs);
  std::vector<Tensor> results;
  {
    const NoGradGuard off(context);
    results = function(inputs);
  }
  std::vector<Tensor> outputs;
  for (Tensor& y : results) {
    if (!takes_gradient(y)) continue;
    y = y.detach();  // the function may return an input itself
    outputs.push_back(y);
  }
  if (outputs.empty()) return results;
  std::vector<SavedTensor> saved;
  for (const Tensor& input : inputs)
    saved.push_back(input.defined() ? SavedTensor(input) : SavedTensor());
  record(
      "recompute", outputs, inputs,
      [function = std::move(function), saved = std::move(saved)](std::span<const Tensor> grads,
                                                                 InputGradients& into) {
        run_again(function, saved, grads, into);
      },
      true);
  return results;
}

Tensor recompute(std::function<Tensor(std::span<const Tensor>)> function,
                 std::vector<Tensor> inputs) {
  return recompute(Function([function = std::move(function)](std::span<const Tensor> in) {
                     return std::vector<Tensor>{function(in)};
                   }),
                   std::move(inputs))
      .front();
}

}  // namespace tessera::autograd
