#!/usr/bin/env python3
"""Tokens per second of llama.cpp and PyTorch, for compare.sh: two numbers, a prompt's and a text's.

bench/peers.py llama_cpp FILE.gguf PROMPT TOKENS THREADS    llama-cpp-python from PyPI
bench/peers.py torch FOLDER PROMPT TOKENS THREADS           transformers and torch, float32
bench/peers.py torch_bf16 FOLDER PROMPT TOKENS THREADS      the same in bfloat16
bench/peers.py sequences FILE.gguf N TOKENS THREADS         llama.cpp, N texts at a time: one number
bench/peers.py q4_k_m FILE.gguf TO.gguf                     only quantised so, by llama.cpp
"""

import sys
import time


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ids(n, vocabulary):
    return [8 + i * 7919 % (vocabulary - 8) for i in range(n)]


def llama_cpp(path, prompt, tokens, threads):
    """As our bench: a prompt and the choice of one token; then tokens after a single one."""
    import llama_cpp as ll

    model = ll.Llama(
        path, n_ctx=max(prompt, tokens) + 8, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    first = ids(prompt, model.n_vocab())

    def read(ids):
        model.reset()
        model.eval(ids)
        model.sample(temp=0.0)

    def write():
        for _ in range(tokens):
            model.eval([model.sample(temp=0.0)])

    read(first)
    pp = timed(lambda: read(first))
    read(first[:1])
    return pp, timed(write)


def sequences(path, count, tokens, threads):
    """As our bench --batch: each text goes on with its likeliest token; their rates are added up."""
    import llama_cpp as ll
    import numpy as np

    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    how = ll.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_ubatch, how.n_seq_max = count * 2 * (tokens + 8), 512, 512, count
    how.n_threads = how.n_threads_batch = threads
    context = ll.llama_init_from_model(model, how)
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(count, 0, 1)
    ids = [1] * count

    def step(position):
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = ids[i], position, 1, i
            batch.logits[i] = True
        if ll.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        for i in range(count):
            logits = ll.llama_get_logits_ith(context, i)
            ids[i] = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    step(0)
    step(1)
    return timed(lambda: [step(2 + i) for i in range(tokens)])


def q4_k_m(path, to):
    import llama_cpp as ll

    how = ll.llama_model_quantize_default_params()
    how.ftype = ll.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if ll.llama_model_quantize(path.encode(), to.encode(), how):
        sys.exit("llama_model_quantize failed")


def torch(folder, prompt, tokens, threads, dtype="float32"):
    import torch as t
    from transformers import AutoModelForCausalLM

    t.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(t, dtype)).eval()
    first = t.tensor([ids(prompt, model.config.vocab_size)])

    def read(ids):
        out = model(ids, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1), out.past_key_values

    def write():
        next_id, cache = read(first[:, :1])
        for _ in range(tokens):
            out = model(next_id, past_key_values=cache, use_cache=True)
            next_id, cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    with t.inference_mode():
        read(first)
        pp = timed(lambda: read(first))
        return pp, timed(write)


def torch_bf16(folder, prompt, tokens, threads):
    return torch(folder, prompt, tokens, threads, "bfloat16")


def main():
    peer, path = sys.argv[1:3]
    if peer == "q4_k_m":
        return q4_k_m(path, sys.argv[3])
    prompt, tokens, threads = map(int, sys.argv[3:6])
    if peer == "sequences":
        print(f"{prompt * tokens / sequences(path, prompt, tokens, threads):.2f}")
        return
    pp, tg = {"llama_cpp": llama_cpp, "torch": torch, "torch_bf16": torch_bf16}[peer](path, prompt, tokens, threads)
    print(f"{prompt / pp:.2f} {tokens / tg:.2f}")


main()
