// The functions of fmt, in the program and the module, as Debian has no archive of it: compiles fmt's header of
// definitions, and the templates that its library holds for other files. Systems with fmt 11 or later link their library.

#include <fmt/format.h>

#if FMT_VERSION < 110000
#include <fmt/format-inl.h>

#include <locale>

namespace fmt::detail {

template locale_ref::locale_ref(const std::locale&);
template std::locale locale_ref::get<std::locale>() const;
template thousands_sep_result<char> thousands_sep_impl<char>(locale_ref);
template char decimal_point_impl<char>(locale_ref);
template dragonbox::decimal_fp<float> dragonbox::to_decimal<float>(float) noexcept;
template dragonbox::decimal_fp<double> dragonbox::to_decimal<double>(double) noexcept;
template void buffer<char>::append(const char*, const char*);
template void vformat_to<char>(buffer<char>&, basic_string_view<char>,
                               basic_format_args<buffer_context<char>>, locale_ref);

}  // namespace fmt::detail
#endif
