#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/device.h"

// Scratch memory of the CUDA kernels, of which plans know without a GPU. The kernels allocate by the
// same formulas.
namespace tessera {
class Context;
}

namespace tessera::kernels {
struct AttentionBackward;
struct BitHash;
struct EmbeddingBackward;
struct EmbeddingBackwardRows;
struct Matmul;
struct NormBackward;
struct SumOfSquares;
struct SumRows;
struct Total;
}  // namespace tessera::kernels

namespace tessera::kernels::cuda {

/// Bytes of scratch memory of tessera's own kernel; libraries add theirs. Views without memory count
/// as aligned.
template <typename Args>
std::size_t scratch_bytes(const DeviceLimits&, const Args&) {
  return 0;
}
std::size_t scratch_bytes(const DeviceLimits& gpu, const AttentionBackward& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const BitHash& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const EmbeddingBackward& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const EmbeddingBackwardRows& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const Matmul& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const NormBackward& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const SumOfSquares& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const SumRows& args);
std::size_t scratch_bytes(const DeviceLimits& gpu, const Total& args);

/// Most bytes of a cuBLASLt workspace, as NVIDIA advises for Hopper.
inline constexpr std::int64_t kMostMatmulWorkspace = std::int64_t{32} << 20;
/// Most bytes of a cuDNN attention workspace for one sequence, and for a slice of a batch. A deterministic
/// backward may need memory quadratic in tokens: 1 GiB and 512 KiB for 32 heads of 4096. On an H100, slices
/// below 1 GiB cost no time, below 512 MiB 1.3 of 217 ms of a step of GPT-2 124M at B=64.
inline constexpr std::int64_t kMostAttentionWorkspace = std::int64_t{2} << 30;
inline constexpr std::int64_t kMostSlicedAttentionWorkspace = std::int64_t{5} << 28;
inline bool attention_workspace_fits(std::int64_t bytes, std::int64_t sequences) {
  return bytes <= (sequences == 1 ? kMostAttentionWorkspace : kMostSlicedAttentionWorkspace);
}
/// Minimum alignment in bytes of a bias that cuBLASLt reads in place.
inline constexpr std::uint32_t kEpilogueAlignment = 16;

/// Books the scratch memory of a kernel on a meta context that plans for a GPU.
void plan_scratch(Context& context, const char* kernel, std::size_t bytes);

}  // namespace tessera::kernels::cuda
