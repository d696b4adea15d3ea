#!/usr/bin/env python3
"""Check what build/convert writes by the programs that it is written for.

    make build/convert build/generate build/logits
    tests/convert_check.py [MODEL ...]      default: the models of tests/data and ../shared/data

Folders are loaded by transformers and must give the logits of the model they were made from; GGUF
files are read by the gguf package, their quantised values compared with its own quantiser's, and
continued greedily by llama.cpp (llama-cpp-python) with the same text as by build/generate. A small
random model of every family that GGUF has a name for gives the same logits in transformers, in
llama.cpp from its GGUF file, in build/logits from both, and in transformers from a folder made of
the GGUF file; llama.cpp continues it with the same tokens. For our own model (examples/tales) in F16,
Q8_0 and Q4_0 it finds the same token the most likely after every word of a text.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "tests", "data", "models")
SHARED = os.path.join(os.path.dirname(ROOT), "shared", "data")
PROMPT = "Once upon a time"
TALES = os.path.join(ROOT, "examples", "tales", "tales.gguf")
TALE = (
    PROMPT + " there was a king who lived in a castle by the sea. He had three sons, and the youngest was called Jack."
)
counts = {"passed": 0, "failed": 0, "skipped": 0}


def run(tool, *args):
    return subprocess.run([os.path.join(ROOT, "build", tool), *args], check=True, capture_output=True, text=True).stdout


def note(what, good, detail=""):
    counts["passed" if good else "failed"] += 1
    if not good:
        print(f"FAIL {what}: {detail}")


def in_transformers(folder):
    """In float32; its products of grouped experts want widths of 4."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].numpy()


def our_logits(path, ids):
    out = os.path.join(tempfile.gettempdir(), f"convert_check.{os.getpid()}")
    run("logits", path, "--ids", ",".join(map(str, ids)), "-o", out, "--device", "ref")
    logits = np.fromfile(out, np.float32).reshape(len(ids), -1)
    os.unlink(out)
    return logits


def check_folder(source, folder):
    """Converted to a folder in float32, transformers computes what we compute from the source."""
    run("convert", source, folder, "--type", "f32")
    model = in_transformers(folder)
    ids = np.arange(1, 12) * 7 % model.config.vocab_size
    theirs = logits_of(model, ids)
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


def check_llama(path, alike=60):
    """llama.cpp continues as we do, from the same ids, for so many characters at least."""
    model = llama_cpp.Llama(path, n_ctx=96, verbose=False, n_threads=2)
    ids = model.tokenize(PROMPT.encode())
    for token in model.generate(ids, temp=0, repeat_penalty=1.0):
        ids.append(token)
        if len(ids) >= 48 or token == model.token_eos():
            break
    theirs = model.detokenize(ids).decode(errors="replace")
    ours = run("generate", path, "-p", PROMPT, "-t", "0", "-n", "43", "--device", "ref", "-w", "f32")
    same = len(os.path.commonprefix([ours.strip(), theirs.strip()]))
    note(f"{path} in llama.cpp", same >= alike, f"alike for {same} characters only:\n{ours}\n{theirs}")


def make_gpt2(folder):
    """A random GPT-2 in several shards, with the real vocabulary, whose text llama.cpp must continue."""
    torch.manual_seed(1)
    config = GPT2Config(n_embd=96, n_layer=2, n_head=3, n_positions=128, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="8MB")
    for name in ["vocab.json", "merges.txt"]:
        shutil.copy(os.path.join(SHARED, "gpt2", name), folder)
    return folder


SMALL = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_64 = {"head_dim": 16, "tie_word_embeddings": False}
FAMILIES = {  # what each adds; windows are shorter than the text
    "llama": {},
    "mistral": {"sliding_window": None, **OF_64},
    "qwen2": OF_64,
    "qwen3": {},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
    "phi3": OF_64,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, **OF_64},
    "qwen2_moe": {"shared_expert_intermediate_size": 48, **EXPERTS, **OF_64},
    "qwen3_moe": {"norm_topk_prob": True, **EXPERTS},
}


SILENCE = llama_cpp.llama_log_callback(lambda level, text, user: print(text.decode(), end="") if level == 4 else None)


SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]  # llama.cpp's phi3 looks for them


