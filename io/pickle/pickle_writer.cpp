#include "io/pickle/pickle_writer.h"

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "pickles are little-endian");

template <typename T>
void put_number(std::string& out, T value) {
  static_assert(std::is_integral_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

void PickleWriter::integer(std::int64_t value) {
  if (value >= 0 && value < 256) {
    text_ += 'K';
    text_ += static_cast<char>(value);
  } else if (value >= std::numeric_limits<std::int32_t>::min() &&
             value <= std::numeric_limits<std::int32_t>::max()) {
    text_ += 'J';
    put_number(text_, static_cast<std::int32_t>(value));
  } else {
    text_ += "\x8a\x08";
    put_number(text_, value);
  }
}

void PickleWriter::real(double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  text_ += 'G';
  put_number(text_, __builtin_bswap64(bits));
}

bool PickleWriter::recall(const std::string& key) {
  const auto [found, is_new] = memo_.emplace(key, static_cast<std::uint32_t>(memo_.size()));
  if (is_new) return false;
  if (found->second < 256) {
    text_ += 'h';
    text_ += static_cast<char>(found->second);
  } else {
    text_ += 'j';
    put_number(text_, found->second);
  }
  return true;
}

void PickleWriter::remember() {
  const auto at = static_cast<std::uint32_t>(memo_.size() - 1);
  if (at < 256) {
    text_ += 'q';
    text_ += static_cast<char>(at);
  } else {
    text_ += 'r';
    put_number(text_, at);
  }
}

void PickleWriter::text(std::string_view value) {
  if (recall("s" + std::string(value))) return;
  text_ += 'X';
  put_number(text_, static_cast<std::uint32_t>(value.size()));
  text_ += value;
  remember();
}

void PickleWriter::global(const PickleGlobal& value) {
  const std::string lines = std::string(value.module) + '\n' + std::string(value.name) + '\n';
  if (recall("c" + lines)) return;
  text_ += 'c' + lines;
  remember();
}

void PickleWriter::sizes(const Dims& dims) {
  begin_tuple();
  for (const std::int64_t size : dims) integer(size);
  end_tuple();
}

}  // namespace tessera::io
