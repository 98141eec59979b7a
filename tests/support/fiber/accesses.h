#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/support/fiber/fiber.h"

// Races: two threads access a byte, one of them writes, and no barrier orders them. Blocks of a
// grid are never ordered.
namespace tessera::fiber {

/// Time counts grids, blocks and barriers, from 1.
struct Access {
  std::uint32_t time = 0;
  std::uint32_t thread = 0;  ///< within the grid
};

/// The running thread, and the events that order earlier accesses before it.
struct Now {
  std::uint32_t time = 0;
  std::uint32_t thread = 0, first_thread = 0;         ///< within the grid; of the block
  std::uint32_t grid = 0, block = 0;                  ///< times of their starts
  std::uint32_t block_barrier = 0, warp_barrier = 0;  ///< times of the latest
};

struct Conflict {
  enum Kind { Unwritten, Written, Read } kind;
  std::size_t byte;
  Access before;
};

/// The last accesses to consecutive bytes.
class Accesses {
 public:
  enum Memory { Global, Shared };

  void resize(std::size_t bytes) {
    if (groups_.size() < bytes / kGroup + 1) groups_.resize(bytes / kGroup + 1);
  }

  /// Notes an access to bytes [first, first + bytes). @return its first conflict
  template <Memory memory>
  std::optional<Conflict> add(std::size_t first, std::size_t bytes, bool write, const Now& now) {
    for (const std::size_t end = first + bytes; first < end;) {
      Group& group = groups_[first / kGroup];
      const std::size_t at = first % kGroup, here = std::min(end - first, kGroup - at);
      const std::size_t unit = std::size_t{1} << std::countr_zero(at | here | kGroup);
      if (group.latest < now.grid) {
        group.unit = static_cast<std::uint32_t>(unit);
      } else if (unit < group.unit) {
        const std::size_t parts = group.unit / unit;
        for (std::size_t i = kGroup / unit; i-- > 0;) group.units[i] = group.units[i / parts];
        group.unit = static_cast<std::uint32_t>(unit);
      }
      group.latest = now.time;
      for (std::size_t i = at / group.unit; i < (at + here) / group.unit; ++i) {
        if (auto conflict = touch<memory>(group.units[i], write, now)) {
          conflict->byte = first - at + i * group.unit;
          return conflict;
        }
      }
      first += here;
    }
    return std::nullopt;
  }

 private:
  static constexpr std::size_t kGroup = 16;

  struct Touched {
    Access write, read;
    Access other_read;  // of the reads before `read`, the one most distant from it
  };
  struct Group {
    std::uint32_t latest = 0;  // time of the latest access
    std::uint32_t unit = 1;    // bytes: the largest that all accesses of the grid were multiples of
    std::array<Touched, kGroup> units;
  };

  enum Distance { Ordered, InWarp, InBlock, InGrid };
  template <Memory memory>
  static Distance distance(const Access& before, const Now& now) {
    if (before.time < (memory == Shared ? now.block : now.grid)) return Ordered;
    if (memory == Global && before.time < now.block) return InGrid;
    if (before.thread == now.thread || before.time < now.block_barrier) return Ordered;
    const auto warp = [&](std::uint32_t thread) {
      return (thread - now.first_thread) / unsigned{kWarp};
    };
    if (warp(before.thread) != warp(now.thread)) return InBlock;
    return before.time < now.warp_barrier ? Ordered : InWarp;
  }

  template <Memory memory>
  static std::optional<Conflict> touch(Touched& touched, bool write, const Now& now) {
    if (memory == Shared && !write && touched.write.time < now.block)
      return Conflict{Conflict::Unwritten, 0, {}};
    if (distance<memory>(touched.write, now) != Ordered)
      return Conflict{Conflict::Written, 0, touched.write};
    if (write) {
      for (const Access& read : {touched.read, touched.other_read}) {
        if (distance<memory>(read, now) != Ordered) return Conflict{Conflict::Read, 0, read};
      }
      touched.write = {now.time, now.thread};
      return std::nullopt;
    }
    // A write that conflicts with any read conflicts with one of these two.
    if (distance<memory>(touched.read, now) >= distance<memory>(touched.other_read, now))
      touched.other_read = touched.read;
    touched.read = {now.time, now.thread};
    return std::nullopt;
  }

  std::vector<Group> groups_;
};

/// The last accesses to each byte of the address space.
class GlobalAccesses {
 public:
  std::size_t pages() const { return pages_.size(); }

  std::optional<Conflict> add(std::uintptr_t first, std::size_t bytes, bool write, const Now& now) {
    for (const std::uintptr_t end = first + bytes; first < end;) {
      const std::size_t at = first % kPageBytes, here = std::min(end - first, kPageBytes - at);
      if (auto conflict = page(first / kPageBytes).add<Accesses::Global>(at, here, write, now)) {
        conflict->byte += first - at;
        return conflict;
      }
      first += here;
    }
    return std::nullopt;
  }

 private:
  static constexpr std::size_t kPageBytes = 4096;

  Accesses& page(std::uintptr_t number) {
    auto& [latest, accesses] = latest_[number % latest_.size()];
    if (accesses == nullptr || latest != number) {
      latest = number;
      accesses = &pages_[number];
      accesses->resize(kPageBytes);
    }
    return *accesses;
  }

  std::unordered_map<std::uintptr_t, Accesses> pages_;
  std::array<std::pair<std::uintptr_t, Accesses*>, 64> latest_{};
};

}  // namespace tessera::fiber
