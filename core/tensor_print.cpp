#include "core/tensor_print.h"

#include <fmt/format.h>

#include <cstring>
#include <ostream>
#include <vector>

namespace tessera {
namespace {

constexpr std::int64_t kMostElements = 1000;
constexpr std::int64_t kEdge = 3;  // elements at each end of an abbreviated dim

/// Host bytes of the storage from the tensor's first element to its last one.
class HostElements {
 public:
  explicit HostElements(const Tensor& tensor) : dtype_(tensor.dtype()) {
    std::int64_t reach = tensor.numel() == 0 ? 0 : 1;
    for (int d = 0; reach > 0 && d < tensor.shape().size(); ++d)
      reach += (tensor.dim(d) - 1) * tensor.strides()[d];
    const Tensor span = tensor.alias({reach}, {1}, 0);
    bytes_.resize(span.bytes());
    span.copy_to_host(bytes_.data());
  }
  std::string operator[](std::int64_t i) const {
    switch (dtype_) {
      case DType::F64:
        return fmt::format("{:.6g}", at<double>(i));
      case DType::F32:
        return fmt::format("{:.6g}", at<float>(i));
      case DType::BF16:
        return fmt::format("{:.6g}", static_cast<float>(at<BFloat16>(i)));
      case DType::F16:
        return fmt::format("0x{:04x}", at<std::uint16_t>(i));
      case DType::I64:
        return fmt::format("{}", at<std::int64_t>(i));
      case DType::I32:
        return fmt::format("{}", at<std::int32_t>(i));
      case DType::I16:
        return fmt::format("{}", at<std::int16_t>(i));
      case DType::I8:
        return fmt::format("{}", int{at<std::int8_t>(i)});
      case DType::U16:
        return fmt::format("{}", at<std::uint16_t>(i));
      case DType::U8:
        return fmt::format("{}", int{at<std::uint8_t>(i)});
      case DType::Bool:
        return at<std::uint8_t>(i) != 0 ? "true" : "false";
    }
    return "?";
  }

 private:
  template <typename T>
  T at(std::int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    return value;
  }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

void append_dim(std::string& text, const Tensor& tensor, const HostElements& elements, int dim,
                std::int64_t offset, bool abbreviates) {
  if (dim == tensor.shape().size()) {
    text += elements[offset];
    return;
  }
  const std::int64_t size = tensor.dim(dim);
  const bool is_last = dim + 1 == tensor.shape().size();
  const std::string between =
      is_last ? ", " : ",\n" + std::string(static_cast<std::size_t>(dim) + 1, ' ');
  text += '[';
  for (std::int64_t i = 0; i < size; ++i) {
    if (i > 0) text += between;
    if (abbreviates && i == kEdge && size > 2 * kEdge) {
      text += "...";
      text += between;
      i = size - kEdge;
    }
    append_dim(text, tensor, elements, dim + 1, offset + i * tensor.strides()[dim], abbreviates);
  }
  text += ']';
}

}  // namespace

std::string to_string(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined tensor";
  std::string text;
  if (tensor.device().type == DeviceType::Meta)
    text = "no values";
  else
    append_dim(text, tensor, HostElements(tensor), 0, 0, tensor.numel() > kMostElements);
  return fmt::format("{} ({} {} {})", text, tensor.shape(), tensor.dtype(), tensor.device().str());
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << to_string(tensor);
}

}  // namespace tessera

fmt::format_context::iterator fmt::formatter<tessera::Tensor>::format(
    const tessera::Tensor& tensor, fmt::format_context& ctx) const {
  return fmt::formatter<std::string>::format(tessera::to_string(tensor), ctx);
}
