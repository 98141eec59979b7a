#!/usr/bin/env python3
"""Writes fixtures/: small tokenizers in the configurations of published models, and what the reference
libraries make of nasty texts with them. Run by hand; needs tokenizers, tiktoken, sentencepiece, mistral-common."""
import base64
import json
import pathlib
import tempfile

import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = pathlib.Path(__file__).parent / "fixtures"

TEXTS = [
    "", " ", "a", "Hello world", " Hello  world ", "don't you'll WE'VE I'm she'd 'S 'ſ", "12345 1.5e-3 ٣٤٥ ½²",
    "def f(x):\n    return x[0] + 1  # ok\n\n\tif x:\r\n\t\tpass\r\n", "line\n\n\nline   \n  \n x", "\r\n\r\n \r\n",
    "我喜欢学习。今天天气很好!日本語テキスト", "مرحبا بالعالم، كيف حالك؟", "नमस्ते दुनिया ภาษาไทย 한국어 텍스트",
    "e\u0301 é Å \u212b ﬁ ① ｆｕｌｌ q\u0323\u0307 q\u0307\u0323 \u1e9b\u0323", "👩‍👩‍👧‍👦 🏳️‍🌈 🫨🩷 👍🏽", "a\u00a0b\u3000c\u2028d\u0085e\u180ef\u200bg",
    " " * 40 + "x" + "\t" * 9 + "y" + "=" * 90 + "aaaaaaaaaaaaa" * 9, "<|endoftext|>", "a<|endoftext|> b <s>c</s><unk>",
    " <|user|>  hi<|end|>\n\nthere <|user|>", "wordTOKword TOK word_TOK TOK.", "▁ ▁▁ a▁b", "<0x41> <0xE4>", "\x00\x01\x1a\x7f",
    "İstanbul ǅ ẞ ß Σς", "K\u212a ſtraße 'ſ'K", "snake_case __init__ a\u0300\u0301b ‿x", "\ufeffBOM \ufffd \ufffe",
    "The quick brown fox jumps over the lazy dog. " * 6, "if (a<b && c>d) { x->y = \"str\\n\"; } // /* */ <html></html>",
    "\U0001ccf0\U000105c0\U00031350\U0002ebf0 new \u1c89\ua7cb\U0001fae8",
]
BROKEN = [b"\xff", b"ab\xffcd \xc3", b"\xe4\xbd ok \xf0\x9f\x98", b"\xed\xa0\x80 \xc0\xaf \xf5\x80\x80", b"x\x80\x80\xe0\xa0 y", b"<s>\xf0\x9f a"]
CORPUS = [t for t in TEXTS if "=====" not in t] * 3
ABC = pre_tokenizers.ByteLevel.alphabet()
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
SPECIAL = ["<unk>", "<s>", "</s>"]


def level(pre, special=("<|endoftext|>",), norm=None, merges=90, **model):
    t = Tokenizer(models.BPE(**model))
    t.pre_tokenizer = pre
    if norm:
        t.normalizer = norm
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=256 + len(special) + merges, special_tokens=list(special),
                                                      initial_alphabet=ABC, show_progress=False))
    return t


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


