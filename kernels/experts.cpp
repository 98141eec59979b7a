#include "kernels/experts.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL_IF(top_k, TopK, args.index.numel() > 0)
TESSERA_KERNEL(group_pairs, GroupPairs)
TESSERA_KERNEL_IF(spread_rows, SpreadRows, args.y&& args.y.view.numel() > 0)
TESSERA_KERNEL_IF(collect_rows, CollectRows, args.y&& args.y.view.numel() > 0)
TESSERA_KERNEL_IF(row_products, RowProducts, args.y&& args.y.view.numel() > 0)

}  // namespace tessera::kernels
