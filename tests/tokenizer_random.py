#!/usr/bin/env python3
"""Compare our tokenizer with Hugging Face's on small random vocabularies.

Needs:  pip install tokenizers

  tokenizer_random.py [-n 200] [--seed 1] [--ours build/tests/encode_stream]

Each vocabulary has a few merges and added tokens with random lstrip, rstrip, normalized and
special; each is asked for the ids of random texts, with special tokens parsed and not. Texts on
which the reference itself panics are left out. A difference prints the vocabulary and the text;
`--seed SEED -n 1` with the seed printed repeats it.
"""

import argparse
import base64
import io
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

ROOT = Path(__file__).resolve().parent.parent
PARTS = [
    "a",
    "b",
    "c",
    " ",
    "  ",
    "   ",
    "\u00e9",
    "\u65e5",
    "<x>",
    "<s>",
    "</s>",
    "ab",
    "\u2581",
    "\n",
    "1",
    "'s",
    "'S",
    "\t",
    "\u65e5\u672c",
    "<0x41>",
    "x",
    "\u0301",
    "aab",
    "\ufb01",
    "\u1e9b\u0323",
    "\uac01",
    "\u1100\u1161",
    "\u00c5",
    "\u212b",
    "A\u030a",
    "\u0130",
    "!",
    "_",
    "12",
    "\u200b",
    "\uff21",
    "e\u0301\u0327",
    "\r\n",
    "\u00bd",
    "\u0915\u094d\u0937",
    "\u00a9\u200d\u00a9",
    "\u3000",
    "A",
    "\ufeff",
    "\u0345\u0301",
]
PATTERNS = [
    "a",
    "[ab]+",
    "\\s+",
    "\\d{1,3}",
    "\\p{L}+",
    " ?[^\\s\\p{L}\\p{N}]+",
    "[A-Z]|b",
    "\\s?\\p{Lu}\\p{Ll}*",
    "\\w+",
    "(?:ab|a)c?",
    "(?i:ab)",
    "\\p{M}",
    "\\p{P}|\\p{S}",
    " +(?!\\S)|b",
    "[^a-c\\n]",
    "a{2}",
    "a*b?c",
    "(a|b)+",
]
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS += [
    CASED % ("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"),
    CASED % ("", "", ""),
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
]
CHARSMAP = None
ADDED = ["<x>", "a b", "ab", " ab", "b ", "aab", " ", "  ", "\u00e9", "\u65e5\u672c", "\n", "abc", "\u2581a", "\t"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def merges_of(rng, vocabulary, items, most):
    merges = []
    for _ in range(rng.randint(2, most)):
        left, right = rng.choice(items), rng.choice(items)
        if len(left + right) <= 6 and [left, right] not in merges:
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                items.append(left + right)
            merges.append([left, right])
    return merges


def added_of(rng, vocabulary, fixed):
    size, tokens = len(vocabulary), []
    for text in fixed + rng.sample(ADDED, rng.randint(0, 5)):
        known = text in vocabulary
        flag = [rng.random() < 0.4 and text not in fixed for _ in range(5)]
        tokens.append(
            {
                "id": vocabulary[text] if known else size,
                "content": text,
                "single_word": flag[4],
                "lstrip": flag[0],
                "rstrip": flag[1],
                "normalized": flag[2],
                "special": flag[3] or text in fixed,
            }
        )
        size += not known
    return tokens


def characters(rng):
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    fallback = rng.random() < 0.5
    for byte in range(256 if fallback else 0):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    items = rng.sample("ab\u2581c\u00e9\u65e5", rng.randint(3, 6))
    for item in items:
        vocabulary[item] = len(vocabulary)
    merges = merges_of(rng, vocabulary, items, 14)
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prefix = {"type": "Prepend", "prepend": "\u2581"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return {
        "added_tokens": added_of(rng, vocabulary, ["<unk>", "<s>", "</s>"]),
        "normalizer": rng.choice([None, blank, {"type": "Sequence", "normalizers": [prefix, blank]}]),
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": rng.choice(["<unk>", None]),
            "fuse_unk": rng.random() < 0.5,
            "byte_fallback": fallback,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def byte_level(rng):
    whole = rng.random() < 0.7
    letters = [c for c in sorted(ByteLevel.alphabet()) if whole or rng.random() < 0.9]
    vocabulary = {c: i for i, c in enumerate(letters)}
    items = [c for c in "ab\u0120c\u010a\u00c3\u00a91" if c in vocabulary]
    merges = merges_of(rng, vocabulary, items, 20)
    for word in rng.sample(["abc", "bca", "\u0120abc", "\u65e5", "ab\u00c3"], 2):
        vocabulary.setdefault(word, len(vocabulary))
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    alone = dict(byte, add_prefix_space=rng.random() < 0.3, use_regex=rng.random() < 0.5)
    return {
        "added_tokens": added_of(rng, vocabulary, []),
        "normalizer": None,
        "pre_tokenizer": rng.choice([alone, {"type": "Sequence", "pretokenizers": [split, byte]}]),
        "decoder": dict(byte, use_regex=True),
        "model": {"type": "BPE", "ignore_merges": rng.random() < 0.5, "vocab": vocabulary, "merges": merges},
    }


def charsmap():
    """The one of a SentencePiece model trained here: nmt_nfkc."""
    global CHARSMAP
    if CHARSMAP is None:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c ab bc"] * 9),
            model_writer=model,
            model_type="char",
            vocab_size=8,
            minloglevel=9,
        )
        CHARSMAP = precompiled_of(model.getvalue())
    return CHARSMAP


def precompiled_of(model):
    """Field 2 of field 3 of a SentencePiece model, in base64."""
    fields = dict(proto_fields(model))
    return base64.b64encode(dict(proto_fields(fields[3]))[2]).decode()


def proto_fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if key & 7 == 2 else (4 if key & 7 == 5 else 8, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def a_normalizer(rng):
    return rng.choice(
        [
            lambda: {"type": rng.choice(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"])},
            lambda: {"type": "Strip", "strip_left": rng.random() < 0.5, "strip_right": rng.random() < 0.5},
            lambda: {"type": "Prepend", "prepend": rng.choice(["\u2581", "ab", "a "])},
            lambda: {
                "type": "Replace",
                "pattern": {"String": rng.choice(["a", " ", "  ", "ab", "\u00e9"])},
                "content": rng.choice(["b", "", "\u2581", "aa"]),
            },
            lambda: {
                "type": "Replace",
                "pattern": {"Regex": rng.choice([" {2,}", "[ab]+", "\\s+", "\\n"])},
                "content": rng.choice(["b", "", "\u2581", " "]),
            },
            lambda: {"type": "Precompiled", "precompiled_charsmap": charsmap()},
        ]
    )()


def a_pre_tokenizer(rng):
    behavior = rng.choice(["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"])
    return rng.choice(
        [
            lambda: {"type": "Digits", "individual_digits": rng.random() < 0.5},
            lambda: {"type": "Punctuation", "behavior": behavior},
            lambda: {"type": rng.choice(["Whitespace", "WhitespaceSplit", "BertPreTokenizer"])},
            lambda: {"type": "CharDelimiterSplit", "delimiter": rng.choice("a |")},
            lambda: {
                "type": "Metaspace",
                "replacement": rng.choice("\u2581_"),
                "split": rng.random() < 0.5,
                "prepend_scheme": rng.choice(["always", "never", "first"]),
            },
            lambda: {
                "type": "ByteLevel",
                "add_prefix_space": rng.random() < 0.5,
                "use_regex": rng.random() < 0.5,
                "trim_offsets": True,
            },
            lambda: {
                "type": "Split",
                "pattern": {"String": rng.choice(["a", " ", "ab", "\n"])},
                "behavior": behavior,
                "invert": rng.random() < 0.3,
            },
            lambda: {
                "type": "Split",
                "pattern": {"Regex": rng.choice(PATTERNS)},
                "behavior": behavior,
                "invert": rng.random() < 0.3,
            },
        ]
    )()


def some(rng, one, kind, inner):
    """None, one part, or a sequence of parts."""
    count = rng.choice([0, 1, 1, 2, 3])
    parts = [one(rng) for _ in range(count)]
    return None if count == 0 else parts[0] if count == 1 else {"type": "Sequence", inner: parts}


def pipeline(rng):
    """Any model behind any steps."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    items = rng.sample("ab\u2581c\u00e9\u65e5 1A_\u0120", rng.randint(4, 8))
    for item in items:
        vocabulary[item] = len(vocabulary)
    merges = merges_of(rng, vocabulary, items, 14)
    kind = rng.choice(["BPE", "Unigram", "Unigram", "WordLevel"])
    fallback = rng.random() < 0.3
    if kind == "Unigram" and fallback:
        vocabulary.update((f"<0x{byte:02X}>", len(vocabulary) + byte) for byte in range(256))
    model = {"type": kind, "vocab": vocabulary, "unk_token": "<unk>"}
    if kind == "BPE":
        model.update(merges=merges, fuse_unk=rng.random() < 0.5, ignore_merges=rng.random() < 0.3)
    if kind == "Unigram":
        scores = [[piece, -rng.choice([rng.random() * 9, 1.0, 2.0, 3.5])] for piece in vocabulary]
        model = {"type": kind, "vocab": scores, "unk_id": 0, "byte_fallback": fallback}
    decoder = rng.choice(
        [None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}]
    )
    return {
        "added_tokens": added_of(rng, vocabulary, ["<unk>", "<s>", "</s>"]),
        "decoder": decoder,
        "normalizer": some(rng, a_normalizer, "normalizer", "normalizers"),
        "pre_tokenizer": some(rng, a_pre_tokenizer, "pre_tokenizer", "pretokenizers"),
        "model": model,
    }


def id_lists(packed):
    lists, at = [], 0
    while at < len(packed):
        count = struct.unpack_from("<I", packed, at)[0]
        lists.append(struct.unpack_from(f"<{count}i", packed, at + 4))
        at += 4 + 4 * count
    return lists


def ours(command, texts):
    """The ids of each text, or the sentence with which the tokenizer was refused."""
    packed = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    child = subprocess.run(command, input=packed, capture_output=True, check=False)
    return child.stderr.decode() if child.returncode else id_lists(child.stdout)


def reference(tokenizer, text):
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    except BaseException as fault:  # pylint: disable=broad-except
        if isinstance(fault, KeyboardInterrupt):
            raise
        return None  # it panicked


def compare(seed, program, path):
    """Differences, and whether the vocabulary was refused."""
    rng = random.Random(seed)
    spec = rng.choice([characters, byte_level, pipeline, pipeline])(rng)
    spec.update(version="1.0", truncation=None, padding=None, post_processor=None)
    path.write_text(json.dumps(spec), encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # pylint: disable=broad-except
        return 0, True  # the reference refuses it
    texts = ["".join(rng.choice(PARTS) for _ in range(rng.randint(0, 14))) for _ in range(100)]
    faults = 0
    for mode in ([], ["--special"]):
        tokenizer.encode_special_tokens = not mode
        answers = ours([str(program), str(path)] + mode, texts)
        if isinstance(answers, str):
            print(f"seed {seed}: refused: {answers.strip()}")
            return 0, True
        for text, ids in zip(texts, answers):
            expected = reference(tokenizer, text)
            if expected is not None and ids != expected:
                faults += 1
                print(f"seed {seed}{' --special' if mode else ''}: {text!r}: {ids}, expected {expected}")
                print(json.dumps(spec))
                break
    return faults, False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=200, help="how many vocabularies (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the first vocabulary")
    parser.add_argument("--ours", type=Path, default=ROOT / "build" / "tests" / "encode_stream")
    arguments = parser.parse_args()
    if not arguments.ours.exists():
        sys.exit(f"{arguments.ours} is missing; build tests/encode_stream.c there")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reference writes a trace for each panic
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.n):
            faults, refused = compare(seed, arguments.ours, Path(folder) / "tokenizer.json")
            passed += not faults and not refused
            failed += faults > 0
            skipped += refused
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
