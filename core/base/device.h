#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// Location of a tensor. Meta tensors have a shape but no memory; they are for planning.
enum class DeviceType : std::uint8_t { CPU, CUDA, Meta };

struct Device {
  DeviceType type = DeviceType::CPU;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;

  /// "cpu", "cuda:1", "meta"
  std::string str() const {
    if (type == DeviceType::CUDA) return "cuda:" + std::to_string(index);
    return type == DeviceType::CPU ? "cpu" : "meta";
  }
};

/// Properties of a GPU that sizes of scratch memory depend on.
struct DeviceLimits {
  int processors = 132;        ///< multiprocessors; the defaults are an H100's
  int shared_bytes = 232'448;  ///< shared memory of a block, at most
};

}  // namespace tessera
