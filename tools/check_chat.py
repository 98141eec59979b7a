#!/usr/bin/env python3
"""Compares tokens and loss masks of conversations with Hugging Face's transformers.

  check_chat.py BUILD_DIR [TOKENIZER_DIR ...]

Each TOKENIZER_DIR is used with its own chat template. Without one: the small tokenizers of tests/io/tokenizer with the templates of
tests/io/chat. Renders random conversations with apply_chat_template and with `tessera data render --json`. The mask of a template with
{% generation %} is transformers' assistant mask. That of another template has the tokens that overlap what an assistant's turn adds to
the text before it with a generation prompt; conversations where that is no prefix of the whole are counted, not compared.

Needs Python with transformers. Exit code 1 if something differs.
"""
import json, os, pathlib, random, shutil, subprocess, sys, tempfile
from datetime import date

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from transformers import AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = ["the", "sum", " of", "\n", "  ", "gr\u00fc\u00dfe", "\U0001F600", "42", "a b", "\u6211\u559c\u6b22", "don't", "</s>", "x = [1]", "\t", "."]
DATE = {"date_string": "26 Jul 2024"}


def text(r):
    return r.choice(["", " "]) + "".join(r.choice(WORDS) + r.choice(["", " "]) for _ in range(r.randint(1, 12)))


def conversation(r):
    messages = [{"role": "system", "content": text(r)}] if r.random() < 0.3 else []
    for _ in range(r.randint(1, 4)):
        messages += [{"role": "user", "content": text(r)}, {"role": "assistant", "content": text(r)}]
    return messages


def expected(tokenizer, messages, marked):
    if marked:
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **DATE)
        return out["input_ids"], out["assistant_masks"]
    render = lambda m, prompt=False: tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=prompt, **DATE)
    whole = render(messages)
    ids = tokenizer.apply_chat_template(messages, return_dict=True, **DATE)["input_ids"]
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], True), render(messages[:i + 1])
        if not whole.startswith(before) or not whole.startswith(after):
            return ids, None
        for t, (first, last) in enumerate(offsets):
            if last > len(before) and first < len(after):
                mask[t] = 1
    return ids, mask


def main():
    program = pathlib.Path(sys.argv[1]) / "bin/tessera"
    sources = [(pathlib.Path(d), None) for d in sys.argv[2:]]
    templates = json.loads((ROOT / "tests/io/chat/fixtures/cases.json").read_text())["templates"]
    templates.pop("macros")
    if not sources:
        fixtures = ROOT / "tests/io/tokenizer/fixtures"
        sources = [(fixtures / f"{name}.json", t) for name in ("gpt2", "llama3", "qwen", "smollm", "llama2", "phi3", "mistral", "gemma")
                   for t in templates]
    compared = unmasked = failed = 0
    for source, template in sources:
        with tempfile.TemporaryDirectory() as directory:
            directory = pathlib.Path(directory)
            if template is None:
                shutil.copytree(source, directory, dirs_exist_ok=True)
            else:
                shutil.copy(source, directory / "tokenizer.json")
                names = [t["content"] for t in json.loads(source.read_text())["added_tokens"]]
                config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0], "eos_token": names[-1],
                          "clean_up_tokenization_spaces": False, "chat_template": templates[template]}
                (directory / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = AutoTokenizer.from_pretrained(directory)
            marked = "{% generation %}" in tokenizer.chat_template
            r = random.Random(f"{source}{template}")
            lines = [conversation(r) for _ in range(20)]
            (directory / "c.jsonl").write_text("".join(json.dumps({"messages": m, "chat_template_kwargs": DATE}) + "\n" for m in lines))
            ran = subprocess.run([program, "data", "render", directory / "c.jsonl", "--tokenizer", directory, "--json", "--row", "0",
                                  "--chat-date", date.today().isoformat()], capture_output=True, text=True)
            if ran.returncode != 0:
                print(source.name, template, ran.stderr)
                failed += 1
                continue
            for messages, line in zip(lines, ran.stdout.splitlines(), strict=True):
                ours = json.loads(line)
                ids, mask = expected(tokenizer, messages, marked)
                compared += 1
                unmasked += mask is None
                if ours["tokens"] != ids or (mask is not None and [int(b) for b in ours["has_loss"]] != mask):
                    failed += 1
                    what = "tokens" if ours["tokens"] != ids else "mask"
                    at = next(i for i, (a, b) in enumerate(zip(ours["tokens"] if what == "tokens" else ours["has_loss"], ids if what == "tokens" else mask)) if a != b)
                    print(f"{source.name} {template}: other {what} at {at} of {messages}")
    print(f"{compared} conversations compared, {unmasked} of them without masks, {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