def bytes_only():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def pieces(pre=None, norm=None, decode=None, fallback=True, fuse=True, special=SPECIAL, merges=80):
    """A vocabulary of characters, as converters of SentencePiece models make them."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse))
    t.pre_tokenizer = pre or pre_tokenizers.Metaspace()
    if norm:
        t.normalizer = norm
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if fallback else []
    ascii_corpus = [c for c in CORPUS if c.isascii()] + ["我喜欢"] * 4
    t.train_from_iterator(ascii_corpus, trainers.BpeTrainer(vocab_size=200 + merges + len(byte_tokens), limit_alphabet=70,
                                                            special_tokens=special + byte_tokens, show_progress=False))
    j = json.loads(t.to_str())
    j["model"]["byte_fallback"] = fallback
    j["added_tokens"] = j["added_tokens"][:len(special)]
    if pre is None:
        j["pre_tokenizer"] = None
    t = Tokenizer.from_str(json.dumps(j))
    if decode:
        t.decoder = decode
    return t


def llama_decoder(strip=True):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if strip else steps)


def hugging_face():
    bl = lambda **k: pre_tokenizers.ByteLevel(add_prefix_space=k.get("space", False), use_regex=True)
    split = lambda p, b="isolated", i=False: pre_tokenizers.Split(Regex(p), b, i)
    out = {"gpt2": level(bl()), "prefix_space": level(bl(space=True))}
    t = level(sequence(split(LLAMA3), bytes_only()), ["<|begin_of_text|>", "<|endoftext|>"], ignore_merges=True)
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|endoftext|>", special_tokens=[("<|begin_of_text|>", 0), ("<|endoftext|>", 1)])])
    out["llama3"] = t
    out["qwen"] = level(sequence(split(LLAMA3.replace("{1,3}", "")), bytes_only()), norm=normalizers.NFC())
    t = level(sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), bytes_only()))
    t.add_tokens([AddedToken("TOK", single_word=True), AddedToken("word", normalized=True)])
    out["deepseek"] = t
    t = level(sequence(split(LLAMA3, "removed", True), bytes_only()))
    t.add_tokens(["  ", "    ", "\t\t", "==="])
    out["olmo2"] = t
    out["smollm"] = level(sequence(pre_tokenizers.Digits(individual_digits=True), bl()))
    for behavior in ("merged_with_previous", "merged_with_next", "contiguous", "removed"):
        out[behavior] = level(sequence(split(r"[\s.]", behavior), pre_tokenizers.Split("a", behavior), pre_tokenizers.Digits(),
                                       pre_tokenizers.Punctuation(behavior), bytes_only()), merges=30)
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t = pieces(norm=prepend, decode=llama_decoder())
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    out["llama2"] = t
    t = pieces(norm=prepend, decode=llama_decoder())
    t.add_special_tokens([AddedToken("<|user|>", rstrip=True), AddedToken("<|end|>", lstrip=True), AddedToken("TOK", single_word=True)])
    out["phi3"] = t
    out["mistral"] = pieces(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), decode=llama_decoder())
    out["metaspace"] = pieces(pre_tokenizers.Metaspace(), decode=decoders.Metaspace(), fallback=False)
    out["no_fuse"] = pieces(sequence(pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()), fallback=False, fuse=False,
                            norm=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(),
                                                       normalizers.Replace(Regex(r"\s+"), " ")]))
    out["nfd"] = pieces(pre_tokenizers.WhitespaceSplit(), norm=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]))
    t = pieces(pre_tokenizers.Split(" ", "merged_with_previous"), norm=normalizers.Replace(" ", "▁"), decode=llama_decoder(False))
    t.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁", normalized=False)])
    out["gemma"] = t
    return out


def train_sentencepiece(kind, **options):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        f.write("\n".join(c.replace("\0", "") for c in CORPUS))
        f.flush()
        name = OUT / f"sentencepiece_{kind}"
        sentencepiece.SentencePieceTrainer.train(input=f.name, model_prefix=str(name), minloglevel=2, **options)
    name.with_suffix(".vocab").unlink()
    return name.with_suffix(".model")


def add(expected, name, encode, decode, prefix=(), broken=True):
    ids = [list(encode(t)) for t in TEXTS]
    expected[name] = {"ids": ids, "text": [decode(i) for i in ids], "prefix": list(prefix)}
    if broken:
        expected[name]["broken"] = [list(encode(t.decode(errors="replace"))) for t in BROKEN]


def main():
    OUT.mkdir(exist_ok=True)
    expected = {}
    for name, t in hugging_face().items():
        (OUT / f"{name}.json").write_text(json.dumps(json.loads(t.to_str()), ensure_ascii=False, separators=(",", ":")))
        t = Tokenizer.from_file(str(OUT / f"{name}.json"))
        ids = t.encode("a", add_special_tokens=True).ids
        plain = t.encode("a", add_special_tokens=False).ids
        at = next(i for i in range(len(ids)) if ids[i:i + len(plain)] == plain) if plain else 0
        add(expected, name, lambda s: t.encode(s, add_special_tokens=False).ids,
            lambda i: t.decode(i, skip_special_tokens=False), ids[:at], not isinstance(t.decoder, decoders.ByteLevel))
    # The older pair of files, of the first vocabulary.
    gpt2 = json.loads((OUT / "gpt2.json").read_text())
    (OUT / "pair").mkdir(exist_ok=True)
    (OUT / "pair/vocab.json").write_text(json.dumps(gpt2["model"]["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in gpt2["model"]["merges"]]
    (OUT / "pair/merges.txt").write_text("\n".join(["#version: 0.2"] + merges) + "\n", encoding="utf-8")
    # Ranks: bytes, then merges.
    chars = {c: b for b, c in bytes_to_unicode().items()}
    tokens = [bytes([b]) for b in range(256)] + [bytes(chars[c] for c in m.replace(" ", "")) for m in merges]
    tokens = list(dict.fromkeys(tokens))
    ranks = {t: i for i, t in enumerate(tokens)}
    (OUT / "cl100k_base.tiktoken").write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items()))
    pattern = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    enc = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 100257})
    add(expected, "cl100k_base.tiktoken", lambda s: enc.encode(s, allowed_special="all"), enc.decode, broken=False)
    tekken = {"config": {"pattern": LLAMA3, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 10,
                         "default_num_special_tokens": 20, "version": "v3"},
              "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, i in ranks.items()]}
    (OUT / "tekken.json").write_text(json.dumps(tekken, separators=(",", ":")))
    tek = Tekkenizer.from_file(OUT / "tekken.json")
    add(expected, "tekken.json", lambda s: tek.encode(s, bos=False, eos=False), tek.decode, [1], broken=False)
    common = {"vocab_size": 480, "character_coverage": 0.98, "byte_fallback": True, "normalization_rule_name": "identity"}
    for kind, options in {
            "llama": {"model_type": "bpe", "remove_extra_whitespaces": False, "split_digits": True,
                      "user_defined_symbols": ["<|user|>", "▁▁", "TOK"], **common},
            "gemma": {"model_type": "bpe", "remove_extra_whitespaces": False, "add_dummy_prefix": False, "control_symbols": ["<end>"], **common},
            "collapse": {"model_type": "bpe", **common},
            "unigram": {"model_type": "unigram", **common, "vocab_size": 440},
            "unknown": {"model_type": "bpe", **common, "byte_fallback": False, "remove_extra_whitespaces": False, "vocab_size": 230}}.items():
        model = train_sentencepiece(kind, **options)
        s = sentencepiece.SentencePieceProcessor(model_file=str(model))
        add(expected, model.name, s.encode, s.decode, [s.bos_id()], broken=False)
    everything = {"texts": TEXTS, "broken": [base64.b64encode(b).decode() for b in BROKEN], "expected": expected}
    (OUT / "expected.json").write_text(json.dumps(everything, ensure_ascii=True, separators=(",", ":")) + "\n")


def bytes_to_unicode():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


if __name__ == "__main__":
    main()
