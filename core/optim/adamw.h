#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/optim/optimizer.h"
#include "kernels/optimizer.h"

namespace tessera::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< of the parameters that decay
  kernels::Decay decay = kernels::Decay::All;
};

/// See kernels/optimizer.h for the update. Bf16 parameters are rounded stochastically, with random
/// numbers from the context's rng_step(), the parameter's name and the element's number.
class AdamW final : public Optimizer {
 public:
  /// @throws InvalidArgument on a setting out of range
  explicit AdamW(const AdamWOptions& options = {});
  const AdamWOptions& options() const { return options_; }
  std::vector<std::string> state_names() const override;
  /// @throws InvalidArgument on a shape, dtype or step that does not fit
  void update(const Segment& segment, const UpdateOptions& options) const override;

 private:
  AdamWOptions options_;
};

/// Arguments of the kernel of an AdamW step, whose first two states are the moments; without ranges.
/// @param name  of the optimizer, for messages
/// @param first, second  dtypes of the moments
/// @throws InvalidArgument on a number of states, shape, dtype or step that does not fit
kernels::AdamW step_arguments(const char* name, const AdamWOptions& settings,
                              const Segment& segment, const UpdateOptions& options,
                              std::size_t states, DType first, DType second);
/// Adds a range for each parameter to `args`, so that random draws do not depend on units.
void add_parameters(kernels::AdamW& args, const AdamWOptions& settings, const Segment& segment,
                    double lr);

/// A range of a segment with uniform weight decay and learning rate. Includes padding.
struct UpdateRange {
  std::int64_t begin = 0;  ///< elements within the segment
  std::int64_t end = 0;
  bool decay = false;
  float lr_scale = 1.0F;
};

/// Splits elements [first, first + segment) of a layout into the fewest such ranges.
std::vector<UpdateRange> update_ranges(const ShardLayout& layout, std::int64_t first,
                                       std::int64_t segment);

}  // namespace tessera::optim
