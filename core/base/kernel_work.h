#pragma once

namespace tessera {

/// Bytes and operations of a kernel. Each element of an operand counts once, scratch memory does not count.
struct KernelWork {
  double read = 0, written = 0;  ///< bytes
  double flops = 0;              ///< floating-point operations of matrix products and attention
};

}  // namespace tessera
