#include "io/gguf/offset_source.h"

#include "core/base/error.h"
#include "io/base/crc.h"

namespace tessera::io {
namespace {

class Offset final : public Addend {
 public:
  explicit Offset(float value) : value_(value) {}
  void add(std::int64_t, std::int64_t n, float* values) const override {
    for (std::int64_t i = 0; i < n; ++i) values[i] += value_;
  }
  std::uint64_t checksum() const override { return crc64(&value_, sizeof(value_)); }

 private:
  const float value_;
};

}  // namespace

std::shared_ptr<const TensorRecord> OffsetSource::record(const std::string& name) const {
  const auto record = source_->record(name);
  const auto offset = offsets_.find(name);
  if (offset == offsets_.end()) return record;
  require<Unsupported>(!record->addend, "{} has adapters for {}, which is a norm", path().string(),
                       name);
  auto result = std::make_shared<TensorRecord>(*record);
  result->addend = std::make_shared<const Offset>(offset->second);
  return result;
}

}  // namespace tessera::io
