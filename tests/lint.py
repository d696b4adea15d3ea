#!/usr/bin/env python3
"""Checks that a compiler does not make: layout, lengths, budgets, symbols, the public functions.

    tests/lint.py                checks; the closing line is "N passed, N failed, N skipped"
    tests/lint.py --update-api   writes tests/api.txt: commit it with the change to the API
"""
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEADER = "transformer.h"
LIBRARY = [HEADER, "transformer_cpu.c", "transformer_cuda.cu"]
TOP_LEVEL = {*LIBRARY, "examples", "tests", "bench", "Makefile", "README.md", "LICENSE",
             "CHANGELOG.md", "build"}

COLUMNS, PYTHON_COLUMNS = 100, 120
FUNCTION_LINES = 90
FUNCTION_EXCEPTIONS = {}  # name: lines, each with a reason
PUBLIC_FUNCTIONS = 60

# Lines of a section, blank lines and comments counted. Raise one with a reason rather than squeeze.
BUDGETS = {
    "vocabulary": 1080, "chat": 520,
    "api": 700, "backend": 520, "base": 940, "objects": 100, "json": 480, "unicode": 880,
    "gguf": 520, "steps": 740, "tokenizer": 4100,
    "formats": 800, "families": 2000, "device": 480,
    "kernels": 1970, "gradients": 1100, "forward": 450, "engine": 800, "session": 620,
    "generate": 200, "convert": 1320, "train": 1450, "export": 560, "data": 620,
}

FORBIDDEN_CALLS = ["exit", "_exit", "quick_exit", "abort", "assert", "printf", "fprintf", "vprintf",
                   "vfprintf", "dprintf", "puts", "fputs", "putchar", "perror", "raise", "system"]
FORBIDDEN_SYMBOLS = {"exit", "_exit", "_Exit", "quick_exit", "abort", "__assert_fail", "raise",
                     "printf", "fprintf", "vprintf", "vfprintf", "dprintf", "sprintf", "vsprintf",
                     "puts", "fputs", "putchar", "perror", "stdout", "stderr", "system",
                     "setlocale"}
FORTIFIED_ALLOWED = {"__vsnprintf_chk", "__snprintf_chk"}
ALLOCATORS = {"malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign", "memalign",
              "strdup", "strndup", "asprintf", "vasprintf", "getline"}
WRITABLE_ALLOWED = {"tfmi_stbds_hash_seed"}  # stb_ds's own; its hash maps are not used

results = {"passed": 0, "failed": 0, "skipped": 0}


def report(name, faults):
    results["failed" if faults else "passed"] += 1
    if faults:
        print(f"FAIL {name}")
        for fault in faults[:20]:
            print(f"  {fault}")
        if len(faults) > 20:
            print(f"  ... and {len(faults) - 20} more")


def skip(name, reason):
    results["skipped"] += 1
    print(f"skip {name}: {reason}")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8", errors="surrogateescape") as f:
        return f.read()


