#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "core/base/storage.h"
#include "core/base/tensor_view.h"
#include "kernels/optimizer.h"

namespace tessera::kernels {

struct DeviceBenchOptions {
  std::string only = {};  ///< substring of the kernels' names; empty: all
  std::string json = {};  ///< also write results to this file; empty: none
  DType dtype = DType::BF16;
  bool quick = false;  ///< tiny shapes and one sample, to test the benchmark
};

/// Limit of the roofline model that a kernel is measured against: memory bandwidth, or the product
/// of bf16 or of float32 matrices.
enum class Bound { Memory, Arithmetic, ArithmeticF32 };

struct DeviceShapes {
  std::int64_t batch, seq, heads, head_dim, vocab, vocab_row, layers, logit_rows;
  std::int64_t copied;  ///< f32 elements of the memory roof
  std::int64_t square;  ///< matrix size of the arithmetic roofs
  std::int64_t width() const { return heads * head_dim; }
  std::int64_t rows() const { return batch * seq; }
  /// Parameters of GPT-2: embeddings, and per block four matrices and two norms with biases.
  std::int64_t parameters() const {
    const std::int64_t c = width();
    return (vocab + seq) * c + layers * (12 * c * c + 13 * c) + 2 * c;
  }
};

inline double number(auto n) { return static_cast<double>(n); }

/// Allocates device memory, times kernels, and reports the results.
class DeviceMeasure {
 public:
  DeviceMeasure(std::shared_ptr<Context> context, const DeviceBenchOptions& options);

  Context& context() { return *context_; }
  DType dtype() const { return options_.dtype; }
  /// Elements of a matrix in units of bf16: an f32 element counts as two.
  double halves(std::int64_t rows, std::int64_t width) const {
    return number(rows * width) * number(dtype_size(dtype())) / 2;
  }
  int left_out() const { return left_out_; }

  // Tensors live until the end of measure().
  TensorView empty(const Shape& shape, DType dtype);
  /// bf16 or f32 values in [-0.5, 0.5): matrix products of zeros draw less power and run faster.
  TensorView tensor(const Shape& shape, DType dtype);
  TensorView tensor(const Shape& shape) { return tensor(shape, dtype()); }
  TensorView indices(std::int64_t batch, std::int64_t seq, std::int64_t below);

  /// Runs `prepare`, which allocates tensors and returns the call to time; then frees the tensors.
  /// Leaves a kernel out if it throws; throws if the device does not recover.
  /// @param name  with the prefix "roof", the rate becomes the roof of `bound`
  /// @param work  bytes or flops of one call
  void measure(const std::string& name, Bound bound, double work,
               const std::function<std::function<void()>()>& prepare);
  /// The same for one kernel, with the arguments that `prepare` returns.
  template <typename Prepare, typename Args>
  void measure_kernel(const std::string& name, Bound bound, double work,
                      void (*kernel)(Context&, const Args&), const Prepare& prepare) {
    measure(name, bound, work,
            [&] { return [args = Args(prepare()), kernel, this] { kernel(*context_, args); }; });
  }

 private:
  void synchronize();
  void copy_from_host(const TensorView& to, const void* from, std::size_t bytes);
  double seconds(const std::function<void()>& body, int launches);
  void time(const std::string& name, Bound bound, double work, const std::function<void()>& body);
  void report(const std::string& name, Bound bound, double work, const std::vector<double>& samples,
              double cpu);

  std::shared_ptr<Context> context_;
  DeviceBenchOptions options_;
  std::vector<std::shared_ptr<Storage>> storages_;
  std::ofstream file_;
  double roofs_[3] = {};  ///< measured rate by bound; 0: left out
  int left_out_ = 0;
};

inline GradientView fresh(const TensorView& view) { return {view, false, true}; }
inline GradientView added(const TensorView& view) { return {view, true, true}; }

/// Arguments of an AdamW step over n values.
AdamW adamw_of(DeviceMeasure& bench, std::int64_t n, DType dtype);

/// Causal attention, forward and backward; float32 attention is compared with the float32 roof.
void measure_attention(DeviceMeasure& bench, const DeviceShapes& s, DType dtype);

/// Kernels outside of a GPT-2 step: Llama-style blocks, float32 attention, bf16 weights, dropout,
/// generation.
void measure_other_kernels(DeviceMeasure& bench, const DeviceShapes& s);

}  // namespace tessera::kernels
