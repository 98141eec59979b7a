#pragma once

#include <string>
#include <vector>

#include "core/optim/adamw.h"

namespace tessera::optim {

struct MuonOptions {
  double momentum = 0.95;
  AdamWOptions adamw{};  ///< of the other parameters; its weight decay is that of matrices, too
};

/// Muon for weights of linear layers (ParameterSlot::is_matrix), AdamW for all other parameters.
///
/// The update of a matrix [r, c] is its momentum (Nesterov's), made nearly orthogonal by 5 steps of
/// a Newton-Schulz iteration, and scaled by 0.2 sqrt(max(r, c)), so that AdamW's learning rates fit.
/// Matrices are always whole: ranks gather the momentum of a unit in the dtype that the model
/// computes in, and each makes those orthogonal of which its segment has a part. So the result does
/// not depend on how the model is sharded.
///
/// Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the scale: Liu et al. 2025,
/// arXiv:2502.16982.
class Muon final : public Optimizer {
 public:
  /// @throws InvalidArgument on a setting out of range
  explicit Muon(const MuonOptions& options = {});
  std::vector<std::string> state_names() const override;
  bool has_state(std::size_t i, const ParameterSlot& slot) const override;
  /// @throws InvalidArgument on a shape, dtype or step that does not fit
  void update(const Segment& segment, const UpdateOptions& options) const override;

 private:
  void update_matrices(const Segment& segment, const UpdateOptions& options) const;
  void update_others(const Segment& segment, const UpdateOptions& options) const;

  MuonOptions options_;
  AdamW adamw_;
};

}  // namespace tessera::optim
