#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/tensor_impl.h"

namespace tessera::autograd {

/// One recorded operation with one output. Internal to core.
///
/// Ownership goes from results to what they were computed from: tensor -> node -> producers of its
/// inputs. So nothing that a node holds may hold the node's own output (see SavedTensor).
class Node {
 public:
  struct Input {
    std::shared_ptr<Node> node;        // what computed the input, or
    std::shared_ptr<TensorImpl> leaf;  // a leaf; neither: no gradient is wanted
    DType dtype = DType::F32;          // as the operation saw it: a leaf may be bound anew
    bool handed_out = false;           // its place was given to the backward that runs now
    Tensor staged{};                   // gradient that is added once that backward has returned
  };

  Node() = default;
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  std::string_view operation;
  std::uint64_t sequence = 0;
  std::uint64_t visited = 0;  // number of the pass that reached this node last
  bool done = false;          // has run; inputs and backward are gone
  std::shared_ptr<Context> context;
  Shape shape;  // of the output
  DType dtype = DType::F32;
  std::vector<Input> inputs;
  Backward backward;
  Tensor grad;  // of the output, as far as its users have run
};

/// backward() that refuses nodes recorded before number `oldest`.
void run_backward(const Tensor& root, const Tensor& grad, std::uint64_t oldest);

/// The gradient buffer of a leaf, made if there is none: accumulator dtype.
const Tensor& leaf_buffer(TensorImpl& leaf);
/// Where the next contribution to a leaf's gradient goes; counts as an accumulation.
GradientView take_leaf_place(TensorImpl& leaf);

}  // namespace tessera::autograd
