#pragma once

#include <string_view>

namespace tessera::io {

/// Characters that Unicode 15, 15.1 and 16 added, which PCRE2 before 10.45 takes for unassigned.
struct UnicodeAddition {
  char32_t first, last;
  std::string_view stand_in;  ///< UTF-8 of a character of Unicode 14 of the same category
};

inline constexpr UnicodeAddition kUnicodeAdditions[] = {
    {0x897, 0x897, "\xE0\xBA\xB1"},         {0xCF3, 0xCF3, "\xE0\xA4\x83"},
    {0xECE, 0xECE, "\xE0\xBA\xB1"},         {0x1B4E, 0x1B4F, "\xE0\xA5\xA4"},
    {0x1B7F, 0x1B7F, "\xE0\xA5\xA4"},       {0x1C89, 0x1C89, "\xE1\xB8\x80"},
    {0x1C8A, 0x1C8A, "\xE1\xB8\x81"},       {0x2427, 0x2429, "\xE2\x98\x85"},
    {0x2FFC, 0x2FFF, "\xE2\x98\x85"},       {0x31E4, 0x31E5, "\xE2\x98\x85"},
    {0x31EF, 0x31EF, "\xE2\x98\x85"},       {0xA7CB, 0xA7CC, "\xE1\xB8\x80"},
    {0xA7CD, 0xA7CD, "\xE1\xB8\x81"},       {0xA7DA, 0xA7DA, "\xE1\xB8\x80"},
    {0xA7DB, 0xA7DB, "\xE1\xB8\x81"},       {0xA7DC, 0xA7DC, "\xE1\xB8\x80"},
    {0x105C0, 0x105F3, "\xF0\x90\x80\x80"}, {0x10D40, 0x10D49, "\xF0\x90\x92\xA0"},
    {0x10D4A, 0x10D4D, "\xF0\x90\x80\x80"}, {0x10D4E, 0x10D4E, "\xF0\x96\xBE\x93"},
    {0x10D4F, 0x10D4F, "\xF0\x90\x80\x80"}, {0x10D50, 0x10D65, "\xF0\x90\x90\x80"},
    {0x10D69, 0x10D6D, "\xF0\x90\x87\xBD"}, {0x10D6E, 0x10D6E, "\xF0\x90\xBA\xAD"},
    {0x10D6F, 0x10D6F, "\xF0\x96\xBE\x93"}, {0x10D70, 0x10D85, "\xF0\x90\x90\xA8"},
    {0x10D8E, 0x10D8F, "\xF0\x9D\x9B\x81"}, {0x10EC2, 0x10EC4, "\xF0\x90\x80\x80"},
    {0x10EFC, 0x10EFF, "\xF0\x90\x87\xBD"}, {0x1123F, 0x11240, "\xF0\x90\x80\x80"},
    {0x11241, 0x11241, "\xF0\x90\x87\xBD"}, {0x11380, 0x11389, "\xF0\x90\x80\x80"},
    {0x1138B, 0x1138B, "\xF0\x90\x80\x80"}, {0x1138E, 0x1138E, "\xF0\x90\x80\x80"},
    {0x11390, 0x113B5, "\xF0\x90\x80\x80"}, {0x113B7, 0x113B7, "\xF0\x90\x80\x80"},
    {0x113B8, 0x113BA, "\xF0\x91\x80\x80"}, {0x113BB, 0x113C0, "\xF0\x90\x87\xBD"},
    {0x113C2, 0x113C2, "\xF0\x91\x80\x80"}, {0x113C5, 0x113C5, "\xF0\x91\x80\x80"},
    {0x113C7, 0x113CA, "\xF0\x91\x80\x80"}, {0x113CC, 0x113CD, "\xF0\x91\x80\x80"},
    {0x113CE, 0x113CE, "\xF0\x90\x87\xBD"}, {0x113CF, 0x113CF, "\xF0\x91\x80\x80"},
    {0x113D0, 0x113D0, "\xF0\x90\x87\xBD"}, {0x113D1, 0x113D1, "\xF0\x90\x80\x80"},
    {0x113D2, 0x113D2, "\xF0\x90\x87\xBD"}, {0x113D3, 0x113D3, "\xF0\x90\x80\x80"},
    {0x113D4, 0x113D5, "\xF0\x90\x84\x80"}, {0x113D7, 0x113D8, "\xF0\x90\x84\x80"},
    {0x113E1, 0x113E2, "\xF0\x90\x87\xBD"}, {0x116D0, 0x116E3, "\xF0\x90\x92\xA0"},
    {0x11B00, 0x11B09, "\xF0\x90\x84\x80"}, {0x11BC0, 0x11BE0, "\xF0\x90\x80\x80"},
    {0x11BE1, 0x11BE1, "\xF0\x90\x84\x80"}, {0x11BF0, 0x11BF9, "\xF0\x90\x92\xA0"},
    {0x11F00, 0x11F01, "\xF0\x90\x87\xBD"}, {0x11F02, 0x11F02, "\xF0\x90\x80\x80"},
    {0x11F03, 0x11F03, "\xF0\x91\x80\x80"}, {0x11F04, 0x11F10, "\xF0\x90\x80\x80"},
    {0x11F12, 0x11F33, "\xF0\x90\x80\x80"}, {0x11F34, 0x11F35, "\xF0\x91\x80\x80"},
    {0x11F36, 0x11F3A, "\xF0\x90\x87\xBD"}, {0x11F3E, 0x11F3F, "\xF0\x91\x80\x80"},
    {0x11F40, 0x11F40, "\xF0\x90\x87\xBD"}, {0x11F41, 0x11F41, "\xF0\x91\x80\x80"},
    {0x11F42, 0x11F42, "\xF0\x90\x87\xBD"}, {0x11F43, 0x11F4F, "\xF0\x90\x84\x80"},
    {0x11F50, 0x11F59, "\xF0\x90\x92\xA0"}, {0x11F5A, 0x11F5A, "\xF0\x90\x87\xBD"},
    {0x1342F, 0x1342F, "\xF0\x90\x80\x80"}, {0x13439, 0x1343F, "\xF0\x91\x82\xBD"},
    {0x13440, 0x13440, "\xF0\x90\x87\xBD"}, {0x13441, 0x13446, "\xF0\x90\x80\x80"},
    {0x13447, 0x13455, "\xF0\x90\x87\xBD"}, {0x13460, 0x143FA, "\xF0\x90\x80\x80"},
    {0x16100, 0x1611D, "\xF0\x90\x80\x80"}, {0x1611E, 0x16129, "\xF0\x90\x87\xBD"},
    {0x1612A, 0x1612C, "\xF0\x91\x80\x80"}, {0x1612D, 0x1612F, "\xF0\x90\x87\xBD"},
    {0x16130, 0x16139, "\xF0\x90\x92\xA0"}, {0x16D40, 0x16D42, "\xF0\x96\xBE\x93"},
    {0x16D43, 0x16D6A, "\xF0\x90\x80\x80"}, {0x16D6B, 0x16D6C, "\xF0\x96\xBE\x93"},
    {0x16D6D, 0x16D6F, "\xF0\x90\x84\x80"}, {0x16D70, 0x16D79, "\xF0\x90\x92\xA0"},
    {0x18CFF, 0x18CFF, "\xF0\x90\x80\x80"}, {0x1B132, 0x1B132, "\xF0\x90\x80\x80"},
    {0x1B155, 0x1B155, "\xF0\x90\x80\x80"}, {0x1CC00, 0x1CCEF, "\xF0\x9F\x98\x80"},
    {0x1CCF0, 0x1CCF9, "\xF0\x90\x92\xA0"}, {0x1CD00, 0x1CEB3, "\xF0\x9F\x98\x80"},
    {0x1D2C0, 0x1D2D3, "\xF0\x90\x84\x87"}, {0x1DF25, 0x1DF2A, "\xF0\x90\x90\xA8"},
    {0x1E030, 0x1E06D, "\xF0\x96\xBE\x93"}, {0x1E08F, 0x1E08F, "\xF0\x90\x87\xBD"},
    {0x1E4D0, 0x1E4EA, "\xF0\x90\x80\x80"}, {0x1E4EB, 0x1E4EB, "\xF0\x96\xBE\x93"},
    {0x1E4EC, 0x1E4EF, "\xF0\x90\x87\xBD"}, {0x1E4F0, 0x1E4F9, "\xF0\x90\x92\xA0"},
    {0x1E5D0, 0x1E5ED, "\xF0\x90\x80\x80"}, {0x1E5EE, 0x1E5EF, "\xF0\x90\x87\xBD"},
    {0x1E5F0, 0x1E5F0, "\xF0\x90\x80\x80"}, {0x1E5F1, 0x1E5FA, "\xF0\x90\x92\xA0"},
    {0x1E5FF, 0x1E5FF, "\xF0\x90\x84\x80"}, {0x1F6DC, 0x1F6DC, "\xF0\x9F\x98\x80"},
    {0x1F774, 0x1F776, "\xF0\x9F\x98\x80"}, {0x1F77B, 0x1F77F, "\xF0\x9F\x98\x80"},
    {0x1F7D9, 0x1F7D9, "\xF0\x9F\x98\x80"}, {0x1F8B2, 0x1F8BB, "\xF0\x9F\x98\x80"},
    {0x1F8C0, 0x1F8C1, "\xF0\x9F\x98\x80"}, {0x1FA75, 0x1FA77, "\xF0\x9F\x98\x80"},
    {0x1FA87, 0x1FA89, "\xF0\x9F\x98\x80"}, {0x1FA8F, 0x1FA8F, "\xF0\x9F\x98\x80"},
    {0x1FAAD, 0x1FAAF, "\xF0\x9F\x98\x80"}, {0x1FABB, 0x1FABF, "\xF0\x9F\x98\x80"},
    {0x1FAC6, 0x1FAC6, "\xF0\x9F\x98\x80"}, {0x1FACE, 0x1FACF, "\xF0\x9F\x98\x80"},
    {0x1FADA, 0x1FADC, "\xF0\x9F\x98\x80"}, {0x1FADF, 0x1FADF, "\xF0\x9F\x98\x80"},
    {0x1FAE8, 0x1FAE9, "\xF0\x9F\x98\x80"}, {0x1FAF7, 0x1FAF8, "\xF0\x9F\x98\x80"},
    {0x1FBCB, 0x1FBEF, "\xF0\x9F\x98\x80"}, {0x2B739, 0x2B739, "\xF0\xA0\x80\x80"},
    {0x2EBF0, 0x2EE5D, "\xF0\xA0\x80\x80"}, {0x31350, 0x323AF, "\xF0\xA0\x80\x80"},
};

}  // namespace tessera::io
