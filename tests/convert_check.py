#!/usr/bin/env python3
"""Check what build/convert writes by the programs that it is written for.

    make build/convert build/generate build/logits
    tests/convert_check.py [MODEL ...]      default: the models of tests/data and ../shared/data

Folders are loaded by transformers and must give the logits of the model they were made from; GGUF
files are read by the gguf package, their quantised values compared with its own quantiser's, and
continued greedily by llama.cpp (llama-cpp-python) with the same text as by build/generate.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "tests", "data", "models")
SHARED = os.path.join(os.path.dirname(ROOT), "shared", "data")
PROMPT = "Once upon a time"
counts = {"passed": 0, "failed": 0, "skipped": 0}


def run(tool, *args):
    return subprocess.run([os.path.join(ROOT, "build", tool), *args], check=True, capture_output=True, text=True).stdout


def note(what, good, detail=""):
    counts["passed" if good else "failed"] += 1
    if not good:
        print(f"FAIL {what}: {detail}")


def our_logits(path, ids):
    out = os.path.join(tempfile.gettempdir(), f"convert_check.{os.getpid()}")
    run("logits", path, "--ids", ",".join(map(str, ids)), "-o", out, "--device", "ref")
    logits = np.fromfile(out, np.float32).reshape(len(ids), -1)
    os.unlink(out)
    return logits


def check_folder(source, folder):
    """Converted to a folder in float32, transformers computes what we compute from the source."""
    run("convert", source, folder, "--type", "f32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.arange(1, 12) * 7 % model.config.vocab_size
    with torch.no_grad():
        theirs = model(torch.tensor(ids)[None]).logits[0].numpy()
    ours, before = our_logits(folder, ids), our_logits(source, ids)
    worst = np.abs(ours - theirs).max() / np.ptp(theirs)
    note(f"{source} as a folder", worst < 1e-5, f"logits differ by {worst:.2g} of their range")
    worst = np.abs(ours - before).max() / np.ptp(theirs)
    rounds = "gemma" in source  # the scale of embeddings is rounded to the model's type
    note(f"{source} there and back", worst < (2e-3 if rounds else 1e-6), f"logits differ by {worst:.2g}")


def gguf_tells(model):
    """False for activations and scales that GGUF has no words for."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(ROOT, "build", "convert"), model, os.path.join(folder, "model.gguf")]
        return subprocess.run(command, capture_output=True).returncode == 0


def check_values(source, kind):
    """Each matrix is what gguf's quantiser makes of the float32 file's."""
    plain, coded = (source + suffix for suffix in (".f32.gguf", f".{kind}.gguf"))
    floats = {t.name: t for t in gguf.GGUFReader(plain).tensors}
    for tensor in gguf.GGUFReader(coded).tensors:
        x = floats[tensor.name].data
        want = gguf.quants.quantize(x, tensor.tensor_type).reshape(tensor.data.shape)
        note(f"{coded} {tensor.name}", np.array_equal(tensor.data.view(np.uint8), want.view(np.uint8)), "bytes differ")


def check_llama(path):
    """llama.cpp continues as we do, from the same ids."""
    model = llama_cpp.Llama(path, n_ctx=96, verbose=False, n_threads=2)
    ids = model.tokenize(PROMPT.encode())
    for token in model.generate(ids, temp=0, repeat_penalty=1.0):
        ids.append(token)
        if len(ids) >= 48 or token == model.token_eos():
            break
    theirs = model.detokenize(ids).decode(errors="replace")
    ours = run("generate", path, "-p", PROMPT, "-t", "0", "-n", "43", "--device", "ref", "-w", "f32")
    same = len(os.path.commonprefix([ours.strip(), theirs.strip()]))
    note(f"{path} in llama.cpp", same >= 60, f"alike for {same} characters only:\n{ours}\n{theirs}")


def make_gpt2(folder):
    """A random GPT-2 in several shards, with the real vocabulary, whose text llama.cpp must continue."""
    torch.manual_seed(1)
    config = GPT2Config(n_embd=96, n_layer=2, n_head=3, n_positions=128, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="8MB")
    for name in ["vocab.json", "merges.txt"]:
        shutil.copy(os.path.join(SHARED, "gpt2", name), folder)
    return folder


def main():
    models = sys.argv[1:] or [os.path.join(DATA, name) for name in sorted(os.listdir(DATA))]
    stories = os.path.join(SHARED, "stories260K", "stories260K.bin")
    with tempfile.TemporaryDirectory() as folder:
        if not sys.argv[1:] and os.path.exists(stories):
            models += [stories, make_gpt2(os.path.join(folder, "gpt2"))]
        for model in models:
            base = os.path.join(folder, "of " + os.path.basename(model))
            check_folder(model, base)
            if not gguf_tells(model):
                counts["skipped"] += 1
                continue
            for kind in ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"]:
                run("convert", model, f"{base}.{kind}.gguf", "--type", kind)
                check_values(base, kind)
            for kind in ["f32", "f16", "q8_0"] if model == stories else ["f32"] if model.endswith("/gpt2") else []:
                check_llama(f"{base}.{kind}.gguf")  # which rounds activations for quantised weights
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
