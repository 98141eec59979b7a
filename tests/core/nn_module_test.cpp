#include <doctest/doctest.h>

#include "core/nn/layers.h"
#include "core/nn/module.h"
#include "core/nn/units.h"

using namespace tessera;

namespace {

struct Expert : nn::Module {
  nn::Linear map;
  Expert(nn::Module& parent, std::string_view name)
      : Module(parent, name), map(*this, "map", {2, 3}) {}
};

struct Block : nn::Module {
  nn::LayerNorm norm;
  nn::List<Expert> experts;
  Block(nn::Module& parent, std::string_view name)
      : Module(parent, name), norm(*this, "norm", 2), experts(*this, "experts", 2) {}
};

struct Decoder : nn::Module {
  nn::Embedding embed;
  nn::List<Block> layers;
  Parameter scale;
  Decoder(nn::Module& parent, std::string_view name)
      : Module(parent, name),
        embed(*this, "embed", 4, 2),
        layers(*this, "layers", 2),
        scale(*this, "scale", {1}, {}) {}
};

struct Net : nn::Module {
  Decoder decoder{*this, "decoder"};
  nn::Linear head{*this, "head", {.in = 2, .out = 4, .bias = false}};
  Parameter temperature{*this, "temperature", {}, {}};
};

std::string names(const std::vector<Parameter*>& parameters) {
  std::string text;
  for (const Parameter* p : parameters) text += p->name + " ";
  return text;
}

}  // namespace

TEST_CASE("parameters have the paths of their modules and the order of construction") {
  const Net net;
  CHECK(net.parameters().size() == 16);
  CHECK(names(net.decoder.layers[1].parameters()) ==
        "decoder.layers.1.norm.weight decoder.layers.1.norm.bias "
        "decoder.layers.1.experts.0.map.weight decoder.layers.1.experts.0.map.bias "
        "decoder.layers.1.experts.1.map.weight decoder.layers.1.experts.1.map.bias ");
  CHECK(net.parameters().front()->name == "decoder.embed.weight");
  CHECK(net.parameters().back()->name == "temperature");
  CHECK(net.head.weight.decay);
  CHECK_FALSE(net.decoder.layers[0].norm.weight->decay);
  CHECK(net.decoder.layers[0].is_block());
  CHECK_FALSE(net.decoder.layers[0].experts[0].is_block());
  CHECK_FALSE(net.decoder.embed.is_block());
}

TEST_CASE("units are the blocks, and each part outside of them") {
  const Net net;
  std::string text;
  for (const Unit& unit : units_of(net))
    text += fmt::format("{}: {}; ", unit.name, unit.parameters.size());
  CHECK(
      text ==
      "root: 1; decoder: 1; decoder.embed: 1; decoder.layers.0: 6; decoder.layers.1: 6; head: 1; ");
}

namespace {

std::string units_with(const std::string& policy) {
  const Net net;
  std::string text;
  for (const Unit& unit : units_of(net, nn::parse_unit_policy(policy)))
    text += fmt::format("{}: {}; ", unit.name, unit.parameters.size());
  return text;
}

}  // namespace

TEST_CASE("units of a least size are merged from neighbours") {
  // root 1, decoder 1, decoder.embed 8, blocks of 4 + 2 * 9, head 8 parameters
  CHECK(units_with("1") == units_with("block"));
  CHECK(units_with("10") ==
        "root..decoder.embed: 3; decoder.layers.0: 6; decoder.layers.1: 6; head: 1; ");
  CHECK(units_with("11") == "root..decoder.layers.0: 9; decoder.layers.1: 6; head: 1; ");
  CHECK(units_with("1B") == "root..head: 16; ");
}

TEST_CASE("modules that match a pattern are units of their own") {
  CHECK(units_with("decoder.layers.*.norm") ==
        "root: 1; decoder: 1; decoder.embed: 1; decoder.layers.0: 4; decoder.layers.0.norm: 2; "
        "decoder.layers.1: 4; decoder.layers.1.norm: 2; head: 1; ");
  CHECK(units_with("decoder,decoder.layers.1.experts.*") ==
        "root: 1; decoder: 10; decoder.layers.1.experts.0: 2; decoder.layers.1.experts.1: 2; "
        "head: 1; ");
  CHECK(units_with("decoder.layers.*") == units_with("block"));  // * stays within a name
  CHECK_THROWS_WITH_AS(
      units_with("head,layers.*"),
      "no module matches 'layers.*' of shard.units; there are decoder, decoder.embed, "
      "decoder.layers, decoder.layers.*, decoder.layers.*.norm, decoder.layers.*.experts, "
      "decoder.layers.*.experts.*, decoder.layers.*.experts.*.map, head",
      InvalidArgument);
}

TEST_CASE("texts of a unit policy are a size, or patterns") {
  CHECK(nn::parse_unit_policy("50M").least_parameters == 50'000'000);
  CHECK(nn::parse_unit_policy("3K").least_parameters == 3'000);
  CHECK(nn::parse_unit_policy("0.norm").patterns == std::vector<std::string>{"0.norm"});
  CHECK(nn::parse_unit_policy("a,h.*.mlp").patterns == std::vector<std::string>{"a", "h.*.mlp"});
  for (const char* text : {"", "0", "50MB", "99999999999999999999", "a,", ",a"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(nn::parse_unit_policy(text), InvalidArgument);
  }
}

TEST_CASE("settings belong to the whole tree") {
  Net net;
  net.decoder.layers[1].set_training(true);
  CHECK(net.training());
  net.set_recompute(nn::parse_recompute("block"));
  CHECK(net.decoder.embed.recompute() == nn::Recompute::Block);
  CHECK(net.decoder.layers[1].is_recomputed());
  CHECK_FALSE(net.decoder.layers[1].experts[0].is_recomputed());
  net.set_recompute(nn::parse_recompute("every 2"));
  CHECK(net.decoder.layers[0].is_recomputed());
  CHECK_FALSE(net.decoder.layers[1].is_recomputed());
  CHECK(nn::parse_recompute("cheap") == nn::Recompute::Cheap);
  CHECK(nn::parse_recompute("mlp") == nn::Recompute::Mlp);
  for (const char* text : {"all", "every", "every 0", "every 2x", "every -1"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(nn::parse_recompute(text), InvalidArgument);
  }
}

TEST_CASE("names are unique") {
  nn::Module root;
  nn::Module a(root, "a");
  CHECK_THROWS_WITH_AS(nn::Module(root, "a"), "module '' has two members named 'a'; rename one",
                       InvalidArgument);
  CHECK_THROWS_AS(nn::Module(root, "a.b"), InvalidArgument);
  Parameter weight(root, "weight", {2}, {});
  CHECK_THROWS_WITH_AS(Parameter(root, "weight", {2}, {}),
                       "the model has two parameters named 'weight'; rename one", InvalidArgument);
  CHECK_THROWS_WITH_AS(Parameter(a, "b.c", {2}, {}),
                       "the name of a parameter must not contain '.', got 'b.c' in 'a'",
                       InvalidArgument);
  CHECK_THROWS_AS(nn::Module(root, ""), InvalidArgument);
}
