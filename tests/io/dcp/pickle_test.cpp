#include "io/pickle/pickle.h"

#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "core/base/error.h"
#include "tests/io/dcp/bytes.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace tessera::test::pickled;

constexpr std::array kKnown = {PickleGlobal{"torch", "Size"}, PickleGlobal{"a", "B"}};

Pickle parse(const std::string& text, std::int64_t max_memory = 1 << 30) {
  return {text, kKnown, "x.pkl", max_memory};
}

TEST_CASE("values of a pickle") {
  const Pickle pickle = parse(program(
      tuple({"N", "\x88", "\x89", integer(-5), "K\x07", std::string("M\x01\x02", 3),
             "J" + bytes_of<std::int32_t>(-70000), std::string("G\x3f\xf8\0\0\0\0\0\0", 9),
             text("n\xc3\xa4me"), std::string("C\x03") + "abc", list({"K\x01", "K\x02"}),
             dict({{text("k"), "K\x03"}}), ")", call(global("torch", "Size"), {tuple({"K\x04"})}),
             object(global("a", "B"), {{"f", "K\x05"}}), text("id") + "Q",
             "\x8a" + std::string(1, '\0'), "\x8a\x01\xff"})));
  const auto items = pickle.root().items();
  REQUIRE(pickle.root().is(PickleKind::Tuple));
  REQUIRE(items.size() == 18);
  CHECK(items[0]->is(PickleKind::None));
  CHECK((items[1]->is(PickleKind::Bool) && items[1]->integer == 1));
  CHECK((items[2]->is(PickleKind::Bool) && items[2]->integer == 0));
  CHECK(items[3]->integer == -5);
  CHECK(items[4]->integer == 7);
  CHECK(items[5]->integer == 513);
  CHECK(items[6]->integer == -70000);
  CHECK(items[7]->is(PickleKind::Float));
  CHECK((items[8]->is(PickleKind::Str) && items[8]->text() == "n\xc3\xa4me"));
  CHECK((items[9]->is(PickleKind::Bytes) && items[9]->text() == "abc"));
  CHECK((items[10]->is(PickleKind::List) && items[10]->items()[1]->integer == 2));
  CHECK(items[11]->find("k")->integer == 3);
  CHECK(items[11]->find("absent") == nullptr);
  CHECK((items[12]->is(PickleKind::Tuple) && items[12]->items().empty()));
  CHECK(items[13]->is_object(kKnown[0]));
  CHECK(items[13]->args->items()[0]->items()[0]->integer == 4);
  CHECK(items[14]->is_object(kKnown[1]));
  CHECK(items[14]->state->find("f")->integer == 5);
  CHECK((items[15]->is(PickleKind::PersistentId) && items[15]->args->text() == "id"));
  CHECK(items[16]->integer == 0);
  CHECK(items[17]->integer == -1);
}

TEST_CASE("memoized values are shared") {
  const Pickle put =
      parse(program("]q\x05"
                    "0(h\x05h\x05t"));
  CHECK(put.root().items()[0] == put.root().items()[1]);
  // MEMOIZE numbers entries by those stored before.
  const Pickle memoized = parse(program(text("a") + "\x94" + text("b") +
                                        std::string("\x94"
                                                    "00(h\1h\0t",
                                                    9)));
  CHECK(memoized.root().items()[0]->text() == "b");
  CHECK(memoized.root().items()[1]->text() == "a");
}

