#!/usr/bin/env python3
"""examples/transformer.py against the C programs: ids, logits, text, errors. Skips without numpy.

It makes what it needs: the shared library, build/tokenize, build/logits and build/generate.
"""

import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "examples"))
DEBIANS = "/usr/bin/python3"  # whose numpy .ci/deps installs
try:
    import numpy as np
except ImportError:
    if sys.executable != DEBIANS and os.path.exists(DEBIANS):
        os.execv(DEBIANS, [DEBIANS, *sys.argv])
    print("skip python: numpy is not installed\n0 passed, 0 failed, 1 skipped")
    sys.exit(0)
NEEDED = ["build/libtransformer.so", "build/tokenize", "build/logits", "build/generate"]
subprocess.run(["make", "-s", "--no-print-directory", "-C", ROOT, *NEEDED], check=True)
import transformer

TINY = os.path.join(ROOT, "tests", "data", "models", "tiny")
PROMPT = "Once upon a time, na\u00efve \u65e5\u672c"
counts = [0, 0]


def check(what, good):
    counts[not good] += 1
    if not good:
        print("FAIL", what)


def run(tool, *args, text=""):
    command = [os.path.join(ROOT, "build", tool), *args]
    return subprocess.run(command, input=text.encode(), check=True, capture_output=True).stdout


def imported(library):
    """What the module says when it is imported with this library."""
    command = [sys.executable, os.path.join(ROOT, "examples", "transformer.py"), TINY, "a"]
    return subprocess.run(command, env={**os.environ, "LIBTRANSFORMER": library}, capture_output=True, text=True).stderr


def old_library(folder):
    """That has nothing but a version."""
    source, library = os.path.join(folder, "old.c"), os.path.join(folder, "old.so")
    with open(source, "w", encoding="ascii") as f:
        f.write('const char *tfm_version(void) { return "0.0.9"; }\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def main():
    model = transformer.Model(TINY, device="ref")
    ids = model.tokenizer.encode(PROMPT)
    check("ids", ids.tolist() == [int(id) for id in run("tokenize", TINY, text=PROMPT).split()])
    check("text of ids", model.tokenizer.decode(ids).strip() == PROMPT)
    ours = model.session().logits(ids)
    theirs = run("logits", TINY, "-d", "ref", "-i", ",".join(map(str, ids)), "-o", "-")
    check("logits", np.array_equal(ours, np.frombuffer(theirs, np.float32).reshape(ours.shape)))
    ours = "".join(model.session().generate("Once", max_tokens=20, temperature=0.7, top_p=0.95, seed=3))
    command = ["-d", "ref", "-p", "Once", "-n", "20", "-t", "0.7", "-s", "3", "--no-prompt"]
    theirs = run("generate", TINY, *command).decode(errors="replace")
    check("generated text", theirs.rstrip("\n") == ours and len(ours) > 5)
    for call in [
        lambda: transformer.Model("/nowhere"),
        lambda: model.session().logits([-1]),
        lambda: next(model.session().generate("a\0b")),
        lambda: model.tokenizer.decode([1 << 30]),
    ]:
        try:
            call()
            check("errors are raised", False)
        except transformer.Error as error:
            check("errors are sentences", len(str(error)) > 20)
    with tempfile.TemporaryDirectory() as folder:
        check("no library is told", "make lib-shared" in imported(os.path.join(folder, "none.so")))
        check("an old library is told", "version 0.0.9, expected 0.1" in imported(old_library(folder)))
    print(f"{counts[0]} passed, {counts[1]} failed, 0 skipped")
    return counts[1] != 0


if __name__ == "__main__":
    sys.exit(main())
