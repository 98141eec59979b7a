#pragma once

#include <cstdint>
#include <optional>

#include "io/pump/layout.h"
#include "io/pump/pump.h"

namespace tessera::io {

/// Reads elements [first, last) of a tensor, in the order of `swap`, converted to `dtype`.
/// @param swap    order of the elements; empty: as stored
/// @param stored  Q8_0: the tensor is the bytes of blocks, as U8; first and last count their elements
/// @param block   bytes of scratch memory, besides the lane's
/// @throws as Pump::Lane::gather
void gather_arranged(Pump::Lane& lane, PumpTensor& tensor, const std::optional<Swap>& swap,
                     Encoding stored, std::int64_t first, std::int64_t last, DType dtype, char* out,
                     std::int64_t block);

}  // namespace tessera::io
