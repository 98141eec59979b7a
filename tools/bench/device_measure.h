#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "core/base/storage.h"
#include "core/base/tensor_view.h"
#include "tools/bench/device_bench.h"

namespace tessera::kernels {

/// Roof that a kernel is compared with.
enum class Bound { Memory, Arithmetic, ArithmeticF32 };

/// Shapes of a training step.
struct DeviceShapes {
  std::int64_t batch, seq, heads, head_dim, vocab, vocab_row, layers, logit_rows;
  std::int64_t copied;  ///< f32 elements of the memory roof
  std::int64_t square;  ///< matrix size of the arithmetic roofs
  std::int64_t width() const { return heads * head_dim; }
  std::int64_t rows() const { return batch * seq; }
  /// Parameters of GPT-2: embeddings, and per block four products and two norms with biases.
  std::int64_t parameters() const {
    const std::int64_t c = width();
    return (vocab + seq) * c + layers * (12 * c * c + 13 * c) + 2 * c;
  }
};

/// Allocates device memory, times kernels, and reports the results.
class DeviceMeasure {
 public:
  DeviceMeasure(std::shared_ptr<Context> context, const DeviceBenchOptions& options);

  Context& context() { return *context_; }
  int left_out() const { return left_out_; }

  // Tensors live until the end of measure().
  TensorView empty(const Shape& shape, DType dtype);
  /// bf16 or f32 values in [-0.5, 0.5): products of zeros draw less power and so run faster.
  TensorView tensor(const Shape& shape, DType dtype = DType::BF16);
  TensorView indices(std::int64_t batch, std::int64_t seq, std::int64_t below);

  /// Runs `prepare`, which allocates tensors and returns the call to time; then frees the tensors.
  /// A kernel that throws is left out; throws if the device does not recover.
  /// @param name  with the prefix "roof", the rate becomes the roof of `bound`
  /// @param work  bytes or flops of one call
  void measure(const std::string& name, Bound bound, double work,
               const std::function<std::function<void()>()>& prepare);

 private:
  double seconds(const std::function<void()>& body, int launches);
  void time(const std::string& name, Bound bound, double work, const std::function<void()>& body);
  void report(const std::string& name, Bound bound, double median, double best, double worst,
              double work);

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::shared_ptr<Context> context_;
  DeviceBenchOptions options_;
  std::vector<std::shared_ptr<Storage>> storages_;
  std::unique_ptr<std::FILE, Close> file_;
  double roofs_[3] = {};  ///< measured rate by bound; 0: left out
  int left_out_ = 0;
};

inline double number(std::int64_t n) { return static_cast<double>(n); }

inline GradientView fresh(const TensorView& view) { return {view, false, true}; }
inline GradientView added(const TensorView& view) { return {view, true, true}; }

/// Causal attention, forward and backward; float32 attention is compared with the float32 roof.
void measure_attention(DeviceMeasure& bench, const DeviceShapes& s, DType dtype);

/// Kernels outside of a bf16 GPT-2 step: Llama-style blocks, float32 attention, bf16 weights,
/// dropout, generation.
void measure_other_kernels(DeviceMeasure& bench, const DeviceShapes& s);

}  // namespace tessera::kernels
