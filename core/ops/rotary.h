#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace tessera::kernels {
struct RotaryAngles;
}

namespace tessera::ops {

/// Changes the frequencies of a rotary embedding for more positions than a model was first trained
/// with. Fields and formulas are those of Hugging Face's "rope_parameters".
struct RotaryScaling {
  enum class Kind : std::uint8_t {
    None,
    Linear,    ///< all frequencies divided by `factor`
    Dynamic,   ///< a larger base for sequences of more than `original` positions
    Llama3,    ///< low frequencies divided, high ones kept, those between interpolated
    Yarn,      ///< the same with a ramp over pairs; Peng et al. 2023, arXiv:2309.00071
    LongRope,  ///< each frequency divided by its own factor; Ding et al. 2024, arXiv:2402.13753
  };
  Kind kind = Kind::None;
  double factor = 1.0;
  std::int64_t original = 0;             ///< positions before; all but Linear
  double low_freq = 1.0, high_freq = 4;  ///< Llama3: bounds, in turns over `original` positions
  double slow = 1.0, fast = 32;          ///< Yarn: bounds, in turns over `original` positions
  bool truncate = true;                  ///< Yarn: bounds are rounded to whole pairs
  std::vector<double> short_factors{};   ///< LongRope: for sequences of up to `original` positions
  std::vector<double> long_factors{};    ///< LongRope: for longer ones
  double magnitude = 1.0;                ///< factor of rotated queries and keys
};

/// The pair (i, i + R/2) of every head turns by the angle position * frequency[i], which is
/// base^(-2 i / R) before scaling.
struct RotaryOptions {
  double base = 0;        ///< 1 or more; 10000 in the source
  std::int64_t dims = 0;  ///< R, even, at most 512: leading numbers of a head that turn; 0: all
  bool reverse = false;   ///< turns by the negative angle
  RotaryScaling scaling{};
};

/// Angles for a sequence of `length` positions. @throws InvalidArgument on an option out of range
kernels::RotaryAngles rotary_angles(const RotaryOptions& options, std::int64_t head_dim,
                                    std::int64_t length);

/// Rotary position embedding. Token t has position first_position + t, and the sequence has
/// first_position + T positions.
///
/// @param x     [B, T, H, D] of any number of heads, f64, f32 or bf16, contiguous
/// @return      shape and dtype of x
/// @grad        x; keeps nothing
/// @throws InvalidArgument on a shape, dtype, option or position that does not fit
/// Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2; pairs as in Hugging Face's Llama.
Tensor rotary(const Tensor& x, const RotaryOptions& options, std::int64_t first_position = 0);

/// The same for queries and keys of a packed projection; values are copied.
///
/// @param qkv        [B, T, (H + 2 Hkv) * D]: heads of queries, keys and values side by side,
///                   contiguous
/// @param n_head     H, heads of queries
/// @param n_kv_head  Hkv, heads of keys and of values
/// @return           shape and dtype of qkv
Tensor rotary_packed(const Tensor& qkv, std::int64_t n_head, std::int64_t n_kv_head,
                     const RotaryOptions& options, std::int64_t first_position = 0);

}  // namespace tessera::ops