TEST_CASE("only known globals may be named, by any opcode") {
  const std::pair<const char*, std::string> attacks[] = {
      {"os.system", call(global("os", "system"), {text("true")})},
      {"posix.system", text("posix") + text("system") + "\x93" + text("true") + "\x85R"},
      {"builtins.eval", call(global("builtins", "eval"), {text("1")})},
      {"builtins.getattr", list({"K\x01", global("builtins", "getattr")})},
      {"torch.load", global("torch", "load")},
      {"torch.Size.mro", global("torch", "Size.mro")},
      {"torch.Size.x.Size", global("torch.Size.x", "Size")},
      {"torch.size", global("torch", "size")},
      {"numpy.core.multiarray._reconstruct", global("numpy.core.multiarray", "_reconstruct")},
  };
  for (const auto& attack : attacks) {
    const auto& name = attack.first;
    const auto& body = attack.second;
    CAPTURE(name);
    CHECK_THROWS_HOLDING(Unsupported, std::string("refused ") + name + ",", parse(program(body)));
    CHECK_THROWS_HOLDING(Unsupported, "nothing was executed", parse(program(body)));
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "names a global by an integer",
                       parse(program("K\x01" + text("x") + "\x93")));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "names a global in 2003 bytes",
                       parse(program(global(std::string(2000, 'm'), "x.y"))));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "calls a string",
                       parse(program(text("os.system") + ")R")));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "calls with a string, expected a tuple",
                       parse(program(global("a", "B") + text("x") + "R")));
}

TEST_CASE("unknown globals may be inert: their calls and items become plain data") {
  const std::string body =
      tuple({call(global("os", "system"), {text("true")}),
             call(global("builtins", "getattr"), {text("x")}) + ")\x81",  // computed class
             global("collections", "deque") + ")R(K\x01K\x02" + "e",      // items
             "\x8a\x09" + std::string(9, '\x7f'), text("posix") + text("fork") + "\x93"});
  const Pickle pickle(program(body), kKnown, "x.pkl", 1 << 20, UnknownGlobals::Inert);
  const auto items = pickle.root().items();
  REQUIRE(items.size() == 5);
  CHECK(items[0]->is_object({"os", "system"}));
  CHECK(items[0]->args->items()[0]->text() == "true");
  CHECK(items[1]->is_object({"", ""}));
  CHECK((items[2]->is_object({"collections", "deque"}) && items[2]->items().size() == 2));
  CHECK((items[3]->is(PickleKind::Bytes) && items[3]->text().size() == 9));
  CHECK(*items[4]->global == PickleGlobal{"posix", "fork"});
}

TEST_CASE("opcodes that tensors do not need are refused by name") {
  const std::pair<const char*, std::string> refused[] = {
      {"INST", "(ios\nsystem\n"},
      {"OBJ", "(" + global("a", "B") + "o"},
      {"EXT1", "\x82\x01"},
      {"PERSID", "Pid\n"},
      {"INT", "I1\n"},
      {"LONG4", "\x8b"},
      {"DUP",
       "K\x01"
       "2"},
      {"NEWOBJ_EX", "\x92"},
      {"UNICODE", "Vx\n"},
      {"BYTEARRAY8", "\x96"},
      {"NEXT_BUFFER", "\x97"},
  };
  for (const auto& opcode : refused) {
    const auto& name = opcode.first;
    const auto& body = opcode.second;
    CHECK_THROWS_HOLDING(Unsupported, fmt::format("opcode {},", name), parse(program(body)));
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "0xff is not an opcode", parse(program("\xff")));
}

