#!/usr/bin/env python3
"""Compares vocabularies built from text with those that Hugging Face's tokenizers builds.

    tests/vocabulary_diff.py TOKENIZE FILE...   build/tokenize and texts; prints "N compared, N differ"

Vocabularies, merges and the ids of the texts themselves, for each pattern and several sizes; and that the saved
tokenizer.json, loaded by the reference, gives the ids that the tool gives.
"""

import json
import os
import subprocess
import sys
import tempfile

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s"
REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
PATTERNS = {"gpt2": GPT2, "llama3": CONTRACTIONS % "{1,3}" + REST, "qwen2": CONTRACTIONS % "" + REST}
SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]


def split(pattern):
    return pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")


def reference(kind, size, pattern, least, texts):
    """The reference's own training of the same kind."""
    if kind == "bpe":
        t = tokenizers.Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.Sequence(
            [split(pattern), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=least,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    else:
        t = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        t.pre_tokenizer = split(pattern)
        trainer = trainers.WordLevelTrainer(
            vocab_size=size, min_frequency=least, special_tokens=SPECIAL, show_progress=False
        )
    t.train_from_iterator(texts, trainer)
    t.decoder = decoders.ByteLevel() if kind == "bpe" else decoders.Fuse()
    return t


def merges(t):
    return [tuple(m) for m in json.loads(t.to_str())["model"].get("merges", [])]


def differences(tool, work, paths, texts, kind, size, pattern, least):
    out = os.path.join(work, "tokenizer.json")
    command = [tool, "--train", f"{kind}:{size}", "--pattern", pattern, "--min-frequency", str(least), "--force"]
    for name in SPECIAL:
        command += ["--special-token", name]
    subprocess.run(command + ["-o", out, *paths], check=True, capture_output=True)
    ours = tokenizers.Tokenizer.from_file(out)
    if kind != "char":
        theirs = reference(kind, size, pattern, least, texts)
        if ours.get_vocab() != theirs.get_vocab():
            yield "vocabulary"
        if merges(ours) != merges(theirs):
            first = next((i for i, (a, b) in enumerate(zip(merges(ours), merges(theirs))) if a != b), "end")
            yield f"merges, from {first} on"
    for path, text in zip(paths, texts):
        with open(path, "rb") as f:
            ids = subprocess.run(
                [tool, "--parse-special", out], stdin=f, capture_output=True, check=True
            ).stdout.split()
        if [int(i) for i in ids] != ours.encode(text).ids:
            yield f"ids of {path}"


def main():
    tool, paths = sys.argv[1], sys.argv[2:]
    texts = []
    for path in paths:
        with open(path, encoding="utf-8", newline="") as f:
            texts.append(f.read())
    compared = differ = 0
    with tempfile.TemporaryDirectory() as work:
        for kind, size in ("bpe", 300), ("bpe", 1000), ("bpe", 5000), ("word", 2000), ("word", 50000), ("char", 0):
            for pattern in PATTERNS if kind != "char" else ["gpt2"]:
                for least in 1, 2, 10:
                    compared += 1
                    for what in differences(tool, work, paths, texts, kind, size, pattern, least):
                        differ += 1
                        print(f"{kind}:{size} {pattern}, at least {least} times: {what} differ")
    print(f"{compared} compared, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
