r"""Print the tables of characters in transformer.h (section >>unicode).

    make_unicode.py                       all of them, between their own marks
    make_unicode.py --update [HEADER]     puts them between these marks in transformer.h

What letters, numbers, marks, decompositions and clusters are depends on the version of Unicode
that each part of the reference was built with, so the reference itself is asked, for every code
point: Hugging Face's tokenizers (pip install tokenizers), its regular expressions, normalizers and
pre-tokenizers. Only the order of combining classes and the names of categories come from Python.

tfmi_class_starts: each entry is the code point from which a class holds, times four, plus the
class: 0 other, 1 letter, 2 number, 3 space. The other tables are strings of numbers in base 32,
lowest digit first; see tfmi_packed_next.
"""

import contextlib
import io
import struct
import sys
import unicodedata
from pathlib import Path

from tokenizers import Regex, __version__, normalizers
from tokenizers.pre_tokenizers import Digits, Punctuation, Split, Whitespace

CLASSES = ((1, r"\p{L}+"), (2, r"\p{N}+"), (3, r"\s+"))
# In the order of tfmi_category; what none of them matches is 0.
CATEGORIES = (
    r"\p{Lu}+",
    r"\p{Ll}+",
    r"\p{Lt}+",
    r"\p{Lm}+",
    r"\p{Lo}+",
    r"\p{M}+",
    r"\p{Nd}+",
    r"[\p{Nl}\p{No}]+",
    r"\p{Pc}+",
    r"[\p{P}&&[^\p{Pc}]]+",
    r"\p{S}+",
    r"\s+",
)
BLOCK = 0x1000
ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
BEGIN, END = "/* ---- tables by tests/make_unicode.py ---- */", "/* ---- end of the tables ---- */"


# --- packing

DIGITS = [chr(c) for c in range(40, 106) if chr(c) not in "?\\"]


def packed(numbers):
    text = ""
    for number in numbers:
        while number >= 32:
            text += DIGITS[32 + number % 32]
            number //= 32
        text += DIGITS[number]
    return text


def zigzag(number):
    return 2 * number if number >= 0 else -2 * number - 1


def print_packed(name, numbers):
    text = packed(numbers)
    print(f"static const char *const {name}[] = {{")
    for at in range(0, len(text), 94):
        print(f'  "{text[at:at + 94]}",')
    print("  NULL\n};")
    print(f"{name}: {len(text)} characters", file=sys.stderr)


def toggles(codes):
    """Lengths of the runs outside and inside a set, by turns."""
    last, inside, codes = 0, False, set(codes)
    for code in range(0x110000):
        if (code in codes) != inside:
            yield code - last
            last, inside = code, not inside


def runs(classes):
    """Length times sixteen plus class, for each run."""
    start = 0
    for code in range(1, 0x110001):
        if code == 0x110000 or classes.get(code, 0) != classes.get(start, 0):
            yield (code - start) * 16 + classes.get(start, 0)
            start = code


def mapping(table, flags=()):
    """For each code: the distance from the last, how many targets (times two, plus a flag), and these relative to
    the targets of the last; a single target moves on with its code."""
    code, before = 0, [0] * 32
    for key in sorted(table):
        targets = table[key]
        yield key - code
        yield 2 * len(targets) + (key in flags)
        if len(targets) == 1:
            before[0] += key - code
        for i, target in enumerate(targets):
            yield zigzag(target - before[i])
            before[i] = target
        code = key


# --- asking


def members(pattern):
    """The code points that a one-class pattern matches."""
    split = Split(Regex(pattern), "removed", invert=True)
    found = set()
    for first in range(0, 0x110000, BLOCK):
        codes = [c for c in range(first, first + BLOCK) if not 0xD800 <= c < 0xE000]
        text = "".join(map(chr, codes))
        for piece, _ in split.pre_tokenize_str(text) if text else ():
            found.update(map(ord, piece))
    return found


def entries():
    sets = [(number, members(pattern)) for number, pattern in CLASSES]
    last = None
    for code in range(0x110000):
        now = next((number for number, codes in sets if code in codes), 0)
        if now != last:
            yield f"0x{code * 4 + now:x},"
            last = now
    counts = ", ".join(str(len(codes)) for _, codes in sets)
    print(f"tokenizers {__version__}: {counts} letters, numbers, spaces", file=sys.stderr)


def categories():
    found = {}
    for number, pattern in enumerate(CATEGORIES, 1):
        for code in members(pattern):
            found[code] = number
    return found


def cut_by(pre_tokenizer):
    """The code points that a pre-tokenizer cuts off between two letters."""
    return [c for c in ALL if len(pre_tokenizer.pre_tokenize_str("a" + chr(c) + "a")) > 1]


def changed(normalizer):
    pairs = ((c, normalizer.normalize_str(chr(c))) for c in ALL)
    return {c: [ord(d) for d in text] for c, text in pairs if text != chr(c)}


def is_hangul(code):
    return 0xAC00 <= code <= 0xD7A3


def combining_classes():
    """That of Python, where the reference moves the character at all."""
    nfd = normalizers.NFD()
    moved = [c for c in ALL if nfd.normalize_str("a\u0345" + chr(c))[-1] == "\u0345" and unicodedata.combining(chr(c))]
    return {c: unicodedata.combining(chr(c)) for c in moved + [0x345]}


