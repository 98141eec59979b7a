#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// A library's kernel for a matrix product, with its measured time.
struct TunedProduct {
  std::string algorithm;             ///< bytes that only the library reads, in hex; empty if apart
  std::int64_t workspace_bytes = 0;  ///< that the kernel needs
  double microseconds = 0;
  /// Splits a product with an epilogue: the plain product and a kernel for the epilogue are faster than
  /// one kernel for both. microseconds are of the two.
  bool apart = false;
  friend bool operator==(const TunedProduct&, const TunedProduct&) = default;
};

/// Fastest kernels by GPU and library version ("NVIDIA H100 80GB HBM3, cuBLASLt 13.1.0"), and by the
/// product's name in the backend.
using TunedProducts = std::map<std::string, std::map<std::string, TunedProduct>>;

/// Adds the entries of `newer` to `all`; they replace those of the same GPU and product.
void merge(TunedProducts& all, const TunedProducts& newer);

/// The fastest of some kernels; nothing if none runs.
/// @param time  microseconds of the kernel of that index; nothing if it can't run
std::optional<TunedProduct> fastest(std::span<const TunedProduct> kernels,
                                    const std::function<std::optional<double>(std::size_t)>& time);

std::string to_hex(std::span<const std::byte> bytes);
/// @return false unless `hex` has two hexadecimal digits for each byte; `bytes` are then undefined
bool from_hex(const std::string& hex, std::span<std::byte> bytes);

/// Kernels of matrix products on one device: those in use, and those timed since use(). A product
/// without an entry runs the kernel that the library names first. Used by the context's thread.
class ProductTuning {
 public:
  /// @param gpu  key of this device in TunedProducts
  explicit ProductTuning(std::string gpu) : gpu_(std::move(gpu)) {}

  /// Uses the entries of this GPU, in place of earlier ones; drops results that were not taken.
  /// @param seconds  for timing products without an entry in their next use; 0: they are not timed
  void use(const TunedProducts& all, double seconds);
  /// Changes with each use().
  int generation() const { return generation_; }

  /// Entry in use, or null. @param accepts  whether the library accepts the entry's algorithm; a refused
  ///   entry is dropped. Not called if the product is apart
  const TunedProduct* find(const std::string& product,
                           const std::function<bool(const TunedProduct&)>& accepts);
  /// Whether a product is to be timed.
  bool is_to_time(const std::string& product) const {
    return seconds_left_ > 0 && !in_use_.contains(product) && !timed_.contains(product);
  }
  /// Counts time that timing took. @return whether some is left
  bool spend(double seconds) { return (seconds_left_ -= seconds) > 0; }
  /// Keeps a result for take_timed(), if there is one. It is not used before the next use().
  void add(const std::string& product, const std::optional<TunedProduct>& result);
  /// Compares a product that has an epilogue with the plain product and then a kernel of
  /// `epilogue_microseconds`; keeps "apart" as its result if these are faster, or the only way.
  void compare_apart(const std::string& product, const std::string& plain,
                     double epilogue_microseconds);
  /// Results since use().
  TunedProducts take_timed();

 private:
  using Entries = std::map<std::string, TunedProduct>;
  const TunedProduct* known(const std::string& product) const;

  const std::string gpu_;
  Entries in_use_, timed_;
  double seconds_left_ = 0;
  int generation_ = 0;
};

}  // namespace tessera
