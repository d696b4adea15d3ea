#!/usr/bin/env python3
"""Make the tokenizer goldens under tests/data/tokenizers.

Needs:  pip install tokenizers sentencepiece

Reads sentences.txt there (training text) and, where the folder given by --shared
has them, real tokenizer files. Writes:

  strings.txt                    the texts; a byte 0x1e ends each one (also the last)
  llama3-kind/tokenizer.json     byte-level BPE of the Llama 3 kind
  spm-bpe/tokenizer.model        SentencePiece BPE with byte fallback
  NAME.MODE.ids                  one line per text: its ids in decimal with a space
                                 between; an empty line for no ids
  NAME.MODE.decoded              decode(those ids, skip_special_tokens=False);
                                 a byte 0x1e ends each one
  NAME.each.hex                  decode([id]) for every id from 0 on, one line each, its
                                 UTF-8 bytes in hexadecimal (0x1e is one of the tokens);
                                 only for the two tokenizers that are made here
  NAME.random.ids, .random.hex   random lists of ids (many make no valid UTF-8) and what
                                 they decode to, in the two formats above

NAME         made from
gpt2         SHARED/data/gpt2/tokenizer.json
llama2       SHARED/data/tokenizers/llama2/tokenizer.json
phi3         SHARED/data/tokenizers/phi-3/tokenizer.json
phi2, roberta, t5 (bos)   SHARED/data/tokenizers/phi-2, roberta-base, t5-small
qwen2 (bos)  SHARED/data/tokenizers/qwen2: vocab.json, merges.txt, tokenizer_config.json
mistral1, mistral3 (plain, ids only)   SHARED/data/tokenizers/mistral
llama2-spm   SHARED/data/tokenizers/llama2/tokenizer.model
llama3-kind  llama3-kind/tokenizer.json
spm-bpe      spm-bpe/tokenizer.model

MODE "special" finds special tokens in the text (the default of the library),
"plain" treats them as text (encode_special_tokens = True), both without the ids
that the post-processor adds; "bos" is "special" with them. SentencePiece knows
only "plain". Truncation and padding that a tokenizer.json asks for are turned off.
"""
import argparse
import io
import json
import os
import random
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "tokenizers"
END = b"\x1e"

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]


# --- texts

WHITE = "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
# Look like white space, or are white space to some libraries, but are not in \s.
NOT_WHITE = "\u001c\u001d\u001f\u180e\u200b\u200c\u200d\u2060\ufeff\u00ad\ufffd\u0000\u007f"


def white_texts():
    each = [f"a{c}b{c}{c}c {c}d{c} e{c}" for c in WHITE + NOT_WHITE]
    return each + [
        "", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "a ", " a", "  a", "   a", "a   b", "a    b ",
        "\ta", "\t\ta", " \ta", "\t a", "a\t b", "a \tb", "\r\n\r\nx", "x \n\n y", "x\r\ny\rz\n", "x\n \n \ny", "a\n",
        "a \n", "a\n ", "a\n\n\nb", "a \n \n b", "\n\n\n", " \r\n ", "x  \r\n  y", "\u00a0a", " \u00a0a", "\u00a0 a",
        "\u00a0\u00a0", "a\u00a0\u00a0b", "a \u3000b", "\u3000a", "\u2003\u2003a", "a\u0085 b", "\n\u00a0\n",
        "a\u2028b\u2029c", "!\n\n\na", "... \n\nb", "x!\r\n\r\n y", " \n\t \n\ta", "    if x:\n        return y\n",
        "a" + " " * 17 + "b", " " * 40, "\n" * 9, "\t" * 5 + "x", " \t" * 6 + "z", "word " * 5, " ".join("abc"),
        "\x00", "a\x00b", "\x01\x02\x7f",
    ]


