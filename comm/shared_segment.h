#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/control/socket.h"

namespace tessera::comm {

/// Memory shared by processes of one host: an anonymous file (memfd), which other processes open
/// through /proc. It is released when the last of them ends, however it ends, and is not limited by
/// the size of /dev/shm.
class SharedSegment {
 public:
  /// Allocates all pages now, zeroed: too little memory is an error here, not a signal later.
  /// @param bytes  rounded up to whole pages
  /// @throws IoError with the system's reason
  static SharedSegment create(std::size_t bytes);
  /// @param address  of a segment of another process, or of this one
  /// @throws IoError if it can't be reached from here, say from another container
  static SharedSegment open(const std::string& address);
  /// The same mapping with locks of its own: for ranks that are threads.
  /// @throws IoError
  SharedSegment open_again() const;

  /// Argument of open(), valid while this object lives.
  const std::string& address() const { return address_; }
  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

  /// Locks place `index` until let_go() or the end of the process.
  /// @throws IoError if it is taken, or the system has no such locks
  void hold(int index);
  void let_go(int index) const noexcept;
  /// Whether another object, of any process, has locked the place.
  bool is_held_elsewhere(int index) const noexcept;

 private:
  SharedSegment(FileDescriptor file, std::string address, std::size_t bytes,
                std::shared_ptr<std::byte> memory);
  FileDescriptor file_;
  std::string address_;
  std::size_t bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace tessera::comm
