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

/// Which roof a kernel is held against.
enum class Bound { Memory, Arithmetic, ArithmeticF32 };

/// The shapes of a training step.
struct DeviceShapes {
  std::int64_t batch, seq, heads, head_dim, vocab, vocab_row, layers, logit_rows;
  std::int64_t copied;  ///< f32 elements of the memory roof
  std::int64_t square;  ///< of the arithmetic roofs
  std::int64_t width() const { return heads * head_dim; }
  std::int64_t rows() const { return batch * seq; }
  /// Of GPT-2: embeddings, and per block four products and two norms with their biases.
  std::int64_t parameters() const {
    const std::int64_t c = width();
    return (vocab + seq) * c + layers * (12 * c * c + 13 * c) + 2 * c;
  }
};

/// Takes memory of a device, times kernels on it, and writes what was measured.
class DeviceMeasure {
 public:
  DeviceMeasure(std::shared_ptr<Context> context, const DeviceBenchOptions& options);

  Context& context() { return *context_; }
  int left_out() const { return left_out_; }

  // Given back when what they were taken for has been measured.
  TensorView empty(const Shape& shape, DType dtype);
  /// Values in [-0.5, 0.5), bf16 or f32: the products of zeros take less power, and so less time.
  TensorView tensor(const Shape& shape, DType dtype = DType::BF16);
  TensorView indices(std::int64_t batch, std::int64_t seq, std::int64_t below);

  /// Runs `prepare`, which takes memory and gives what is to be measured; then gives the memory
  /// back. What can't be measured is left out; an error that the device does not recover from is
  /// thrown.
  /// @param name  of a roof if it begins with that word; its rate is then what `bound` is held to
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
  double roofs_[3] = {};  ///< of each bound, what it reached; 0: left out
  int left_out_ = 0;
};

inline double number(std::int64_t n) { return static_cast<double>(n); }

inline GradientView fresh(const TensorView& view) { return {view, false, true}; }
inline GradientView added(const TensorView& view) { return {view, true, true}; }

/// Causal attention, forward and backward; of float32 it is held against products of float32.
void measure_attention(DeviceMeasure& bench, const DeviceShapes& s, DType dtype);

/// Kernels that a GPT-2 step in bf16 does without: of Llama's kind of blocks, of float32 and of
/// weights kept in bf16, of dropout and of generation.
void measure_other_kernels(DeviceMeasure& bench, const DeviceShapes& s);

}  // namespace tessera::kernels