def contraction_texts():
    endings = ["s", "t", "re", "ve", "m", "ll", "d"]
    texts = ["he'" + e for e in endings] + ["HE'" + e.upper() for e in endings]
    texts += [f"x '{e} y" for e in endings] + [f"x '{e.title()}y" for e in endings]
    return texts + [
        "don\u2019t", "we\u2019ll they\u2019re", "'", "''", "'s", " 's", "'S", "'sa", "'lla", "'l", "'r", "'v", "'rE",
        "'Ve", "y'all'd've", "rock 'n' roll", "'tis", "o'clock", "l'\u00e9cole", "it's 's''s", "5's", "5'S", "!'s",
        "'\u017f", "'\u017ft", "can't\n'll", "'\u02bcs", "it`s", "it\u02bcs", "''''s", "'d'd'D'd",
    ]


def letter_texts():
    return [
        "Hello, world!", "HELLO world", "hElLo", "caf\u00e9", "cafe\u0301", "e\u0301te\u0301", "\u0301", " \u0301a",
        "a\u0301\u0302\u0303b", "na\u00efve", "\u01c5\u01f2", "\u00df\u1e9e\u0130\u0131", "\u02b0\u02b1",
        "\u2160\u2161", "\u216b\u217b", "\u24b6\u24d0", "\U0001d400\U0001d7d8", "\ufb01\ufb02",
        "\u0915\u094d\u0937\u093f", "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
        "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0e04\u0e23\u0e31\u0e1a",
        "\u1019\u103c\u1014\u103a\u1019\u102c", "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
        "\u4eca\u65e5\u306f\u5929\u6c17\u304c\u3044\u3044\u3067\u3059\u306d", "\u30ab\u30bf\u30ab\u30ca\uff76\uff80",
        "\u3042\u3099", "\u3005\u3006\u3007", "\u9fff\u3400\U00020000\U0002a6d6\U00030000",
        "\uc548\ub155 \uc138\uc0c1", "\u1112\u1161\u11ab", "\u1100\u1161\uac00", "\u3131\u314f",
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
        "\u0645\u064f\u062d\u064e\u0645\u064e\u0651\u062f", "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
        "\u05e9\u05dc\u05d5\u05dd abc \u05e2\u05d5\u05dc\u05dd", "\u202eabc\u202c", "\u200fa\u200e",
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!", "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
        "\u10d2\u10d0\u1c92", "\u0531\u0561\u0587", "\u13a0\uab70", "\u1e9b\u0323", "\ua9b4\u19b0", "\u0f40\u0fb5",
        "\U00010330\U00010380", "\U00016a00", "\U000e0041\U000e0100a", "\u0378\u0379", "\u2fe0", "\ue000\uf8ff",
        "\U000f0000\U000ffffd", "\U00100000\U0010fffd", "\U0010ffff", "\ufffe\uffff", "\ufdd0", "\U0001fffe",
        "a\ufe0fb", "\u0e33",
    ]


def number_texts():
    return [
        "0", "12", "123", "1234", "12345678901", " 1", "  12", "1 2 3", "3.14159", "1,000,000", "1e-10", "0xFF",
        "a1b2c3", "v2.0.1", "\u00bd", "x\u00bdy", "\u2460\u2461\u2462", "\u00b2\u00b3\u00b9", "10\u00b2",
        "\u0663\u0664\u0665\u0666", "\u0967\u0968\u0969\u096a", "\uff11\uff12\uff13\uff14", "\u3007\u4e00\u4e8c",
        "\u2155\u215b", "\U0001d7ce\U0001d7cf\U0001d7d0\U0001d7d1", "\u0d66\u09f4", "1st 2nd 3rd",
        "2024-01-31T23:59:59Z", "+1 (555) 010-9999", "50%", "$5.00", "\u20ac99", "\u00a3\u00a5", "-5", "7\u20e3",
        "\u3220\u3280", "\u2488\u2474", "12\u00bd34",
    ]


