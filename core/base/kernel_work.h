#pragma once

namespace tessera {

/// What a kernel moves and computes: each element of an operand once, scratch memory not at all.
struct KernelWork {
  double read = 0, written = 0;  ///< bytes
  double flops = 0;              ///< floating-point operations of matrix products and attention
};

}  // namespace tessera
