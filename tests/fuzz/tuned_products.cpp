// A file of tuned products.
#include "train/tuned_products.h"

#include <string>

#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(tuned_products, "tuned_products") {
  fuzz::try_parse([&] {
    const TunedProducts products =
        train::parse_tuned_products(std::string(fuzz::text_of(data, size)), "tuned_products.json");
    // Accepted entries survive format and parse.
    const std::string text = train::format_tuned_products(products);
    fuzz::expect(train::parse_tuned_products(text, "again") == products);
  });
  return 0;
}
