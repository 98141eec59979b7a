#include "io/safetensors/dtype.h"

#include <algorithm>
#include <array>

namespace tessera::io {
namespace {

struct Row {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};

constexpr std::array kRows = {
    Row{"F64", 64, DType::F64},          Row{"F32", 32, DType::F32},
    Row{"F16", 16, DType::F16},          Row{"BF16", 16, DType::BF16},
    Row{"I64", 64, DType::I64},          Row{"I32", 32, DType::I32},
    Row{"I16", 16, DType::I16},          Row{"I8", 8, DType::I8},
    Row{"U16", 16, DType::U16},          Row{"U8", 8, DType::U8},
    Row{"BOOL", 8, DType::Bool},         Row{"U64", 64, std::nullopt},
    Row{"U32", 32, std::nullopt},        Row{"C64", 64, std::nullopt},
    Row{"F8_E5M2", 8, std::nullopt},     Row{"F8_E4M3", 8, std::nullopt},
    Row{"F8_E8M0", 8, std::nullopt},     Row{"F8_E5M2FNUZ", 8, std::nullopt},
    Row{"F8_E4M3FNUZ", 8, std::nullopt}, Row{"F6_E2M3", 6, std::nullopt},
    Row{"F6_E3M2", 6, std::nullopt},     Row{"F4", 4, std::nullopt},
};

const Row* find_row(std::string_view name) {
  const auto* row = std::ranges::find(kRows, name, &Row::name);
  return row == kRows.end() ? nullptr : row;
}

}  // namespace

int safetensors_dtype_bits(std::string_view name) {
  const Row* row = find_row(name);
  return row ? row->bits : 0;
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  const Row* row = find_row(name);
  return row ? row->dtype : std::nullopt;
}

std::optional<DType> carrier_of_safetensors(std::string_view name) {
  const Row* row = find_row(name);
  if (!row || row->dtype) return row ? row->dtype : std::nullopt;
  for (const DType carrier : {DType::U8, DType::U16, DType::I32, DType::I64}) {
    if (8 * dtype_size(carrier) == static_cast<std::size_t>(row->bits)) return carrier;
  }
  return std::nullopt;
}

std::string_view safetensors_dtype_name(DType dtype) {
  for (const Row& row : kRows) {
    if (row.dtype == dtype) return row.name;
  }
  throw InternalError("dtype {} has no safetensors name", dtype);
}

}  // namespace tessera::io
