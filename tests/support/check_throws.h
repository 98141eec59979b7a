#pragma once

#include <doctest/doctest.h>

#include <string>

/// Checks that an expression throws exactly E, no subclass, with a message that contains `part`.
#define CHECK_THROWS_HOLDING(E, part, ...)                       \
  do {                                                           \
    std::string message_ = "(nothing thrown)";                   \
    try {                                                        \
      static_cast<void>(__VA_ARGS__);                            \
    } catch (const E& error_) {                                  \
      message_ = error_.what();                                  \
    } catch (const std::exception& error_) {                     \
      message_ = std::string("(another type) ") + error_.what(); \
    }                                                            \
    INFO("expected " #E " holding: ", std::string(part));        \
    INFO("found: ", message_);                                   \
    CHECK(message_.find(part) != std::string::npos);             \
  } while (false)
