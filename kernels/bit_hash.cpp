#include "kernels/bit_hash.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(bit_hash, BitHash)

void bit_hash(Context& context, const BitHash& args) {
  check_device("bit_hash", "x", context, args.x);
  require(args.x.is_contiguous(), "bit_hash: x must be contiguous, got shape {} with strides {}",
          args.x.shape, args.x.strides);
  require(reinterpret_cast<std::uintptr_t>(args.x.data) % sizeof(std::uint32_t) == 0,
          "bit_hash: x must be aligned to 4 bytes");
  check_single("bit_hash", "hash", context, args.hash, DType::I64);
  TESSERA_DISPATCH_WITH_SCRATCH(bit_hash, context, args);
}

}  // namespace tessera::kernels