def print_normal_forms():
    nfd, nfc = changed(normalizers.NFD()), normalizers.NFC()
    nfd = {c: d for c, d in nfd.items() if not is_hangul(c)}
    nfkd = {c: d for c, d in changed(normalizers.NFKD()).items() if not is_hangul(c) and nfd.get(c) != d}
    excluded = {c for c in nfd if nfc.normalize_str("".join(map(chr, nfd[c]))) != chr(c)}
    print_packed("tfmi_packed_nfd", mapping(nfd, excluded))
    print_packed("tfmi_packed_nfkd", mapping(nfkd))
    classes = combining_classes()
    order = sorted(set(classes.values()))
    print(f"/* Combining classes are numbered by their order: {len(order)} of them. */")
    print_packed("tfmi_packed_combining", (n for pair in combining_runs(classes, order) for n in pair))


def combining_runs(classes, order):
    start, rank = 0, {c: order.index(k) + 1 for c, k in classes.items()}
    for code in range(1, 0x110001):
        if code == 0x110000 or rank.get(code, 0) != rank.get(start, 0):
            yield code - start, rank.get(start, 0)
            start = code


# --- grapheme clusters: what Precompiled takes as one


def charsmap(source, target):
    """A precompiled charsmap with one rule, its trie laid out by hand: each byte leads to a block of 256 cells."""
    cells = [0] * (512 * (len(source) + 1))
    at = 0
    for depth, byte in enumerate(source):
        base, leaf = 512 * depth + 256, depth + 1 == len(source)
        cells[at] |= (base ^ at) << 10
        at = base ^ byte
        cells[at] = byte | (256 if leaf else 0)
    cells[at] |= ((512 * len(source) + 256) ^ at) << 10
    cells[512 * len(source) + 256] = 1 << 31
    trie = struct.pack(f"<{len(cells)}I", *cells)
    return struct.pack("<I", len(trie)) + trie + target + b"\0"


def precompiled(source, target):
    return normalizers.Precompiled(charsmap(source.encode(), target))


KA, VIRAMA, ACUTE, ZWJ, SIGN = "\u0915", "\u094d", "\u0301", "\u200d", "\u00a9"
OTHER, CONTROL, PREPEND, PICT, CONSONANT, L, V, T, SPACING, EXTEND, NON_JOINER, LINKER, JOINER = range(13)


def clusters():
    """Grapheme cluster classes, numbered as tfmi_cluster. A rule applies to a whole cluster of less than six bytes,
    which tells where clusters begin."""
    joins, picture = precompiled("a", b"b"), precompiled(SIGN + ACUTE, b"X")
    letter = precompiled(KA + ACUTE, b"X")
    found = {}
    for c in map(chr, ALL):
        if joins.normalize_str("a" + c) == "b":
            indic = letter.normalize_str(KA + VIRAMA + c + KA + ACUTE)[-1] != "X"
            pictures = picture.normalize_str(SIGN + c + ZWJ + SIGN + ACUTE)[-1] != "X"
            links = letter.normalize_str(KA + c + KA + ACUTE)[-1] != "X"
            found[ord(c)] = (
                JOINER
                if c == ZWJ
                else LINKER if links else EXTEND if indic and pictures else (NON_JOINER if pictures else SPACING)
            )
        elif picture.normalize_str(c + ZWJ + SIGN + ACUTE)[-1] != "X":
            found[ord(c)] = PICT
        elif len(c.encode()) < 4 or 0x11000 <= ord(c) < 0x12000:
            found[ord(c)] = other_cluster(c)
    for cluster, ranges in (
        (L, ((0x1100, 0x115F), (0xA960, 0xA97C))),
        (V, ((0x1160, 0x11A7), (0xD7B0, 0xD7C6))),
        (T, ((0x11A8, 0x11FF), (0xD7CB, 0xD7FB))),
    ):
        for first, last in ranges:
            found.update((c, cluster) for c in range(first, last + 1))
    return found


def other_cluster(c):
    alone = precompiled(c, b"Z")
    if alone.normalize_str(c + ACUTE) != "Z" and len(c.encode()) < 4:
        return CONTROL
    if alone.normalize_str(c + "a") == "Z":
        return PREPEND
    if len(c.encode()) == 3 and precompiled(c + ACUTE, b"X").normalize_str(KA + VIRAMA + c + ACUTE)[-1] != "X":
        return CONSONANT
    return OTHER


# --- printing


def print_class_starts():
    print("static const uint32_t tfmi_class_starts[] = {")
    line = " "
    for entry in entries():
        if len(line) + 1 + len(entry) > 100:
            print(line)
            line = " "
        line += " " + entry
    print(line.rstrip(","))
    print("};")


def words():
    whitespace = Whitespace()
    return [c for c in ALL if whitespace.pre_tokenize_str("a" + chr(c))[0][0] == "a" + chr(c)]


def print_all():
    print(BEGIN)
    print_class_starts()
    print_packed("tfmi_packed_category", runs(categories()))
    print_packed("tfmi_packed_word", toggles(words()))
    print_packed("tfmi_packed_numeric", toggles(cut_by(Digits(True))))
    print_packed("tfmi_packed_punctuation", toggles(cut_by(Punctuation())))
    print_packed("tfmi_packed_mark", toggles(changed(normalizers.StripAccents())))
    print_packed("tfmi_packed_lower", mapping(changed(normalizers.Lowercase())))
    print_normal_forms()
    print_packed("tfmi_packed_cluster", runs(clusters()))
    print(END)


def update(path):
    text = path.read_text(encoding="ascii")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) + 1 :]
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        print_all()
    path.write_text(before + table.getvalue() + after, encoding="ascii")


if len(sys.argv) > 1:
    update(Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parent.parent / "transformer.h")
else:
    print_all()