def bare(text):
    """The text with comments and strings blanked, line breaks kept."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text,
                  flags=re.DOTALL)


def sources():
    """Every file that people write, relative to the top."""
    found = [f for f in os.listdir(ROOT) if f in LIBRARY or f in ("Makefile", "README.md")]
    for folder in ("examples", "tests", "bench", ".ci"):
        for path, folders, files in os.walk(os.path.join(ROOT, folder)):
            folders[:] = [f for f in folders if f not in ("data", "results", "tales", "__pycache__")]
            found += [os.path.relpath(os.path.join(path, f), ROOT) for f in files]
    return sorted(f for f in found if not f.endswith(".pyc"))


# ---- Text ----

def check_text():
    wide, foreign, blanks = [], [], []
    for path in sources():
        prose = path.endswith((".md", ".txt"))
        for number, line in enumerate(read(path).split("\n"), 1):
            where = f"{path}:{number}"
            if not prose and len(line) > (PYTHON_COLUMNS if path.endswith(".py") else COLUMNS):
                wide.append(f"{where}: {len(line)} columns")
            if not prose and not line.isascii():
                foreign.append(where)
            tab = "\t" in line.lstrip("\t") if path == "Makefile" else "\t" in line
            tab = tab and not path.endswith(".tsv")
            if line != line.rstrip() or tab:
                blanks.append(where)
    report(f"lines of at most {COLUMNS} columns, {PYTHON_COLUMNS} in Python", wide)
    report("ASCII only", foreign)
    report("no tabs, no blanks at the end of a line", blanks)


def check_top_level():
    odd = [f for f in os.listdir(ROOT) if f not in TOP_LEVEL and not f.startswith(".")]
    report("only the agreed files at the top", sorted(odd))


# ---- Sections ----

def sections(lines):
    """(anchor, first line, lines) in order."""
    starts = []
    for number, line in enumerate(lines):
        match = re.match(r"   >>(\w+)   ", line)
        if match and number and lines[number - 1].startswith("/* ===="):
            starts.append((match.group(1), number - 1))
    ends = [first for _, first in starts[1:]] + [len(lines)]
    return [(name, first + 1, end - first) for (name, first), end in zip(starts, ends)]


def contents(lines):
    """The anchors of the table of contents, read column by column."""
    rows = []
    start = next((i for i, line in enumerate(lines) if line.startswith("   Contents")), None)
    for row, line in enumerate(lines[start + 1:] if start is not None else []):
        entries = list(re.finditer(r">>(\w+)", line))
        if not entries:
            break
        rows += [(entry.start() > 20, row, entry.group(1)) for entry in entries]
    return [name for _, _, name in sorted(rows)]


def check_sections(text):
    lines = text.split("\n")
    found = sections(lines)
    names, listed = [name for name, _, _ in found], contents(lines)
    faults = [f">>{name} is listed but has no section" for name in listed if name not in names]
    faults += [f">>{name} is not in the contents" for name in names if name not in listed]
    faults += [f">>{name} has two sections" for name in set(names) if names.count(name) > 1]
    if not faults and names != listed:
        faults = [f"order: the contents have {' '.join(listed)}, the file has {' '.join(names)}"]
    report("the contents name every section once, in order", faults)
    faults = []
    for name, first, count in found:
        if name not in BUDGETS:
            faults.append(f">>{name} has no budget; add one to tests/lint.py")
        elif count > BUDGETS[name]:
            faults.append(f">>{name} (line {first}): {count} lines, the budget is {BUDGETS[name]}")
    report("section budgets", faults)
    print("sections: " + ", ".join(f"{name} {count}" for name, _, count in found))


# ---- Functions ----

def functions(text):
    """(name, first line, lines) of every function defined at the left margin."""
    lines = bare(text).split("\n")
    found, number = [], 0
    while number < len(lines):
        line = lines[number]
        opens = re.search(r"\)\s*\{", line) and not line.startswith((" ", "}", "#"))
        wrapped = re.match(r"\s{2,}\S.*\)\s*\{\s*$", line) and number and \
            re.match(r"[A-Za-z_].*\(", lines[number - 1])
        if not opens and not wrapped:
            number += 1
            continue
        first = number
        while first and re.match(r"\s", lines[first]):
            first -= 1
        last = number
        if not re.search(r"\}\s*$", line):
            while last + 1 < len(lines) and not lines[last].startswith("}"):
                last += 1
        head = " ".join(lines[first:number + 1])
        head = re.sub(r"__attribute__\(\(.*?\)\)|TFMI_PRINTF\(\d, \d\)", "", head)
        name = re.search(r"(\w+)\s*\(", head)
        found.append((name.group(1) if name else "?", first + 1, last - first + 1))
        number = last + 1
    return found


def check_functions():
    faults, lengths = [], []
    for path in LIBRARY + [s for s in sources() if s.startswith(("examples", "bench"))]:
        if not path.endswith((".h", ".c", ".cu")):
            continue
        for name, first, count in functions(read(path)):
            if path in LIBRARY:
                lengths.append(count)
            if count > FUNCTION_EXCEPTIONS.get(name, FUNCTION_LINES):
                faults.append(f"{path}:{first}: {name} has {count} lines")
    report(f"functions of at most {FUNCTION_LINES} lines", faults)
    lengths.sort()
    if lengths:
        print(f"functions of the library: {len(lengths)}, median {statistics.median(lengths):.0f} "
              f"lines, 95th percentile {lengths[int(len(lengths) * 0.95)]}, longest {lengths[-1]}")


def check_calls():
    faults = []
    pattern = re.compile(r"\b(" + "|".join(FORBIDDEN_CALLS) + r")\s*\(")
    for path in LIBRARY:
        for number, line in enumerate(bare(read(path)).split("\n"), 1):
            if pattern.search(line):
                faults.append(f"{path}:{number}: {pattern.search(line).group(1)}")
    report("the library does not exit, assert or print", faults)


# ---- The public functions ----

def prototypes(text, anchor):
    """name: declaration on one line, of the functions that a section declares."""
    lines = text.split("\n")
    found = {}
    for name, first, count in sections(lines):
        if name != anchor:
            continue
        body = bare("\n".join(lines[first - 1:first - 1 + count]))
        body = re.sub(r"^\s*#.*$", "", body, flags=re.MULTILINE)
        pattern = r"(?:TFM_API|extern)\s+([^;{}]*?\b(tfm_\w+)\s*\([^;{}]*\))\s*;"
        for match in re.finditer(pattern, body):
            found[match.group(2)] = " ".join(match.group(1).split())
    return found


def check_api(text, update):
    found = prototypes(text, "api")
    listing = "".join(found[name] + ";\n" for name in sorted(found))
    path = os.path.join(ROOT, "tests", "api.txt")
    if update:
        with open(path, "w", encoding="ascii") as f:
            f.write(listing)
    committed = read("tests/api.txt") if os.path.exists(path) else ""
    old, new = set(committed.splitlines()), set(listing.splitlines())
    faults = [f"gone or changed: {line}" for line in sorted(old - new)]
    faults += [f"new: {line}" for line in sorted(new - old)]
    report("public functions as in tests/api.txt (lint.py --update-api)", faults)
    faults = [] if len(found) <= PUBLIC_FUNCTIONS else [f"there are {len(found)}"]
    report(f"at most {PUBLIC_FUNCTIONS} public functions", faults)
    print(f"public functions: {len(found)}")


# ---- Symbols of the compiled implementation ----

def compiled(work, *flags):
    """Lines of nm for the implementation as (name, class, section)."""
    out = os.path.join(work, "transformer.o")
    command = ["cc", "-O1", "-U_FORTIFY_SOURCE", "-w", "-I.", *flags,
               "-DTRANSFORMER_IMPLEMENTATION", "-x", "c", "-c", "-o", out, HEADER]
    subprocess.run(command, cwd=ROOT, check=True)
    listing = subprocess.run(["nm", "-f", "sysv", out], capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in line.split("|")] for line in listing.stdout.split("\n")]
    return [(row[0], row[2], row[6]) for row in rows if len(row) == 7 and row[0] != "Name"]


def check_symbols(text):
    with tempfile.TemporaryDirectory() as work:
        plain = compiled(work)
        prelude = os.path.join(work, "own.h")
        with open(prelude, "w", encoding="ascii") as f:
            f.write("#include <stddef.h>\n#define TFM_MALLOC own_malloc\n"
                    "#define TFM_REALLOC own_realloc\n#define TFM_FREE own_free\n"
                    "void *own_malloc(size_t);\nvoid *own_realloc(void *, size_t);\n"
                    "void own_free(void *);\n")
        own = compiled(work, "-include", prelude)
    used = {name for name, kind, _ in plain if kind in "Uw"}
    fortified = {s for s in used if s.endswith("_chk") and "printf" in s} - FORTIFIED_ALLOWED
    faults = sorted(used & FORBIDDEN_SYMBOLS | fortified)
    report("nothing linked that exits, aborts or prints", faults)
    used = {name for name, kind, _ in own if kind in "Uw"}
    faults = sorted(used & ALLOCATORS)
    report("no libc allocator when TFM_MALLOC and the others are replaced", faults)
    defined = {name for name, kind, _ in plain if kind in "TDBRVWC"}
    faults = sorted(s for s in defined if not s.startswith(("tfm_", "tfmi_stbds_")))
    report("global symbols begin with tfm_", faults)
    faults = sorted(f"{name} in {section}" for name, kind, section in plain
                    if kind in "DdBbCGgSs" and name not in WRITABLE_ALLOWED
                    and not section.startswith((".data.rel.ro", ".tbss", ".tdata")))
    report("no writable data but the thread-locals", faults)
    declared = set(prototypes(text, "api")) | set(prototypes(text, "backend"))
    defined = {s for s in defined if s.startswith("tfm_")}
    faults = [f"declared, not defined: {s}" for s in sorted(declared - defined)
              if s not in ("tfm_backend_cpu", "tfm_backend_cuda")]
    faults += [f"defined, declared nowhere: {s}" for s in sorted(defined - declared)]
    report("what is declared is defined, and the other way round", faults)


# ---- tests/README.md ----

def check_table():
    """Each test that the table names is there: "test_x: name, name; file.py"."""
    faults, there = [], {}
    for line in read("tests/README.md").split("\n"):
        cell = line.split("|")[-2] if line.startswith("| ") and line.count("|") >= 4 else ""
        for entry in filter(None, (part.strip() for part in cell.split(";"))):
            program, _, names = entry.partition(": ")
            path = os.path.join("tests", program + (".c" if names else ""))
            if not os.path.exists(path):
                faults += [path] if names or "." in program else []
                continue
            if path not in there:
                there[path] = set(re.findall(r"^TEST\((\w+)\)", read(path), re.MULTILINE))
            faults += [f"{path}: {name}" for name in names.split(", ") if name and name not in there[path]]
    report("the tests that tests/README.md names", faults)


def main():
    os.chdir(ROOT)
    text = read(HEADER)
    check_text()
    check_top_level()
    check_sections(text)
    check_functions()
    check_calls()
    check_table()
    check_api(text, "--update-api" in sys.argv)
    if shutil.which("cc") and shutil.which("nm"):
        check_symbols(text)
    else:
        skip("symbols", "cc or nm is not installed")
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**results))
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
