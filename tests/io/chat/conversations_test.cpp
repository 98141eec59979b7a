#include "io/chat/conversations.h"

#include <doctest/doctest.h>
TEST_CASE("x") {}
