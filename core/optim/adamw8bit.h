#pragma once

#include <string>
#include <vector>

#include "core/optim/adamw.h"

namespace tessera::optim {

/// AdamW whose moments take 2.1 bytes per weight in place of 8: 8-bit codes in blocks of 64 elements, with
/// a scale each (kernels/moment_code.h). Blocks begin at multiples of 64 elements of a parameter, and random
/// bits of rounding belong to its elements, so the result does not depend on how the model is sharded.
class AdamW8bit final : public Optimizer {
 public:
  /// @throws InvalidArgument on a setting out of range
  explicit AdamW8bit(const AdamWOptions& options = {});
  std::vector<std::string> state_names() const override;
  StateKind state_kind(std::size_t i) const override;
  /// @throws InvalidArgument on a shape, dtype or step that does not fit
  void update(const Segment& segment, const UpdateOptions& options) const override;

 private:
  AdamWOptions options_;
};

}  // namespace tessera::optim
