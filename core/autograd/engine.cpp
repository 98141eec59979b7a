// Runs a recorded graph backward. Sequence numbers ascend from inputs to results, so descending
// order is a topological order: all users of a node's output run before the node.

#include <algorithm>
#include <string>
#include <utility>

#include "core/autograd/node.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"

namespace tessera::autograd {
namespace {

// Whether the tensor's memory is unshared and may be overwritten. Views, pending gradients, callers
// and saved tensors each hold a reference.
bool is_exclusive(const Tensor& tensor) {
  return tensor.shared_impl().use_count() == 1 && tensor.storage().use_count() == 1;
}

Tensor new_gradient(const Node& node) {
  return Tensor::empty(node.context, node.shape, node.dtype, MemoryCategory::Activations,
                       std::string(node.operation) + ".grad");
}

// Destination of the next contribution to the gradient of a node's output.
GradientView take_place(Node& node) {
  if (!node.grad.defined()) {
    node.grad = new_gradient(node);
    return {node.grad.view(), false, true};
  }
  if (!is_exclusive(node.grad)) {
    Tensor own = new_gradient(node);
    kernels::cast(*node.context, node.grad.view(), {own.view(), false, true});
    node.grad = std::move(own);
  }
  return {node.grad.view(), true, true};
}

class NodeGradients final : public InputGradients {
 public:
  NodeGradients(Node& node, bool default_seed) : node_(node), default_seed_(default_seed) {}

  GradientView target(int i) override {
    Node::Input& edge = input(i);
    return place(edge, edge.dtype);
  }

  GradientView weight_target(int i) override {
    Node::Input& edge = input(i);
    return place(edge, kernels::accumulator_dtype(edge.dtype));
  }

  void pass(int i, Tensor grad) override {
    Node::Input& edge = input(i);
    if (!is_wanted(edge)) return;
    const Shape& shape = edge.node ? edge.node->shape : edge.leaf->shape;
    require(grad.shape() == shape && grad.is_contiguous(),
            "{}: its backward must give input {} a dense gradient of the input's shape {}, got {} "
            "with strides {}; sum over broadcast dims, or copy a strided view",
            node_.operation, i, shape, grad.shape(), grad.strides());
    // The operation has already taken the destination for this input's gradient: stage this one.
    if (is_taken(edge)) {
      stage(edge, std::move(grad));
    } else if (edge.node && grad.dtype() == edge.node->dtype) {
      give(*edge.node, std::move(grad));
    } else {
      add(edge, grad);
    }
  }

  bool is_default_seed() const override { return default_seed_; }

  void finish() {
    for (Node::Input& edge : node_.inputs)
      if (edge.staged.defined()) add(edge, std::exchange(edge.staged, Tensor()));
  }

 private:
  static bool is_wanted(const Node::Input& edge) { return edge.node || edge.leaf; }

  Node::Input& input(int i) {
    require(i >= 0 && i < static_cast<int>(node_.inputs.size()),
            "{}: its backward requests the gradient of input {}, but record() was given {} inputs",
            node_.operation, i, node_.inputs.size());
    return node_.inputs[static_cast<std::size_t>(i)];
  }

  bool is_taken(const Node::Input& edge) const {
    return std::any_of(node_.inputs.begin(), node_.inputs.end(), [&](const Node::Input& other) {
      return other.handed_out && other.node == edge.node && other.leaf == edge.leaf;
    });
  }

  GradientView place(Node::Input& edge, DType dtype) {
    if (!is_wanted(edge)) return {};
    const bool fits = dtype == (edge.node ? edge.node->dtype : leaf_buffer(*edge.leaf).dtype());
    if (fits && !is_taken(edge)) {
      edge.handed_out = true;
      return edge.node ? take_place(*edge.node) : take_leaf_place(*edge.leaf);
    }
    stage(edge, Tensor::empty(node_.context, edge.node ? edge.node->shape : edge.leaf->shape, dtype,
                              MemoryCategory::Workspace, "gradient staging"));
    return {edge.staged.view(), false, true};
  }

  void stage(Node::Input& edge, Tensor grad) {
    require(!edge.staged.defined(),
            "{}: its backward gave the gradient of one input twice; add the two up first",
            node_.operation);
    edge.staged = std::move(grad);
  }

  static void add(Node::Input& edge, const Tensor& grad) {
    const GradientView place = edge.node ? take_place(*edge.node) : take_leaf_place(*edge.leaf);
    kernels::cast(*grad.context(), grad.view(), place);
  }

  static void give(Node& node, Tensor grad) {
    if (!node.grad.defined()) {
      node.grad = std::move(grad);
      return;
    }
    Tensor sum = is_exclusive(node.grad) ? node.grad : new_gradient(node);
    kernels::add(*node.context, node.grad.view(), grad.view(), sum.view());
    node.grad = std::move(sum);
  }

