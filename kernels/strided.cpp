#include "kernels/strided.h"

namespace tessera::kernels {
namespace {

// Whether dim `d` continues the loop's last dim in all views.
bool continues(const StridedLoop& loop, std::initializer_list<const TensorView*> views, int d,
               std::int64_t size) {
  int i = 0;
  for (const TensorView* view : views)
    if (loop.strides[i++][loop.dims - 1] != view->strides[d] * size) return false;
  return true;
}

}  // namespace

StridedLoop strided_loop(std::initializer_list<const TensorView*> views) {
  const Shape& shape = (*views.begin())->shape;
  StridedLoop loop;
  loop.dims = 0;
  for (int d = 0; d < shape.size(); ++d) {
    if (shape[d] == 1) continue;
    if (loop.dims > 0 && continues(loop, views, d, shape[d]))
      loop.sizes[loop.dims - 1] *= shape[d];
    else
      loop.sizes[loop.dims++] = shape[d];
    int i = 0;
    for (const TensorView* view : views) loop.strides[i++][loop.dims - 1] = view->strides[d];
  }
  if (loop.dims == 0) {
    loop.dims = 1;
    loop.sizes[0] = 1;
    for (auto& strides : loop.strides) strides[0] = 1;
  }
  for (int d = 0; d + 1 < loop.dims; ++d) loop.rows *= loop.sizes[d];
  return loop;
}

TensorView broadcast(const TensorView& view, const Shape& shape) {
  TensorView wide = view;
  wide.shape = shape;
  wide.strides = shape;
  const int added = shape.size() - view.shape.size();
  for (int d = 0; d < shape.size(); ++d) {
    const bool repeated = d < added || (view.shape[d - added] == 1 && shape[d] != 1);
    wide.strides[d] = repeated ? 0 : view.strides[d - added];
  }
  return wide;
}

TensorView first_along(const TensorView& view, int dim) { return view.narrow(dim, 0, 1); }

}  // namespace tessera::kernels
