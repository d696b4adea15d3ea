#!/usr/bin/env python3
"""Writes tests/data/tokenizers/trained-*.vocab: vocabularies that Hugging Face's tokenizers builds from strings.txt.

Records end with 0xff: the tokens in the order of their ids, an empty record, and of BPE the merges. Run it with the
tokenizers package; tests/vocabulary_diff.py compares more.
"""

import os

import vocabulary_diff as diff

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tokenizers")
ROWS = [("bpe", "gpt2", 500), ("bpe", "llama3", 400), ("bpe", "qwen2", 400), ("word", "gpt2", 150)]

with open(os.path.join(FOLDER, "strings.txt"), encoding="utf-8", newline="") as f:
    text = f.read()
for kind, pattern, size in ROWS:
    t = diff.reference(kind, size, pattern, 2, [text])
    vocab = t.get_vocab()
    records = sorted(vocab, key=vocab.get) + [""] + [" ".join(m) for m in diff.merges(t)]
    with open(os.path.join(FOLDER, f"trained-{kind}-{pattern}.vocab"), "wb") as f:
        f.write(b"".join(r.encode() + b"\xff" for r in records))
