#include "io/tokenizer/unicode.h"

#include <doctest/doctest.h>

#include "io/base/base64.h"

using namespace tessera::io;

TEST_CASE("malformed sequences become one U+FFFD each, as in Python") {
  CHECK(replace_malformed_utf8("a\xff\xfe") == "a\ufffd\ufffd");
  CHECK(replace_malformed_utf8("\xe4\xbd x\xf0\x9f\x98") == "\ufffd x\ufffd");
  CHECK(replace_malformed_utf8("\xed\xa0\x80\xc0\xaf") == "\ufffd\ufffd\ufffd\ufffd\ufffd");
  CHECK(replace_malformed_utf8("\xf4\x90\x80\x80") == "\ufffd\ufffd\ufffd\ufffd");
  CHECK(replace_malformed_utf8("\u6211 ok") == "\u6211 ok");
  CHECK(find_malformed_utf8("0123456789\xff") == 10);
  CHECK(find_malformed_utf8("0123456789\u00e9") == std::string_view::npos);
}

TEST_CASE("a mask has the text's length and is valid") {
  std::string masked;
  CHECK(!mask_for_regex("plain \u00e9\u6211", masked));
  for (const std::string text : {"a\xff b\xe4\xbd", "\U0001fae8 x", "\ua7cb"}) {
    REQUIRE(mask_for_regex(text, masked));
    CHECK(masked.size() == text.size());
    CHECK(find_malformed_utf8(masked) == std::string::npos);
  }
}

TEST_CASE("normal forms") {
  CHECK(normalize_unicode("e\u0301 x", NormalForm::NFC) == "\u00e9 x");
  CHECK(normalize_unicode("q\u0307\u0323", NormalForm::NFC) == "q\u0323\u0307");
  CHECK(normalize_unicode("\u1112\u1161\u11ab", NormalForm::NFC) == "\ud55c");
  CHECK(normalize_unicode("\ud55c", NormalForm::NFD) == "\u1112\u1161\u11ab");
  CHECK(normalize_unicode("\ufb01\u212b", NormalForm::NFKC) == "fi\u00c5");
  CHECK(normalize_unicode("\u0301a", NormalForm::NFC) == "\u0301a");
  CHECK(normalize_unicode("", NormalForm::NFC).empty());
  CHECK(lowercase_unicode("\u0130\u01c5A") == "i\u0307\u01c6a");
}

TEST_CASE("base64") {
  std::string bytes;
  for (const std::string text : {"", "a", "ab", "abc", "\xff\x00x"}) {
    CHECK(decode_base64(encode_base64(text), bytes));
    CHECK(bytes == text);
  }
  for (const char* bad : {"a", "ab==c", "a===", "!!!!", "QQ=", "QR=="})
    CHECK(!decode_base64(bad, bytes));
}
