#include "core/base/product_tuning.h"

#include <charconv>
#include <utility>

namespace tessera {

void merge(TunedProducts& all, const TunedProducts& newer) {
  for (const auto& [gpu, products] : newer)
    for (const auto& [product, entry] : products) all[gpu].insert_or_assign(product, entry);
}

std::optional<TunedProduct> fastest(std::span<const TunedProduct> kernels,
                                    const std::function<std::optional<double>(std::size_t)>& time) {
  std::optional<TunedProduct> best;
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const std::optional<double> microseconds = time(i);
    if (!microseconds || (best && best->microseconds <= *microseconds)) continue;
    best = kernels[i];
    best->microseconds = *microseconds;
  }
  return best;
}

std::string to_hex(std::span<const std::byte> bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string hex;
  for (const std::byte byte : bytes) {
    hex += kDigits[std::to_integer<unsigned>(byte) >> 4U];
    hex += kDigits[std::to_integer<unsigned>(byte) & 15U];
  }
  return hex;
}

bool from_hex(const std::string& hex, std::span<std::byte> bytes) {
  if (hex.size() != 2 * bytes.size()) return false;
  const char* at = hex.data();
  for (std::byte& byte : bytes) {
    std::uint8_t value = 0;
    const auto [end, status] = std::from_chars(at, at + 2, value, 16);
    if (status != std::errc() || end != at + 2) return false;
    byte = std::byte{value};
    at += 2;
  }
  return true;
}

void ProductTuning::use(const TunedProducts& all, double seconds) {
  const auto found = all.find(gpu_);
  in_use_ = found == all.end() ? Entries() : found->second;
  timed_.clear();
  seconds_left_ = seconds;
  ++generation_;
}

const TunedProduct* ProductTuning::find(const std::string& product,
                                        const std::function<bool(const TunedProduct&)>& accepts) {
  const auto found = in_use_.find(product);
  if (found == in_use_.end()) return nullptr;
  if (found->second.apart || accepts(found->second)) return &found->second;
  in_use_.erase(found);
  return nullptr;
}

void ProductTuning::add(const std::string& product, const std::optional<TunedProduct>& result) {
  if (result) timed_.insert_or_assign(product, *result);
}

const TunedProduct* ProductTuning::known(const std::string& product) const {
  for (const Entries* entries : {&timed_, &in_use_})
    if (const auto found = entries->find(product); found != entries->end()) return &found->second;
  return nullptr;
}

void ProductTuning::compare_apart(const std::string& product, const std::string& plain,
                                  double epilogue_microseconds) {
  const TunedProduct* const first = known(plain);
  if (first == nullptr) return;
  const double microseconds = first->microseconds + epilogue_microseconds;
  const TunedProduct* const fused = known(product);
  if (fused == nullptr || microseconds < fused->microseconds)
    add(product, TunedProduct{.algorithm = {}, .microseconds = microseconds, .apart = true});
}

TunedProducts ProductTuning::take_timed() {
  TunedProducts result;
  if (!timed_.empty()) result[gpu_] = std::exchange(timed_, {});
  return result;
}

}  // namespace tessera
