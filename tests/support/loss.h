#pragma once

#include "train/trainer.h"

namespace tessera::test {

/// A language model's loss as the trainer calls it. `model` must outlive the result.
template <typename Model>
train::LossFunction loss_of(Model& model) {
  return [&model](const train::Batch& batch, double scale) {
    return model.loss(batch.tokens, batch.targets, scale);
  };
}

}  // namespace tessera::test