TEST_CASE("each kind of malformed pickle has its own error") {
  const std::pair<const char*, std::string> malformed[] = {
      {"does not begin with PROTO", ""},
      {"does not begin with PROTO", "{\"a\": 1}"},
      {"does not begin with PROTO", "(lp0\n."},
      {"protocol 1; 2 to 5", "\x80\x01N."},
      {"protocol 6; 2 to 5", "\x80\x06N."},
      {"needs 1 bytes, but 0 follow", "\x80\x04"},
      {"needs 1 bytes, but 0 follow", "\x80\x04N"},
      {"3 bytes follow STOP", program("N") + "abc"},
      {"STOP leaves 0 values", program("")},
      {"STOP leaves 2 values", program("NN")},
      {"1 marks", program("(")},
      {"needs 4294967295 bytes", program("X\xff\xff\xff\xff")},
      {"needs 18446744073709551615 bytes", program("\x8d\xff\xff\xff\xff\xff\xff\xff\xff")},
      {"needs 9223372036854775808 bytes", program("\x8e" + bytes_of(std::uint64_t{1} << 63))},
      {"an integer of 9 bytes", program("\x8a\x09" + std::string(9, '\1'))},
      {"a name has no end", program("ctorch")},
      {"pops 3 values, but the stack has 2", program("NN\x87")},
      {"pops a value from an empty stack", program("0")},
      {"pops 2 values, but the stack has 1", program("Na")},
      {"has no mark", program("t")},
      {"has no mark", program("1")},
      {"adds to a tuple, expected a list", program(")Na")},
      {"adds to a list, expected a dict", program("]NNs")},
      {"adds to a dict, expected a set", program("}(N\x90")},
      {"adds to None, expected an object", program("NNb")},
      {"sets an object's state twice", program(global("a", "B") + ")\x81Nb}b")},
      {"a key has no value", program("}(Nu")},
      {"memo 3 is empty", program("h\x03")},
      {"a frame of 100 bytes", program("\x95" + bytes_of<std::uint64_t>(100))},
  };
  for (const auto& program : malformed) {
    const auto& reason = program.first;
    const auto& text = program.second;
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, parse(text));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "x.pkl", parse(text));
  }
}

TEST_CASE("pickle bombs are harmless") {
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "memo index 4294967295 in a pickle of",
                       parse(program("Nr\xff\xff\xff\xff")));
  // 40 levels of lists with ten references each: 10^40 values if expanded.
  std::string laughs = "]q" + std::string(1, '\0');
  for (char level = 1; level <= 40; ++level) {
    laughs += "](";
    for (int i = 0; i < 10; ++i) laughs += std::string("h") + static_cast<char>(level - 1);
    laughs += std::string("eq") + level;
  }
  const Pickle pickle = parse(program("(" + laughs + "t"));
  CHECK(pickle.root().items().size() == 41);

  std::string tuples = "N", lists = "N";
  for (int i = 0; i < 100; ++i) {
    tuples += "\x85";
    lists = "]" + lists + "a";
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "nested deeper than 64 levels", parse(program(tuples)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "nested deeper than 64 levels", parse(program(lists)));
  // A list that contains itself is a valid value.
  CHECK(parse(program(std::string("]q\0h\0a", 6))).root().items().size() == 1);

  CHECK_THROWS_HOLDING(CorruptCheckpoint, "its values take more than 10000 bytes",
                       parse(program("(" + std::string(1000, ']') + "t"), 10000));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "more than 4194304 marks",
                       parse(program(std::string(5'000'000, '('))));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "more than 4194304 values on the stack",
                       parse(program(std::string(5'000'000, 'N'))));
}

/// Folds objects of a.B with an integer "n", and takes entries of dicts from one to another.
struct Folder final : PickleFolder {
  std::vector<std::pair<std::int64_t, std::int64_t>> taken;
  bool fold(const PickleValue& object, std::vector<std::int64_t>& numbers) override {
    if (*object.global != kKnown[1] || object.state == nullptr) return false;
    const PickleValue* const n = object.state->find("n");
    if (n == nullptr || !n->is(PickleKind::Int)) return false;
    numbers = {n->integer};
    return true;
  }
  bool take(const PickleValue& key, const PickleValue& value) override {
    taken.emplace_back(key.numbers()[0], value.numbers()[0]);
    return true;
  }
};

std::string folded(const std::string& n) { return object(global("a", "B"), {{"n", n}}); }
std::string memo(char opcode, char index) { return {opcode, index}; }

TEST_CASE("objects are folded, and entries of dicts taken, while a pickle is parsed") {
  Folder folder;
  const std::string body = program(
      tuple({folded(integer(1000)), object(global("a", "B"), {{"n", "N"}}),
             dict({{folded(integer(1)), folded(integer(2))}, {text("k"), folded(integer(3))}})}));
  const Pickle pickle(ByteRange(body, "x"), kKnown, "x", 1 << 20, UnknownGlobals::Inert, &folder);
  const auto items = pickle.root().items();
  REQUIRE(items.size() == 3);
  CHECK(items[0]->is_folded("B"));
  CHECK(items[0]->numbers()[0] == 1000);
  CHECK(items[1]->is_object(kKnown[1]));
  CHECK(items[1]->state->find("n")->is(PickleKind::None));
  REQUIRE(items[2]->items().size() == 2);
  CHECK(items[2]->find("k")->numbers()[0] == 3);
  CHECK(folder.taken == std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 2}});
}

