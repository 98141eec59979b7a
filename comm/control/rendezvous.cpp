#include "comm/control/rendezvous.h"

#include <fmt/format.h>
#include <unistd.h>

#include "comm/control/agreement.h"
#include "comm/control/comparison.h"
#include "comm/control/socket.h"

namespace tessera::comm {
namespace {

// Fields that must be equal on all ranks, in the order in which messages list them.
RankText text_of(const Hello& h) {
  return {h.rank, h.process(),
          fmt::format("world size = {}\nrun id = {}\n{}", h.world_size, h.run_id, h.fingerprint)};
}

void compare(const std::vector<Hello>& hellos) {
  std::vector<RankText> texts;
  for (const Hello& h : hellos) texts.push_back(text_of(h));
  if (const auto error = find_differences(kRendezvous, texts)) throw CommError(*error);
}

}  // namespace

std::string started_key(int rank) { return fmt::format("started/{}", rank); }

std::string encode_hello(const Hello& h) {
  return Message{'H',
                 {std::to_string(h.rank), std::to_string(h.world_size), h.host,
                  std::to_string(h.pid), h.run_id, h.fingerprint, h.device}}
      .encode_body();
}

Hello decode_hello(std::string_view text) {
  Message message;
  Hello h;
  const bool valid = Message::decode(text, message) && message.type == 'H' &&
                     message.fields.size() == 7 && parse_number(message.fields[0], h.rank) &&
                     parse_number(message.fields[1], h.world_size) &&
                     parse_number(message.fields[3], h.pid);
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

Hello make_hello(int rank, int world_size, std::string run_id, std::string fingerprint,
                 std::string device) {
  return {rank,
          world_size,
          this_host(),
          static_cast<int>(::getpid()),
          std::move(run_id),
          std::move(fingerprint),
          std::move(device)};
}

std::vector<Hello> rendezvous(Store& store, const Hello& hello,
                              std::chrono::milliseconds deadline) {
  require(hello.world_size >= 1 && hello.rank >= 0 && hello.rank < hello.world_size,
          "rank {} is out of range for world size {}: ranks count from 0", hello.rank,
          hello.world_size);
  std::vector<Hello> hellos;
  AgreementOptions options;
  options.name = kRendezvous;
  options.verb = "arrived";
  options.describe_missing = [&](int rank) -> std::string {
    const std::string key = started_key(rank);
    return store.has(key) ? "the launcher started it as " + store.get(key, std::chrono::seconds(5))
                          : "";
  };
  options.describe = [](const std::string& value) { return decode_hello(value).process(); };
  // Compare world sizes on arrival, because the wait for all ranks never ends if they differ.
  options.check = [&](int rank, const std::string& value) {
    hellos.push_back(decode_hello(value));
    if (hellos.back().world_size == hello.world_size) return;
    std::vector<Hello> met = hellos;
    if (rank < hello.rank) met.push_back(hello);
    compare(met);
  };
  agree(store, options, hello.rank, hello.world_size, encode_hello(hello), deadline);
  compare(hellos);
  return hellos;
}

}  // namespace tessera::comm
