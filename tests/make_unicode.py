#!/usr/bin/env python3
r"""Print the table of character classes in transformer.h (section >>unicode).

The splitting patterns of the tokenizers tell apart letters (\p{L}), numbers (\p{N}), white space
(\s) and the rest. What these contain depends on the version of Unicode that the reference was
built with, so the reference itself is asked: the regular expressions of Hugging Face's tokenizers
(pip install tokenizers), for every code point.

Each entry is the code point from which a class holds, times four, plus the class:
0 other, 1 letter, 2 number, 3 space. Entries are in hexadecimal.
"""

import sys

from tokenizers import Regex, __version__
from tokenizers.pre_tokenizers import Split

CLASSES = ((1, r"\p{L}+"), (2, r"\p{N}+"), (3, r"\s+"))
BLOCK = 0x1000


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


def main():
    print("static const uint32_t tfmi_class_starts[] = {")
    line = " "
    for entry in entries():
        if len(line) + 1 + len(entry) > 100:
            print(line)
            line = " "
        line += " " + entry
    print(line.rstrip(","))
    print("};")


main()
