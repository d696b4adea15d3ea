#!/usr/bin/env python3
"""Compare our tokenizer with its vocabulary's own library on many random texts or id lists.

Needs:  pip install tokenizers sentencepiece tiktoken

  tokenizer_diff.py VOCABULARY [--mode plain|special|bos] [-n 200000] [--seed 1]
  tokenizer_diff.py VOCABULARY --decode

VOCABULARY      compared with
*.json          Hugging Face's tokenizers
a folder        the same, made of vocab.json, merges.txt and tokenizer_config.json (Qwen2)
*.model*        sentencepiece, which knows only "plain"
NAME.tiktoken   tiktoken, with the splitting and the special tokens that it calls NAME
a GGUF file     what --against names: one of these
--write-tiktoken VOCAB_JSON NAME.tiktoken writes such a file with GPT-2's ranks.

Starts one child process, `OURS VOCABULARY [--special | --bos] [--decode]`, which answers
on stdout each record it gets on stdin until end of file. All numbers are little-endian.

              record on stdin                     answer on stdout
  encoding    u32 byte length, UTF-8 bytes        u32 count, count x i32 ids
  --decode    u32 count, count x i32 ids          u32 byte length, bytes

The child may keep its answers in a buffer. Encoding adds special tokens with --bos only;
decoding skips none. Prints the first differences, each reduced to a short input that still
differs, and ends with a line such as "200000 strings, 0 differences". The exit status
is 0 without differences, 1 with some, 2 where the comparison could not be finished.
"""

import argparse
import base64
import json
import os
import queue
import random
import struct
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import sentencepiece
import tiktoken
from tiktoken_ext import openai_public

os.environ["TOKENIZERS_PARALLELISM"] = "true"

from make_tokenizer_goldens import NOT_WHITE, WHITE, all_texts, load_qwen2, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 1000
QUEUED_CHUNKS = 64  # far more answers than a child's output buffer holds, so waiting cannot deadlock
SHOWN = 10


# --- random texts

FRAGMENTS = [
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'RE",
    "'Ll",
    "\u2019s",
    "'",
    "''",
    "\r\n",
    "\n\n",
    "\n",
    "\r",
    "\t",
    " ",
    "  ",
    "   ",
    "\u00a0",
    "\u3000",
    "\u2581",
    "\u2581\u2581",
    "\u0120",
    "\u0301",
    "\ufe0f",
    "\u200d",
    "\u00bd",
    "\u2460",
    "\u00b2",
    "123",
    "1234",
    "0",
    "a",
    "A",
    "_",
    "-",
    ".",
    "...",
    "!",
    "?!",
    "(",
    ")",
    "<",
    ">",
    "<|",
    "|>",
    "<0x0A>",
    "<0xE2>",
    "\u4f60\u597d",
    "\u3042",
    "\uac00",
    "\u1100\u1161",
    "\u0645\u064f",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469",
    "\ufffd",
    "\ufeff",
    "\u0000",
    "\u0085",
    "\u180e",
    "\u001c",
    "\U0010ffff",
    "\U000f0000",
    "\u0378",
    "the",
    " the",
    "ing",
    "\u0438\u0445",
]


def code_points_by_category():
    tables = {}
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        if category != "Cs":
            tables.setdefault(category[0], []).append(chr(code))
    return list(tables.values())


def real_lines(shared, rng, most=20000):
    lines = []
    for path in sorted((shared / "data" / "text").rglob("*")):
        if path.suffix in (".txt", ".md"):
            text = path.read_text(encoding="utf-8", errors="ignore")
            lines += [line + "\n" for line in text.split("\n") if line]
    return rng.sample(lines, min(most, len(lines)))


def special_fragments(names):
    forms = ("{0}", " {0}", "{0} ", "{0}{0}", "\n{0}\n", "\u2581{0}", "<{0}>")
    return (
        [form.format(name) for name in names for form in forms]
        + [name[:-1] for name in names]
        + [name[1:] for name in names]
        + [name.upper() for name in names]
    )


