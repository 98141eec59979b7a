#include "comm/control/rendezvous.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/socket.h"

namespace tessera::comm {
namespace {

std::string encode(const Hello& h) {
  Message message;
  message.type = 'H';
  message.fields = {std::to_string(h.rank),
                    std::to_string(h.world_size),
                    h.host,
                    std::to_string(h.pid),
                    h.run_id,
                    h.fingerprint,
                    h.device};
  return message.encode().substr(4);
}

Hello decode(std::string_view text) {
  Message message;
  const auto number = [&](std::size_t i, int& out) {
    const std::string& field = message.fields[i];
    const auto result = std::from_chars(field.data(), field.data() + field.size(), out);
    return result.ec == std::errc() && result.ptr == field.data() + field.size();
  };
  Hello h;
  const bool valid = Message::decode(text, message) && message.type == 'H' &&
                     message.fields.size() == 7 && number(0, h.rank) && number(1, h.world_size) &&
                     number(3, h.pid);
  if (!valid) {
    throw CommError(CommFailure::Mismatch, {},
                    "rendezvous: a rank introduced itself with a malformed message; do all ranks "
                    "run the same build?");
  }
  h.host = message.fields[2];
  h.run_id = message.fields[4];
  h.fingerprint = message.fields[5];
  h.device = message.fields[6];
  return h;
}

// The first line of `a` that differs from `b`.
std::string first_difference(std::string_view a, std::string_view b) {
  while (true) {
    const auto line_a = a.substr(0, a.find('\n'));
    const auto line_b = b.substr(0, b.find('\n'));
    if (line_a != line_b || line_a.size() == a.size()) return std::string(line_a);
    a.remove_prefix(line_a.size() + 1);
    b.remove_prefix(std::min(b.size(), line_b.size() + 1));
  }
}

// Throws if not all hellos agree in what `get` returns; the odd ones out by majority, ties to the
// lowest rank's side.
template <typename Get>
void compare(const std::vector<Hello>& hellos, std::string_view what, Get get) {
  std::map<std::string, int> votes;
  for (const Hello& h : hellos) ++votes[get(h)];
  if (votes.size() == 1) return;
  const Hello* reference = &hellos[0];
  for (const Hello& h : hellos) {
    if (votes[get(h)] > votes[get(*reference)]) reference = &h;
  }
  const std::string expected = get(*reference);
  std::vector<int> odd;
  for (const Hello& h : hellos) {
    if (get(h) != expected) odd.push_back(h.rank);
  }
  const Hello& first = hellos[static_cast<std::size_t>(odd.front())];
  throw CommError(CommFailure::Mismatch, odd,
                  "rendezvous: {} differ{} from the others in {}: rank {} ({}) has '{}', rank {} "
                  "({}) has '{}'; start all ranks with the same program and configuration",
                  rank_list(odd), odd.size() == 1 ? "s" : "", what, first.rank, first.process(),
                  first_difference(get(first), expected), reference->rank, reference->process(),
                  first_difference(expected, get(first)));
}

}  // namespace

Hello make_hello(int rank, int world_size, std::string run_id, std::string fingerprint,
                 std::string device) {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) name[0] = '?';
  Hello hello;
  hello.rank = rank;
  hello.world_size = world_size;
  hello.host = name;
  hello.pid = static_cast<int>(::getpid());
  hello.run_id = std::move(run_id);
  hello.fingerprint = std::move(fingerprint);
  hello.device = std::move(device);
  return hello;
}

std::vector<Hello> rendezvous(Store& store, const Hello& hello,
                              std::chrono::milliseconds deadline) {
  require(hello.world_size >= 1 && hello.rank >= 0 && hello.rank < hello.world_size,
          "rank {} is out of range for world size {}: ranks count from 0", hello.rank,
          hello.world_size);
  std::vector<Hello> hellos;
  AgreementOptions options;
  options.name = "rendezvous";
  options.verb = "arrived";
  // World sizes are compared as ranks come: with two of them in play, the wait for all never ends.
  options.check = [&](int rank, const std::string& value) {
    hellos.push_back(decode(value));
    const Hello& other = hellos.back();
    if (other.world_size == hello.world_size) return;
    throw CommError(CommFailure::Mismatch, {std::max(rank, hello.rank)},
                    "rendezvous: rank {} ({}) was started for a world size of {}, rank {} ({}) for "
                    "{}; start all ranks with the same one",
                    rank, other.process(), other.world_size, hello.rank, hello.process(),
                    hello.world_size);
  };
  agree(store, options, hello.rank, hello.world_size, encode(hello), deadline);
  compare(hellos, "run id", [](const Hello& h) { return h.run_id; });
  compare(hellos, "fingerprint", [](const Hello& h) { return h.fingerprint; });
  return hellos;
}

}  // namespace tessera::comm