def symbol_texts():
    return [
        "!", "!!", "?!", "...", "\u2026", "--", "\u2014", " -", "- ", "a-b", "a - b", "@#$%^&*()", " @#$", "(a)",
        "[x]{y}", "<tag attr=\"v\">", "\u201cquoted\u201d", "\u00abguillemets\u00bb", "\u3010\u3011", "\u2022 item",
        "\u2192\u21d2", "\u2200x\u2208A", "\u221a2\u2248\u03c0", "\u00a9\u00ae\u2122", "\u00b0C", "_a_", "__init__",
        "a_b", "~/x", "\\n", "\\", "\\\\", "|", "||", "^", "`", "```c\nint x;\n```", "\u25a0\u25a1", "\u2581",
        "\u2581a", " \u2581 a", "\u2581\u2581\u2581", "a\u2581b", "\u0120a", "\u010a", "\u00c4\u0120",
        "\u0100\u0101\u0142\u0143", "\u02c9",
    ]


def emoji_texts():
    return [
        "\U0001f600", " \U0001f600", "\U0001f600\U0001f601", "hi\U0001f600there",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\u2764",
        "\U0001f1e9\U0001f1ea", "\U0001f3f4\U000e0067\U000e0062\U000e007f", "1\ufe0f\u20e3",
        "\U0001f9d1\u200d\U0001f4bb", "\U0001fae0\U0001fae8", "\U0001f0a1", "\u2603",
    ]


def code_texts():
    return [
        "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i] * 2.0f;\n}\n", "def f(x):\n    return {'k': [x, x**2]}\n",
        "#include <stdio.h>\r\nint main(void)\r\n{\r\n  return 0;\r\n}\r\n", "SELECT * FROM t WHERE a='b';",
        "std::vector<int>&& v", "https://example.org/a/b?c=d&e=%20f#g", "http://localhost:8080/", "user@example.com",
        "C:\\Users\\x", "/usr/local/bin", "camelCaseName snake_case_name kebab-case-name",
        "{\"a\": [1, 2.5, null], \"b\": \"\\u00e9\"}", "x = y  # comment", "a/*b*/c//d", "printf(\"%5.2f\\n\", x);",
        "#!/bin/sh -e", "&amp;&lt;&#39;", "key:\tvalue\t\tend", "|a|b|\n|---|---|\n", "!@#\n\n$%^\n",
        "fn<'a>(x: &'a str)", "<html><body>\n\n\n  <p>text</p></body></html>",
    ]


def special_texts():
    tokens = ["<|endoftext|>", "<s>", "</s>", "<unk>", "<|begin_of_text|>", "<|eot_id|>", "<|end|>", "<|user|>"]
    texts = [t for token in tokens for t in (token, f"a{token}b", f"a {token} b", f"  {token}\n{token}")]
    return texts + [
        "<s><s>", "<s> <s>", "<s></s>", "<|endoftext|><|endoftext|>", "<|endoftext|", "|endoftext|>", "<|endoftext|>>",
        "<<|endoftext|>", "<|ENDOFTEXT|>", "<|end of text|>", "<<s>>", "< s>", "<s >", "</ s>", "<S>", "<s", "s>",
        "<0x41>", "<0x0A>", "<0xE2><0x82><0xAC>", "<s>\n", "\n<s>", "\u2581<s>", "<s>\u2581",
        "<|eot_id|>\n\n<|eot_id|>", "'<|eot_id|>s", "don<|endoftext|>'t", "hello<s>world</s>",
        "<|begin_of_text|>Hello <|eot_id|> world<|end_of_text|>", "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]",
    ]


def long_texts():
    return [
        "a" * 300, "_" * 300, " " * 300, "=" * 120, "-" * 81, "ab" * 150, "\u4e00" * 120, "\U0001f600" * 50,
        "\u0301" * 60, "\n" * 130, " a" * 100, "a " * 100, "'s" * 50, "1" * 100, "\u00bd" * 30, "\u2581" * 64,
        "e\u0301" * 40, "the " * 60, "\r\n" * 40, "A" * 65 + "b" * 65, "<s>" * 30,
    ]