class Texts:
    """An endless source of hard texts, the same for the same seed."""

    def __init__(self, reference, shared, seed):
        self.rng = random.Random(seed)
        self.by_category = code_points_by_category()
        self.hard = all_texts()
        self.lines = real_lines(shared, self.rng) or self.hard
        self.special = special_fragments(reference.special) or FRAGMENTS
        self.kinds = (
            self.fragments,
            self.code_points,
            self.white,
            self.mutated_line,
            self.mutated_line,
            self.repeated,
            self.with_special,
            self.mutated_hard,
            self.one_script,
            self.joined,
        )

    def next(self):
        return self.rng.choice(self.kinds)()

    def fragments(self):
        return "".join(self.rng.choices(FRAGMENTS, k=self.rng.randint(1, 16)))

    def code_point(self):
        return self.rng.choice(self.rng.choice(self.by_category))

    def code_points(self):
        return "".join(self.code_point() for _ in range(self.rng.randint(1, 24)))

    def one_script(self):
        """Neighbouring code points: the edges of ranges in character tables."""
        first = ord(self.code_point())
        near = (first + self.rng.randint(-40, 40) for _ in range(self.rng.randint(1, 16)))
        return "".join(chr(c) for c in near if 0 <= c < 0x110000 and not 0xD800 <= c < 0xE000)

    def white(self):
        pieces = list(WHITE + NOT_WHITE) + [" ", "\n", "\r\n", "\t"] * 4 + ["a", "B", "1", "!", "'s", "\u00e9"] * 3
        return "".join(self.rng.choices(pieces, k=self.rng.randint(1, 12)))

    def repeated(self):
        piece = self.rng.choice((self.rng.choice(FRAGMENTS), self.code_point(), self.rng.choice("a_ =\n1")))
        text = piece * self.rng.choice((2, 3, 7, 16, 31, 64, 200))
        return text + self.rng.choice(("", " ", "a", "\n", piece, self.rng.choice(FRAGMENTS)))

    def with_special(self):
        pieces = self.rng.choices(self.special, k=self.rng.randint(1, 4)) + self.rng.choices(
            FRAGMENTS, k=self.rng.randint(0, 6)
        )
        self.rng.shuffle(pieces)
        return "".join(pieces)

    def mutated_hard(self):
        return self.mutate(self.rng.choice(self.hard))

    def mutated_line(self):
        line = self.rng.choice(self.lines)
        start = self.rng.randrange(max(1, len(line) - 80))
        return self.mutate(line[start : start + 160])

    def joined(self):
        return self.mutated_hard()[:40] + self.fragments() + self.mutated_line()[:40]

    def mutate(self, text):
        for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
            at = self.rng.randint(0, len(text))
            end = at + self.rng.choice((0, 0, 1, 1, 3))
            middle = self.rng.choice(
                (
                    self.rng.choice(FRAGMENTS),
                    self.rng.choice(self.special),
                    self.code_point(),
                    "",
                    text[at:end].swapcase(),
                    text[at:end] * 2,
                )
            )
            text = text[:at] + middle + text[end:]
        return text


class IdLists:
    """An endless source of id lists: runs of the small ids, where the bytes are, and real encodings, cut up."""

    def __init__(self, reference, shared, seed):
        self.rng = random.Random(seed)
        self.texts = Texts(reference, shared, seed)
        self.reference = reference
        self.ids = reference.ids
        self.kinds = (self.any, self.small, self.mixed, self.encoded)

    def next(self):
        return self.rng.choice(self.kinds)()

    def any(self):
        return self.rng.choices(self.ids, k=self.rng.randint(0, 12))

    def small(self):
        return self.rng.choices(self.ids[:262], k=self.rng.randint(1, 12))

    def mixed(self):
        return [id for _ in range(self.rng.randint(1, 4)) for id in (self.any()[:3] + self.small()[:4])]

    def encoded(self):
        [ids] = self.reference.encode([self.texts.next()])
        start = self.rng.randint(0, min(3, len(ids)))
        return ids[start : len(ids) - self.rng.randint(0, 2)]


