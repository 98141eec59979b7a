#include "kernels/reduction.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(sum_to, SumTo, args.out&& args.out.view.numel() > 0)
TESSERA_KERNEL_IF(max_along, MaxAlong, args.in.numel() > 0)

SumToLoops::SumToLoops(const SumTo& args)
    : kept{args.in, args.out.view}, summed{args.in, args.out.view} {
  for (int d = 0; d < args.in.shape.size(); ++d) {
    const bool is_kept = args.out.view.shape[d] == args.in.shape[d];
    Views& other = is_kept ? summed : kept;
    other.in.shape[d] = other.out.shape[d] = 1;
    if (!is_kept) summed.out.shape[d] = args.in.shape[d];
  }
}

}  // namespace tessera::kernels