  Node& node_;
  const bool default_seed_;
};

// All nodes behind `root`, latest first.
std::vector<std::shared_ptr<Node>> collect(const std::shared_ptr<Node>& root,
                                           std::uint64_t oldest) {
  const std::uint64_t pass = root->context->next_sequence();
  std::vector<std::shared_ptr<Node>> order{root};
  root->visited = pass;
  for (std::size_t i = 0; i < order.size(); ++i) {
    Node& node = *order[i];
    require(!node.done,
            "backward reached {} (output {}) a second time: an earlier backward freed this part "
            "of the graph; add up the losses, or run forward again",
            node.operation, node.shape);
    require(node.sequence >= oldest,
            "recompute: the block uses the result of {} (shape {}), which was recorded outside of "
            "it; pass it as x, or detach it",
            node.operation, node.shape);
    node.grad = Tensor();
    for (Node::Input& input : node.inputs) {
      if (!input.node || input.node->visited == pass) continue;
      input.node->visited = pass;
      order.push_back(input.node);
    }
  }
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a->sequence > b->sequence; });
  return order;
}

void run(Node& node, bool default_seed) {
  // A node without gradient runs on zeros, because it may have callbacks.
  Tensor grad = std::move(node.grad);
  node.grad = Tensor();
  if (!grad.defined()) {
    grad = new_gradient(node);
    kernels::fill(*node.context, grad.view(), 0.0);
  }
  NodeGradients into(node, default_seed);
  node.done = true;
  node.backward(grad, into);
  into.finish();
  node.backward = nullptr;
  node.inputs.clear();
}

}  // namespace

// The scopes that a backward pass is in, outermost first. Operations of a scope have consecutive
// numbers, so that a pass enters and leaves each scope once.
class OpenScopes {
 public:
  void move_to(const std::shared_ptr<Scope>& scope) {
    if (open_.empty() ? scope == nullptr : open_.back() == scope) return;
    std::vector<std::shared_ptr<Scope>> wanted;
    for (auto s = scope; s != nullptr; s = s->parent_) wanted.push_back(s);
    std::reverse(wanted.begin(), wanted.end());
    const auto common = std::mismatch(open_.begin(), open_.end(), wanted.begin(), wanted.end());
    const auto stay = common.first - open_.begin();
    while (std::ssize(open_) > stay) {
      const std::shared_ptr<Scope> left = std::move(open_.back());
      open_.pop_back();
      left->after_backward();
    }
    for (auto next = wanted.begin() + stay; next != wanted.end(); ++next) {
      open_.push_back(*next);
      open_.back()->before_backward();
    }
  }

 private:
  std::vector<std::shared_ptr<Scope>> open_;
};

void run_backward(const Tensor& root, const Tensor& grad, std::uint64_t oldest) {
  require(root.defined() && root.requires_grad(),
          "backward: root does not require a gradient; no leaf behind it does, or it was computed "
          "while recording was off");
  const std::shared_ptr<Context>& context = root.context();
  if (grad.defined()) {
    require(grad.shape() == root.shape() && grad.dtype() == root.dtype(),
            "backward: the gradient of root must be {} {}, got {} {}", root.shape(), root.dtype(),
            grad.shape(), grad.dtype());
    require(grad.is_contiguous(), "backward: the gradient of root must be contiguous, got {}",
            grad.strides());
    require(grad.context() == context, "backward: root and its gradient differ in context");
  } else {
    require(root.numel() == 1, "backward: root has shape {}; give its gradient, or sum it up first",
            root.shape());
  }

  NoGradGuard off(*context);
  Tensor seed = grad.defined() ? grad : Tensor::full(context, root.shape(), root.dtype(), 1.0);
  if (root.is_leaf()) {
    kernels::cast(*context, seed.view(), take_leaf_place(*root.impl()));
    return;
  }
  std::vector<std::shared_ptr<Node>> order = collect(root.grad_fn(), oldest);
  order.front()->grad = std::move(seed);
  bool default_seed = !grad.defined();
  OpenScopes scopes;
  for (std::shared_ptr<Node>& node : order) {
    scopes.move_to(node->scope);
    run(*node, std::exchange(default_seed, false));
    node.reset();
  }
  scopes.move_to(nullptr);
}

// Copies `grad`, because it may be the buffer of a leaf that this pass writes.
void backward(const Tensor& root, const Tensor& grad) {
  Tensor own;
  if (grad.defined() && grad.is_contiguous()) {
    own = Tensor::empty(grad.context(), grad.shape(), grad.dtype(), MemoryCategory::Activations,
                        "root.grad");
    kernels::cast(*grad.context(), grad.view(), {own.view(), false, true});
  }
  run_backward(root, own.defined() ? own : grad, 0);
}

}  // namespace tessera::autograd