# --- the references: ids, special, encode, decode


class HuggingFace:
    def __init__(self, path, mode):
        self.tokenizer = load_qwen2(path) if path.is_dir() else load_tokenizer(path)
        self.tokenizer.encode_special_tokens = mode == "plain"
        self.adds = mode == "bos"
        self.ids = sorted(self.tokenizer.get_vocab(with_added_tokens=True).values())
        self.special = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    def encode(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=self.adds)]

    def decode(self, lists):
        return self.tokenizer.decode_batch(lists, skip_special_tokens=False)


class SentencePiece:
    def __init__(self, path, mode):
        assert mode == "plain", "sentencepiece knows no special tokens in text"
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.ids = list(range(self.model.vocab_size()))
        self.special = [self.model.id_to_piece(i) for i in self.ids if self.model.is_control(i)]

    def encode(self, texts):
        return self.model.encode(texts, num_threads=1)

    def decode(self, lists):
        return [self.model.decode(ids) for ids in lists]


class Tiktoken:
    def __init__(self, path, mode):
        ranks = (line.split() for line in path.read_bytes().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in ranks}
        openai_public.load_tiktoken_bpe = lambda *_, **__: ranks
        made = getattr(openai_public, {"gpt2": "r50k_base"}.get(path.stem, path.stem))()
        made.pop("explicit_n_vocab", None)
        self.encoding = tiktoken.Encoding(**made)
        self.plain = mode == "plain"
        self.ids = sorted(ranks.values()) + sorted(made["special_tokens"].values())
        self.special = sorted(made["special_tokens"])

    def encode(self, texts):
        return [
            self.encoding.encode(text, allowed_special=set() if self.plain else "all", disallowed_special=())
            for text in texts
        ]

    def decode(self, lists):
        return [self.encoding.decode(ids) for ids in lists]


def open_reference(path, mode):
    kinds = {".json": HuggingFace, "": HuggingFace, ".tiktoken": Tiktoken}
    return kinds.get(path.suffix, SentencePiece)(path, mode)


def write_tiktoken(vocabulary, path):
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    with open(path, "wb") as out:
        for piece, rank in sorted(json.loads(vocabulary.read_text(encoding="utf-8")).items(), key=lambda row: row[1]):
            if piece != "<|endoftext|>":  # the only one that no bytes spell
                out.write(base64.b64encode(bytes(letters[letter] for letter in piece)) + b" %d\n" % rank)


def bytes_to_unicode():
    """GPT-2's letters for bytes."""
    same = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in same]
    return {byte: chr(byte) for byte in same} | {byte: chr(256 + i) for i, byte in enumerate(others)}


# --- the two sides


class Encoding:
    noun = "strings"
    source = Texts
    option = []

    def __init__(self, reference):
        self.expected = reference.encode

    def pack(self, text):
        data = text.encode("utf-8")
        return struct.pack("<I", len(data)) + data

    def read(self, stream):
        count = read_u32(stream)
        return list(struct.unpack(f"<{count}i", read_exactly(stream, 4 * count)))


class Decoding:
    noun = "id lists"
    source = IdLists
    option = ["--decode"]

    def __init__(self, reference):
        self.reference = reference

    def expected(self, lists):
        return [text.encode("utf-8") for text in self.reference.decode(lists)]

    def pack(self, ids):
        return struct.pack(f"<I{len(ids)}i", len(ids), *ids)

    def read(self, stream):
        return read_exactly(stream, read_u32(stream))


def read_exactly(stream, size):
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return data


def read_u32(stream):
    return struct.unpack("<I", read_exactly(stream, 4))[0]


