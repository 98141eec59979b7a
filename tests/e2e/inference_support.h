#pragma once

#include "tests/e2e/small_run.h"

namespace tessera::test {

/// A trained model with a vocabulary of characters and a chat template, made once per program.
struct SmallModel : Fixture {
  SmallModel() {
    dir.write("text.txt", make_text() + "Question: Answer:\n");
    run_to(0, joined(small_run(text, dir.file("run"), 1, 60),
                     {"--data.tokenizer=chars", "--model.seq_len=48"}));
    dir.write("chat.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}");
  }
  std::string run = dir.file("run"), chat_template = dir.file("chat.jinja");

  static const SmallModel& get() {
    static const SmallModel model;
    return model;
  }
};

}  // namespace tessera::test
