#!/usr/bin/env python3
"""Print the table of character classes in transformer.h (section >>unicode).

The splitting patterns of the tokenizers tell apart letters (\\p{L}), numbers (\\p{N}),
white space (\\s) and the rest. Their reference is Oniguruma 6.9.8 with Unicode 14.0,
which is also that of Python 3.11: run it with that version.

Each entry is the code point from which a class holds, times four, plus the class:
0 other, 1 letter, 2 number, 3 space. Entries are in hexadecimal.
"""
import sys
import unicodedata

SPACES = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B),
          0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def class_of(code):
    if code in SPACES:
        return 3
    return {"L": 1, "N": 2}.get(unicodedata.category(chr(code))[0], 0)


def main():
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"Unicode 14.0 wanted, this Python has {unicodedata.unidata_version}")
    entries, last = [], None
    for code in range(0x110000):
        now = class_of(code)
        if now != last:
            entries.append(f"0x{code * 4 + now:x},")
            last = now
    print("static const uint32_t tfmi_class_starts[] = {")
    line = " "
    for entry in entries:
        if len(line) + 1 + len(entry) > 100:
            print(line)
            line = " "
        line += " " + entry
    print(line.rstrip(","))
    print("};")


main()
