#pragma once

#include <string>
#include <utility>

namespace tessera::io {

/// Path of the file and name of the tensor that an error concerns; empty if unknown.
struct ErrorPlace {
  std::string file, tensor;
};

/// An error E with its place, which callers find with a dynamic_cast to ErrorPlace.
template <typename E>
class Placed final : public E, public ErrorPlace {
 public:
  Placed(E error, ErrorPlace place) : E(std::move(error)), ErrorPlace(std::move(place)) {}
};

}  // namespace tessera::io
