#include "io/source/names.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

TEST_CASE("patterns are a shell's, and cross dots") {
  const std::vector<std::string> patterns{"h.0.*", "*.bias", "wt?.weight", "h.[2-4].ln_1.weight"};
  for (const char* name : {"h.0.attn.c_attn.weight", "ln_f.bias", "h.11.mlp.c_fc.bias",
                           "wte.weight", "h.3.ln_1.weight"}) {
    CAPTURE(name);
    CHECK(is_chosen(patterns, name));
    CHECK(is_chosen({}, name));
  }
  for (const char* name : {"h.01.weight", "h.5.ln_1.weight", "ln_f.weight", "xwte.weight", ""}) {
    CAPTURE(name);
    CHECK_FALSE(is_chosen(patterns, name));
  }
}

TEST_CASE("patterns that fit nothing are refused all at once") {
  const std::vector<std::string> names{"wte.weight", "h.0.ln_1.bias"};
  CHECK_NOTHROW(check_patterns({"h.*", "*"}, names, "--tensors", "x"));
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "--tensors: wpe.*, h.1.* fit no tensor of x, which are called such as wte.weight",
      check_patterns({"wpe.*", "h.*", "h.1.*"}, names, "--tensors", "x"));
  CHECK_THROWS_HOLDING(InvalidArgument, "--tensors: a fits no tensor of x",
                       check_patterns({"a"}, {}, "--tensors", "x"));
}

}  // namespace
}  // namespace tessera::io