def word_texts():
    return [
        "The quick brown fox jumps over the lazy dog.", "It was the best of times, it was the worst of times.",
        " unreachable", "unreachable", " unreachables", "an unreachable place", "\tunreachable", " lighthouse",
        "antidisestablishmentarianism", "The old lighthouse keeper counted the ships.",
        "Der alte Leuchtturmw\u00e4rter z\u00e4hlte die Schiffe.", "Tokenization of toki pona: mi moku e kili.",
        "xqzj vwkf",
        "\u0412 \u0447\u0430\u0449\u0430\u0445 \u044e\u0433\u0430 \u0436\u0438\u043b \u0431\u044b "
        "\u0446\u0438\u0442\u0440\u0443\u0441?",
        "zzz\u00e9\u00e8\u00ea\u00eb\u0101\u0103\u0105", "Title Case And UPPER CASE",
        "I\u2019m \u201cfine\u201d \u2014 really\u2026",
    ]


def all_texts():
    groups = (white_texts, contraction_texts, letter_texts, number_texts, symbol_texts, emoji_texts, code_texts,
              special_texts, long_texts, word_texts)
    texts = list(dict.fromkeys(text for group in groups for text in group()))
    assert not any("\x1e" in text for text in texts)
    return texts


# --- tokenizers

def load_tokenizer(path):
    """A tokenizer.json without truncation and padding, and without merges the library refuses.

    In the shared llama2 file U+00A0 has turned into a space in three merges, so that they
    no longer split in two. They could never apply: its normalizer leaves no space.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    model = data["model"]
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if isinstance(m, list) or m.count(" ") == 1]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def sentences():
    return (DATA / "sentences.txt").read_text(encoding="utf-8").splitlines()


def add_unmerged_words(tokenizer, words):
    """Only ignore_merges can produce these: they stand in the vocabulary, but no merge makes them."""
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    for word in words:
        assert word not in vocab
        vocab[word] = len(vocab)
    return Tokenizer.from_str(json.dumps(data))


def train_llama3_kind(path):
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(sentences(), trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    tokenizer = add_unmerged_words(tokenizer, ["\u0120unreachable", "lighthouses", "\u0120\u0120\u0120\u0120\u0120"])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in LLAMA3_SPECIAL])
    bos = LLAMA3_SPECIAL[0]
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
                                      special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def train_spm_bpe(path):
    """Llama 2's settings; a coverage below 1 leaves rare characters to the byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_writer=model, model_type="bpe", vocab_size=420,
        character_coverage=0.98, byte_fallback=True, split_digits=True, add_dummy_prefix=True,
        allow_whitespace_only_pieces=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        num_threads=1, minloglevel=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())


# --- goldens

def write_texts(path, texts):
    path.write_bytes(b"".join(text.encode("utf-8") + END for text in texts))


def write_hex(path, texts):
    path.write_text("".join(text.encode("utf-8").hex() + "\n" for text in texts))


def write_ids(path, ids):
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in ids))


def write_goldens(out, name, ids, decoded):
    assert not any("\x1e" in text for text in decoded), name
    write_ids(out / f"{name}.ids", ids)
    write_texts(out / f"{name}.decoded", decoded)
    print(f"{name}: {len(ids)} texts, {sum(map(len, ids))} ids")


def random_ids(vocab, count=200):
    """Half of the ids are small: that is where the single bytes are."""
    rng = random.Random(1)
    return [[rng.randrange(rng.choice((vocab, min(vocab, 262)))) for _ in range(rng.randint(1, 16))]
            for _ in range(count)]


def decode_goldens(out, name, vocab, decode):
    ids = random_ids(vocab)
    write_ids(out / f"{name}.random.ids", ids)
    write_hex(out / f"{name}.random.hex", [decode(row) for row in ids])


