#!/usr/bin/env python3
"""Check build/perplexity by PyTorch: the loop of transformers' documentation on the same model.

    make build/convert build/perplexity build/tokenize
    tests/perplexity_check.py [TOKENS]         default: 3000, of ../shared/data/text

The model is stories260K, converted to a folder that transformers loads; tokens are build/tokenize's.
"""

import glob
import json
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = os.path.join(os.path.dirname(ROOT), "shared", "data")
MODEL = os.path.join(SHARED, "stories260K", "stories260K.bin")


def run(tool, *args, text=None):
    command = [os.path.join(ROOT, "build", tool), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout


def reference(model, ids, context, stride):
    """https://huggingface.co/docs/transformers/perplexity, in our words."""
    total, weight, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = torch.tensor(ids[begin:end])[None]
        labels = window.clone()
        labels[:, : begin + window.shape[1] - (end - before) - begin] = -100
        with torch.no_grad():
            loss = model(window, labels=labels).loss
        counted = int((labels != -100).sum()) - 1
        if counted:
            total += float(loss.double()) * counted
            weight += counted
        before = end
        if end == len(ids):
            break
    return total / weight


def main():
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    text = open(sorted(glob.glob(os.path.join(SHARED, "text", "**", "*.txt"), recursive=True))[0]).read()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        run("convert", MODEL, os.path.join(folder, "model"))
        model = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "model"), dtype=torch.float32).eval()
        path = os.path.join(folder, "text")
        with open(path, "w") as file:
            file.write(text[: 2 * wanted])
        ids = [int(id) for id in run("tokenize", MODEL, "--special", text=text[: 2 * wanted]).split()]
        for context, stride in [(512, 512), (256, 128), (100, 7), (64, 63)]:
            ours = json.loads(
                run("perplexity", MODEL, "-f", path, "-c", str(context), "-s", str(stride), "--json", "-d", "ref")
            )
            theirs = reference(model, ids, context, stride)
            good = ours["tokens"] == len(ids) and abs(ours["nats"] - theirs) < 1e-5
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {context}/{stride}: {ours['nats']:.7f}, PyTorch {theirs:.7f}")
    print(f"{4 - failed} passed, {failed} failed, 0 skipped")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