class Child:
    """Feeds chunks of items to a fresh child from a thread; answers() gives each chunk back with its answers."""

    def __init__(self, command, task, chunks):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.task = task
        self.sent = queue.Queue(QUEUED_CHUNKS)
        self.writer = threading.Thread(target=self.write, args=(chunks,), daemon=True)
        self.writer.start()

    def write(self, chunks):
        try:
            for chunk in chunks:
                self.sent.put(chunk)
                self.process.stdin.write(b"".join(map(self.task.pack, chunk)))
                self.process.stdin.flush()
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # the reader finds the end of the answers
        self.sent.put(None)

    def answers(self):
        while (chunk := self.sent.get()) is not None:
            got = []
            try:
                for _ in chunk:
                    got.append(self.task.read(self.process.stdout))
            except EOFError:
                self.process.kill()
                raise ChildFailed(self.process.wait(), chunk[len(got)]) from None
            yield chunk, got
        if self.process.stdout.read(1) or self.process.wait():
            raise ChildFailed(self.process.wait(), None)


class ChildFailed(Exception):
    def __str__(self):
        status, item = self.args
        if item is None:
            return f"the child wrote too much or failed at the end (exit status {status})"
        return (
            f"the child ended (exit status {status}) without an answer to {ascii(item)}; "
            "answers are buffered, so an input soon after this one may be the cause"
        )


def differing(command, task, items):
    """The items on which a fresh child and the library disagree, with both results."""
    found = []
    for chunk, got in Child(command, task, [items]).answers():
        found += [(item, g, e) for item, g, e in zip(chunk, got, task.expected(chunk)) if g != e]
    return found


def reduce(command, task, item):
    """Cut pieces out, of half the length first, as long as some shorter item still differs."""
    size = len(item) // 2
    while size:
        shorter = [item[:i] + item[i + size :] for i in range(0, len(item), size)]
        found = differing(command, task, shorter)
        if found:
            item = min((f[0] for f in found), key=len)
        else:
            size //= 2
        size = min(size, len(item) // 2) if len(item) > 1 else 0
    return item


# --- the comparison


def make_chunks(source, total):
    for start in range(0, total, CHUNK):
        yield [source.next() for _ in range(min(CHUNK, total - start))]


def show(command, task, item, ours, theirs):
    small = reduce(command, task, item)
    [(_, small_ours, small_theirs)] = differing(command, task, [small])
    print(f"input    {ascii(item)}\n  ours   {ours}\n  theirs {theirs}")
    print(f"reduced  {ascii(small)}\n  ours   {small_ours}\n  theirs {small_theirs}\n", flush=True)


def compare(command, task, source, total):
    differences = 0
    for chunk, got in Child(command, task, make_chunks(source, total)).answers():
        for item, ours, theirs in zip(chunk, got, task.expected(chunk)):
            if ours != theirs:
                differences += 1
                if differences <= SHOWN:
                    show(command, task, item, ours, theirs)
    return differences


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path, metavar="VOCABULARY")
    parser.add_argument("--against", type=Path, metavar="REFERENCE", help="the same vocabulary in another file")
    parser.add_argument("--write-tiktoken", type=Path, metavar="VOCAB_JSON", help="write VOCABULARY instead")
    parser.add_argument(
        "--ours",
        type=Path,
        default=ROOT / "build" / "tests" / "encode_stream",
        help="the child (default build/tests/encode_stream)",
    )
    parser.add_argument("-n", type=int, default=200000, help="how many inputs (default 200000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--mode",
        choices=("plain", "special", "bos"),
        default="plain",
        help="special tokens in a text: text, or such (special), or such and added too (bos)",
    )
    parser.add_argument("--decode", action="store_true", help="compare decoding instead of encoding")
    parser.add_argument(
        "--shared",
        type=Path,
        default=ROOT.parent / "shared",
        help="folder with data/text (default ../shared beside the repository)",
    )
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.write_tiktoken:
        return write_tiktoken(args.write_tiktoken, args.vocabulary)
    reference = open_reference(args.against or args.vocabulary, args.mode)
    task = (Decoding if args.decode else Encoding)(reference)
    mode = [] if args.mode == "plain" else ["--" + args.mode]
    command = [str(args.ours.resolve()), str(args.vocabulary)] + mode + task.option
    try:
        differences = compare(command, task, task.source(reference, args.shared, args.seed), args.n)
    except (ChildFailed, OSError) as error:
        print(f"tokenizer_diff.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.n} {task.noun}, {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
