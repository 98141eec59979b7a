#pragma once

#include "core/base/tensor_view.h"

// Argument structs of kernels/elementwise.h for the backends.
namespace tessera::kernels {

struct Add {
  TensorView a, b, y;
};
struct Fill {
  TensorView out;
  double value = 0;
};
struct Cast {
  TensorView in;
  GradientView out;
  double scale = 1;
};
struct SumRows {
  TensorView in;
  GradientView out;
};
struct Total {
  TensorView in;
  GradientView out;
  double scale = 1;
};

}  // namespace tessera::kernels