TEST_CASE("values inside of folded and dropped objects stay alive while the memo needs them") {
  // Each value is memoized in the state of an object that is folded, or of an unknown class, and
  // fetched after others were parsed in its place.
  const std::pair<std::string, const char*> values[] = {
      {text("kept text") + memo('q', 7), "text"},
      {integer(70000) + memo('q', 7), "integer"},
      {"](" + integer(70000) + text("x") + "e" + memo('q', 7), "list"},
      {"]" + memo('q', 7) + "(" + integer(70000) + text("x") + "e", "list filled later"},
      {"]" + memo('q', 7) + integer(70000) + "a" + memo('h', 7) + text("x") + "a0",
       "list filled through the memo"},
      {integer(70000) + text("x") + "\x86" + memo('q', 7), "tuple"},
      {folded(integer(70000)) + memo('q', 7), "folded"},
      {global("a", "B") + ")\x81" + memo('q', 7) + dict({{text("n"), integer(70000)}}) + "b",
       "folded later"},
      {global("torch", "Size") + tuple({integer(70000)}) + "R" + memo('q', 7), "object"},
  };
  for (const auto& each : values) {
    const std::string& value = each.first;
    CAPTURE(each.second);
    for (const char* cls : {"B", "Unknown"}) {
      Folder folder;
      const std::string outer =
          object(global("a", cls), {{"x", value}, {"n", integer(5)}, {"y", text("later")}});
      std::string others;
      for (int i = 0; i < 100; ++i) others += text("something else in its place") + "0";
      const std::string body = program(tuple({outer, folded(integer(1)), others + memo('h', 7)}));
      const Pickle pickle(ByteRange(body, "x"), kKnown, "x", 1 << 20, UnknownGlobals::Inert,
                          &folder);
      const PickleValue& kept = *pickle.root().items()[2];
      if (kept.is(PickleKind::Str)) CHECK(kept.text() == "kept text");
      if (kept.is(PickleKind::Int)) CHECK(kept.integer == 70000);
      if (kept.is(PickleKind::Folded)) CHECK(kept.numbers()[0] == 70000);
      const PickleValue& holder = kept.is(PickleKind::Object) ? *kept.args : kept;
      if (!kept.is(PickleKind::Object) && !kept.is(PickleKind::List) && !kept.is(PickleKind::Tuple))
        continue;
      REQUIRE(holder.items().size() >= 1);
      CHECK(holder.items()[0]->integer == 70000);
      if (!kept.is(PickleKind::Object)) CHECK(holder.items()[1]->text() == "x");
    }
  }
}

TEST_CASE("many objects that are folded, taken or dropped take little memory") {
  std::string kept, taken, dropped;
  for (int i = 0; i < 50'000; ++i) {
    const std::string one = folded(integer(70000 + i));
    kept += one;
    taken += one + one;
    dropped += object(global("a", "Unknown"), {{"field", list({text("some text"), one})}});
    if (i % 1000 < 999) continue;
    kept += "e(";
    taken += "u(";
    dropped += "e(";
  }
  const auto parse_within = [&](std::int64_t bytes, const std::string& body) {
    Folder folder;
    return Pickle(ByteRange(program(body), "x"), kKnown, "x", bytes, UnknownGlobals::Inert,
                  &folder);
  };
  CHECK(parse_within(50'000 * 130, "](" + kept + "e").root().items().size() == 50'000);
  CHECK(parse_within(1 << 20, "}(" + taken + "u").root().items().empty());
  const std::string plans = call(global("a", "Plans"), {"](" + dropped + "e"});
  CHECK(parse_within(8 << 20, plans).root().args->items().empty());
}

}  // namespace
}  // namespace tessera::io
