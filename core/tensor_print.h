#pragma once

#include <fmt/core.h>

#include <iosfwd>
#include <string>

#include "core/tensor.h"

namespace tessera {

/// Values in nested brackets with shape, dtype and device, as NumPy abbreviates them: of more than
/// 1000 elements, the first and last three of each dim.
///
///     [[0.5, -1, 3.25],
///      [2, 0, 1e-05]] ([2, 3] f32 cpu)
///
/// Copies the tensor to the host, which on a GPU waits for all queued work. On the meta device there
/// are no values. Floating numbers have six digits.
std::string to_string(const Tensor& tensor);

std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Tensor> : fmt::formatter<std::string> {
  fmt::format_context::iterator format(const tessera::Tensor& tensor,
                                       fmt::format_context& ctx) const;
};
