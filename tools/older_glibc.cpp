// std::random_device of the C++ library calls arc4random, which glibc has only from 2.36 on. With this one
// in the program, older systems run it.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>

extern "C" std::uint32_t arc4random() noexcept {
  std::uint32_t value = 0;
  if (::getentropy(&value, sizeof(value)) != 0) std::abort();
  return value;
}
