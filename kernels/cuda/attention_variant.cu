#include "kernels/cuda/attention_plain.h"

// All variants but plain causal attention. bf16 is computed in f32 on CUDA cores.
namespace tessera::kernels::cuda {

template <typename T>
void attention_forward_variant(Context& context, const AttentionForwardArgs<T>& args,
                               const AttentionVariant& variant) {
  launch_attention_forward(context, args, VariantScores(variant, args.sizes));
}

template <typename T>
void attention_backward_variant(Context& context, const AttentionBackwardArgs<T>& args,
                                const AttentionVariant& variant) {
  launch_attention_backward(context, args, VariantScores(variant, args.sizes));
}

#define TESSERA_INSTANTIATE(T)                                                        \
  template void attention_forward_variant(Context&, const AttentionForwardArgs<T>&,   \
                                          const AttentionVariant&);                   \
  template void attention_backward_variant(Context&, const AttentionBackwardArgs<T>&, \
                                           const AttentionVariant&);
TESSERA_INSTANTIATE(double)
TESSERA_INSTANTIATE(float)
TESSERA_INSTANTIATE(BFloat16)
#undef TESSERA_INSTANTIATE

}  // namespace tessera::kernels::cuda
