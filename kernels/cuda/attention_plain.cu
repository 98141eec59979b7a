#include "kernels/cuda/attention_plain.h"

// Plain causal attention of f32 and f64.
namespace tessera::kernels::cuda {

template <typename T>
void attention_forward_plain(Context& context, const AttentionForwardArgs<T>& args) {
  launch_attention_forward(context, args, CausalScores{});
}

template <typename T>
void attention_backward_plain(Context& context, const AttentionBackwardArgs<T>& args) {
  launch_attention_backward(context, args, CausalScores{});
}

template void attention_forward_plain(Context&, const AttentionForwardArgs<float>&);
template void attention_forward_plain(Context&, const AttentionForwardArgs<double>&);
template void attention_backward_plain(Context&, const AttentionBackwardArgs<float>&);
template void attention_backward_plain(Context&, const AttentionBackwardArgs<double>&);

}  // namespace tessera::kernels::cuda