def hf_decoder(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def hf_goldens(out, name, tokenizer, texts, modes=("special", "plain")):
    decode_goldens(out, name, tokenizer.get_vocab_size(), hf_decoder(tokenizer))
    for mode in modes:
        tokenizer.encode_special_tokens = mode == "plain"
        ids = [tokenizer.encode(text, add_special_tokens=mode == "bos").ids for text in texts]
        write_goldens(out, f"{name}.{mode}", ids, list(map(hf_decoder(tokenizer), ids)))


def spm_goldens(out, name, path, texts):
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    decode_goldens(out, name, model.vocab_size(), model.decode)
    ids = [model.encode(text) for text in texts]
    write_goldens(out, f"{name}.plain", ids, [model.decode(row) for row in ids])
    return model


def committed_goldens(out, texts):
    llama3 = out / "llama3-kind" / "tokenizer.json"
    train_llama3_kind(llama3)
    tokenizer = load_tokenizer(llama3)
    hf_goldens(out, "llama3-kind", tokenizer, texts, ("special", "plain", "bos"))
    write_hex(out / "llama3-kind.each.hex",
              [hf_decoder(tokenizer)([i]) for i in range(tokenizer.get_vocab_size())])
    spm = out / "spm-bpe" / "tokenizer.model"
    train_spm_bpe(spm)
    model = spm_goldens(out, "spm-bpe", spm, texts)
    write_hex(out / "spm-bpe.each.hex", [model.decode([i]) for i in range(model.vocab_size())])


def load_qwen2(folder):
    """What transformers makes of the two files and of tokenizer_config.json."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_PATTERN.replace("{1,3}", "")), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
    tokenizer.add_special_tokens([AddedToken(t["content"], normalized=False, special=True) for t in added.values()])
    return tokenizer


def folder_goldens(out, folder, texts):
    """Those of which one mode tells enough."""
    for name, path in (("phi2", "phi-2"), ("roberta", "roberta-base"), ("t5", "t5-small")):
        just_ids(out, name, load_tokenizer(folder / path / "tokenizer.json"), texts)
    just_ids(out, "qwen2", load_qwen2(folder / "qwen2"), texts)
    for name, path in (("mistral1", "tokenizer.model.v1"), ("mistral3", "mistral_instruct_tokenizer_240323.model.v3")):
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "mistral" / path))
        write_ids(out / f"{name}.plain.ids", [model.encode(text) for text in texts])


def just_ids(out, name, tokenizer, texts):
    ids = [tokenizer.encode(text).ids for text in texts]
    write_ids(out / f"{name}.bos.ids", ids)
    write_texts(out / f"{name}.bos.decoded", list(map(hf_decoder(tokenizer), ids)))


def shared_goldens(out, shared, texts):
    data = shared / "data"
    if not data.is_dir():
        print("no shared data: the goldens of gpt2, llama2 and phi3 stay as they are")
        return
    hf_goldens(out, "gpt2", load_tokenizer(data / "gpt2" / "tokenizer.json"), texts)
    hf_goldens(out, "llama2", load_tokenizer(data / "tokenizers" / "llama2" / "tokenizer.json"), texts)
    hf_goldens(out, "phi3", load_tokenizer(data / "tokenizers" / "phi-3" / "tokenizer.json"), texts)
    folder_goldens(out, data / "tokenizers", texts)
    spm_goldens(out, "llama2-spm", data / "tokenizers" / "llama2" / "tokenizer.model", texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared",
                        help="folder with data/ (default ../shared beside the repository)")
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write (default tests/data/tokenizers)")
    args = parser.parse_args()
    texts = all_texts()
    args.out.mkdir(parents=True, exist_ok=True)
    write_texts(args.out / "strings.txt", texts)
    committed_goldens(args.out, texts)
    shared_goldens(args.out, args.shared, texts)


if __name__ == "__main__":
    main()