def make_family(name, folder):
    """A small random model with a vocabulary of bytes."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**SMALL, **FAMILIES[name]})).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)  # norms and biases too
    model.save_pretrained(folder)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters | {"!!": 256}, [("!", "!")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    return model


def llama_logits(path, ids, vocabulary):
    """Of every position, with a cache of float32 and without shortcuts."""
    llama_cpp.llama_log_set(SILENCE, None)
    model_options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_options)
    if not model:
        return None
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, True
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocabulary,)) for i in range(len(ids))]
    logits = np.array(rows)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


def check_family(name, folder):
    model = make_family(name, os.path.join(folder, name))
    path = os.path.join(folder, name + ".gguf")
    ids = np.arange(40) * 37 % 251 + 3
    run("convert", os.path.join(folder, name), path)
    want = logits_of(model, ids)
    for what, logits, bound in [
        ("transformer.h", our_logits(os.path.join(folder, name), ids), 1e-5),
        ("transformer.h from GGUF", our_logits(path, ids), 1e-5),
        (
            "llama.cpp",
            llama_logits(path, ids, SMALL["vocab_size"]),
            3e-3 if "gemma" in name else 1e-4,
        ),  # GELU by a table of F16
    ]:
        if logits is None:
            note(f"{name} in {what}", False, "it cannot be loaded")
            continue
        worst = np.abs(logits - want).max() / np.ptp(want)
        print(f"{name:12} {what:24} {worst:.2g}")
        note(f"{name} in {what}", worst < bound, f"logits differ by {worst:.2g} of their range")
    check_llama(path, 30)  # most of a random model's bytes are no text
    run("convert", path, os.path.join(folder, "back of " + name))  # GGUF to a folder
    logits = logits_of(in_transformers(os.path.join(folder, "back of " + name)), ids)
    worst = np.abs(logits - want).max() / np.ptp(want)
    note(f"{name} there and back in transformers", worst < 1e-5, f"logits differ by {worst:.2g} of their range")
    back = Tokenizer.from_file(os.path.join(folder, "back of " + name, "tokenizer.json"))
    text = "Hello, w\u00f6rld!  12\n"
    before = Tokenizer.from_file(os.path.join(folder, name, "tokenizer.json"))
    note(f"{name}: the vocabulary there and back", back.encode(text).ids == before.encode(text).ids)


def check_tales(folder, kind, bound):
    """llama.cpp rounds activations to 8 bits beside blocks: no more than the bound, of the logits' range."""
    path = os.path.join(folder, f"tales.{kind}.gguf")
    run("convert", TALES, path, "--type", kind)
    ids = llama_cpp.Llama(path, vocab_only=True, verbose=False).tokenize(TALE.encode())
    ours = our_logits(path, ids)
    theirs = llama_logits(path, ids, ours.shape[1])
    worst = np.abs(theirs - ours).max() / np.ptp(ours)
    best = np.sort(ours)[:, -2:] / np.ptp(ours)
    other = (theirs.argmax(1) != ours.argmax(1)) & (best[:, 1] - best[:, 0] > bound)
    print(
        f"tales {kind:6} llama.cpp: {worst:.2g}, {(theirs.argmax(1) == ours.argmax(1)).sum()} of {len(ids)} best alike"
    )
    note(f"tales in {kind}", worst < bound and not other.any(), f"{worst:.2g} of the range, {other.sum()} other tokens")


def known_to_transformers(model):
    config = os.path.join(model, "config.json")
    return not os.path.exists(config) or json.load(open(config))["model_type"] in CONFIG_MAPPING


def main():
    paths = sys.argv[1:] or [os.path.join(DATA, name) for name in sorted(os.listdir(DATA))]
    stories = os.path.join(SHARED, "stories260K", "stories260K.bin")
    with tempfile.TemporaryDirectory() as folder:
        if not sys.argv[1:] and os.path.exists(stories):
            paths += [stories, make_gpt2(os.path.join(folder, "gpt2"))]
        for kind, bound in [] if sys.argv[1:] else [("f16", 1e-3), ("q8_0", 2e-2), ("q4_0", 2e-2)]:
            check_tales(folder, kind, bound)
        for name in [] if sys.argv[1:] else FAMILIES:
            check_family(name, folder)
        for model in paths:
            if not known_to_transformers(model):
                counts["skipped"] += 1
                continue
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
