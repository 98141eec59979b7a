#include "core/autograd/autograd.h"

#include "core/autograd/node.h"
#include "kernels/dispatch.h"

namespace tessera::autograd {
namespace {

void take_producers(std::vector<Node::Input>& inputs, std::vector<std::shared_ptr<Node>>& into) {
  for (Node::Input& input : inputs)
    if (input.node) into.push_back(std::move(input.node));
}

}  // namespace

// Iterative, so that destroying a long chain does not overflow the stack.
Node::~Node() {
  std::vector<std::shared_ptr<Node>> owned;
  take_producers(inputs, owned);
  while (!owned.empty()) {
    const std::shared_ptr<Node> node = std::move(owned.back());
    owned.pop_back();
    if (node.use_count() == 1) take_producers(node->inputs, owned);
  }
}

// Saves a leaf itself, to detect rebinding. Detaches other tensors, because a node that saves its
// own output would own itself.
SavedTensor::SavedTensor(Tensor tensor) {
  if (tensor.is_leaf() && tensor.requires_grad()) {
    tensor_ = std::move(tensor);
  } else {
    tensor_ = tensor.detach();
    if (auto other = tensor_.storage()->saved_as()) tensor_.impl()->storage = std::move(other);
  }
  version_ = tensor_.storage()->version();
  bindings_ = tensor_.impl()->bindings;
}

const Tensor& SavedTensor::get(std::string_view operation) const {
  require(tensor_.defined(), "{}: nothing was saved for backward", operation);
  const std::uint64_t now = tensor_.storage()->version();
  require(
      now == version_,
      "{}: a tensor of shape {} that backward needs was changed in place after forward (version {} "
      "then, {} now); work on a copy, or change it after backward",
      operation, tensor_.shape(), version_, now);
  require(tensor_.impl()->bindings == bindings_,
          "{}: a tensor of shape {} that backward needs was bound to other memory "
          "after forward; bind it after backward",
          operation, tensor_.shape());
  return tensor_;
}

void want_gradient_sums(const Tensor& result) {
  if (const auto& node = result.impl()->node)
    node->outputs[result.impl()->output].wants_sums = true;
}

bool wants_gradient_sums(const Tensor& tensor) {
  const auto& node = tensor.impl()->node;
  return node != nullptr && node->outputs[tensor.impl()->output].wants_sums;
}

void record(std::string_view operation, Tensor& output, const std::vector<Tensor>& inputs,
            Backward backward, bool always) {
  record(
      operation, std::span(&output, 1), inputs,
      [backward = std::move(backward)](std::span<const Tensor> grads, InputGradients& into) {
        backward(grads.front(), into);
      },
      always);
}

void record(std::string_view operation, std::span<Tensor> outputs,
            const std::vector<Tensor>& inputs, JointBackward backward, bool always) {
  require(!outputs.empty(), "{}: there is no output to record", operation);
  const std::shared_ptr<Context>& context = outputs.front().context();
  if (!context->grad_enabled()) return;
  bool wanted = always;
  for (const Tensor& input : inputs) wanted = wanted || (input.defined() && input.requires_grad());
  if (!wanted) return;
  for (const Tensor& output : outputs)
    require(output.is_leaf() && !output.requires_grad(),
            "{}: the output of a recorded operation must be a new tensor, and this one is recorded "
            "already: compute it under NoGradGuard",
            operation);

  auto node = std::make_shared<Node>();
  node->operation = operation;
  node->context = context;
  node->scope = context->scope();
  for (Scope* scope = node->scope.get(); scope != nullptr; scope = scope->parent_.get())
    ++scope->operations_;
  node->inputs.reserve(inputs.size());
  for (const Tensor& input : inputs) {
    Node::Input& edge = node->inputs.emplace_back();
    if (!input.defined() || !input.requires_grad()) continue;
    require(input.context() == context, "{}: an input of shape {} is of another context", operation,
            input.shape());
    edge.dtype = input.dtype();
    edge.node = input.grad_fn();
    edge.output = input.impl()->output;
    if (!edge.node) edge.leaf = input.shared_impl();
  }
  node->backward = std::move(backward);
  node->sequence = context->next_sequence();
  for (const Tensor& output : outputs) {
    TensorImpl& result = *output.impl();
    result.requires_grad = true;
    result.node = node;
    result.output = node->outputs.size();
    node->outputs.push_back({result.shape, result.dtype});
  }
}

bool needs_grad(std::initializer_list<const Tensor*> inputs) {
  for (const Tensor* input : inputs)
    if (input->defined() && input->requires_grad()) return input->context()->grad_enabled();
  return false;
}

const Tensor& leaf_buffer(TensorImpl& leaf) {
  if (!leaf.grad_buffer.defined()) {
    require(leaf.storage != nullptr,
            "a gradient arrived for a parameter of shape {} without memory: materialize() or shard "
            "its model before the forward pass",
            leaf.shape);
    leaf.grad_buffer =
        Tensor::empty(leaf.storage->context(), leaf.shape, kernels::accumulator_dtype(leaf.dtype),
                      MemoryCategory::Gradients, "leaf gradient");
    leaf.has_grad = false;
  }
  return leaf.grad_buffer;
}

GradientView take_leaf_place(TensorImpl& leaf) {
  const Tensor& buffer = leaf_buffer(leaf);
  const TensorView view = buffer.view();  // may bring in a gradient that arrived as rows
  const GradientView place{view, leaf.has_grad, true};
  buffer.storage()->bump_version();
  leaf.has_grad = true;
  return place;
}

GradientView leaf_target(const Tensor& leaf) {
  require(leaf.is_leaf(),
          "only leaves accept a gradient during forward; the tensor of shape {} is a result",
          leaf.shape());
  if (!leaf.requires_grad()) return {};
  return take_leaf_place(*leaf.impl());
}

ScopeGuard::ScopeGuard(Context& context, const std::shared_ptr<Scope>& scope)
    : context_(context), before_(context.scope()) {
  scope->parent_ = before_;
  context_.set_scope(scope);
}

ScopeGuard::~ScopeGuard() { context_.set_scope(std::move(before_)); }

}  // namespace tessera::autograd
