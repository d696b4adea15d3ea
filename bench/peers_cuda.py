#!/usr/bin/env python3
"""What PyTorch reaches on a GPU with the shapes of bench/cuda.sh: one line of JSON for each workload.

bench/peers_cuda.py [NAME ...]    only the workloads whose names contain a NAME

Random weights of 16 bits in plain modules; every step is tried eagerly and compiled by torch.compile, both
recorded as a CUDA graph, and the best of the two is printed. Greedy choice included, no tokenizer. `floor` is what
memory (4.3 TB/s, as copies measured) or the tensor cores (790 TFLOP/s, as products of random numbers) would allow.
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BANDWIDTH, FLOPS = 4.3e12, 790e12
SHAPES = {  # width, ffn, layers, heads, kv heads, vocabulary, gated, tied, type
    "gpt2-124m": (768, 3072, 12, 12, 12, 50257, False, True, torch.float16),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256, True, True, torch.float16),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256, True, False, torch.float16),
}


class Layer(torch.nn.Module):
    """One layer: x [B, T, C]; keys and values [B, K, N, D] are written at `pos` [T]."""

    def __init__(self, shape):
        super().__init__()
        width, ffn, _, self.heads, self.kv_heads, _, self.gated, _, kind = shape
        self.d = width // self.heads
        linear = lambda rows, cols: torch.nn.Parameter(torch.randn(rows, cols, dtype=kind, device="cuda") * 0.02)
        self.norm1, self.norm2 = linear(1, width), linear(1, width)
        self.qkv, self.out = linear((self.heads + 2 * self.kv_heads) * self.d, width), linear(width, width)
        self.up, self.down = linear(ffn * (2 if self.gated else 1), width), linear(width, ffn)

    def norm(self, x, w):
        if self.gated:
            return F.rms_norm(x, (x.shape[-1],), w[0], 1e-5)
        return F.layer_norm(x, (x.shape[-1],), w[0], None, 1e-5)

    def rotate(self, x, turn):  # x [B, H, T, D], turn [T, D/2] twice
        a, b = x.chunk(2, -1)
        return torch.cat([a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]], -1)

    def attend(self, q, keys, values, pos):
        if q.shape[2] > 1:
            return F.scaled_dot_product_attention(
                q, keys[:, :, : q.shape[2]], values[:, :, : q.shape[2]], is_causal=True, enable_gqa=True
            )
        b, _, _, d = q.shape
        q = q.view(b, self.kv_heads, -1, d)
        scores = (q @ keys.transpose(-1, -2)) * d**-0.5
        seen = torch.arange(keys.shape[2], device=q.device) <= pos
        return (scores.masked_fill(~seen, float("-inf")).float().softmax(-1).to(q.dtype) @ values).view(b, -1, 1, d)

    def forward(self, x, keys, values, pos, turn):
        b, t, c = x.shape
        q, k, v = (
            F.linear(self.norm(x, self.norm1), self.qkv)
            .view(b, t, -1, self.d)
            .transpose(1, 2)
            .split([self.heads, self.kv_heads, self.kv_heads], 1)
        )
        if self.gated:
            q, k = self.rotate(q, turn), self.rotate(k, turn)
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        y = self.attend(q, keys, values, pos).transpose(1, 2).reshape(b, t, c)
        x = x + F.linear(y, self.out)
        h = F.linear(self.norm(x, self.norm2), self.up)
        if self.gated:
            gate, h = h.chunk(2, -1)
            h = F.silu(gate) * h
        else:
            h = F.gelu(h, approximate="tanh")
        return x + F.linear(h, self.down)


class Model:
    def __init__(self, name, batch, context):
        self.shape = SHAPES[name]
        width, _, layers, _, kv_heads, vocabulary, gated, tied, kind = self.shape
        self.layers = [Layer(self.shape) for _ in range(layers)]
        self.embed = torch.randn(vocabulary, width, dtype=kind, device="cuda") * 0.02
        self.head = self.embed if tied else torch.randn(vocabulary, width, dtype=kind, device="cuda") * 0.02
        d = self.layers[0].d
        cache = lambda: torch.zeros(batch, kv_heads, context, d, dtype=kind, device="cuda")
        self.caches = [(cache(), cache()) for _ in range(layers)]
        angle = torch.outer(torch.arange(context), 10000 ** (-torch.arange(0, d, 2) / d)).cuda()
        self.turn = torch.stack([angle.cos(), angle.sin()]).to(kind)
        self.batch, self.context = batch, context

    def weight_bytes(self):
        each = sum(p.numel() for layer in self.layers for p in layer.parameters())
        return 2 * (each + self.head.numel())

    def step(self, layer, ids, pos):
        """The next id of each sequence."""
        x = F.embedding(ids, self.embed)
        turn = self.turn[:, pos]
        for own, (keys, values) in zip(self.layers, self.caches):
            x = layer(own, x, keys, values, pos, turn)
        return F.linear(x[:, -1:], self.head).argmax(-1)


def run_layer(own, x, keys, values, pos, turn):
    return own(x, keys, values, pos, turn)


def seconds(work, times, repeat=3):
    """Median over `repeat` of the time that one of `times` runs takes."""
    found = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / times)
    return sorted(found)[repeat // 2]


def recorded(work):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def best(make, times, ways=("eager", "compile")):
    """The fastest way, each as a graph: (seconds, which)."""
    found = []
    for name in ways:
        wrap = (lambda f: f) if name == "eager" else (lambda f: torch.compile(f, dynamic=False))
        try:
            found.append((seconds(recorded(make(wrap)), times), name + " + graph"))
        except Exception as error:  # what cannot be compiled or recorded is no result
            print(f"{name}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
    return min(found)


def tell(name, value, unit, floor, how):
    print(
        json.dumps(
            {
                "peer": f"torch {torch.__version__}",
                "workload": name,
                unit: round(value, 2),
                "floor": round(floor, 2),
                "how": how,
            }
        ),
        flush=True,
    )


def decode(name, batch, context):
    model = Model(name, batch, context + 64)
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    pos = torch.full((1,), context, dtype=torch.long, device="cuda")

    def make(wrap):
        layer = wrap(run_layer)

        def work():
            ids.copy_(model.step(layer, ids, pos))
            pos.add_(1).remainder_(context + 64)

        return work

    spent, how = best(make, 64)
    kv = 2 * 2 * batch * context * model.shape[4] * model.layers[0].d * len(model.layers)
    tell(
        f"{name} tg x{batch} at {context}",
        batch / spent,
        "tokens_per_s",
        batch * BANDWIDTH / (model.weight_bytes() + kv),
        how,
    )


def prefill(name, tokens):
    model = Model(name, 1, tokens)
    ids = torch.randint(0, 50000, (1, tokens), device="cuda")
    pos = torch.arange(tokens, device="cuda")

    def make(wrap):
        layer = wrap(run_layer)
        return lambda: model.step(layer, ids, pos)

    spent, how = best(make, 3)
    work = tokens * (model.weight_bytes() - 2 * model.head.numel())
    work += 2 * tokens * tokens * model.shape[0] * len(model.layers)
    tell(f"{name} pp{tokens}", tokens / spent, "tokens_per_s", tokens * FLOPS / work, how)


def attention(d, tokens, batch, heads):
    q, k, v = (torch.randn(batch, heads, tokens, d, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    found = []
    for backend in [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]:
        with sdpa_kernel(backend):
            try:
                work = recorded(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
                found.append((seconds(work, 10), backend.name))
            except Exception as error:
                print(f"{backend.name}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
    spent, how = min(found)
    tell(
        f"attention head {d} T {tokens}",
        2 * batch * heads * tokens * tokens * d / spent / 1e12,
        "tflops",
        FLOPS / 1e12,
        how,
    )


def sampling(batch, vocabulary=128256):
    logits = torch.randn(batch, vocabulary, device="cuda")

    def choose(logits):
        probs, ids = (logits / 0.8).softmax(-1).sort(-1, descending=True)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= 0.95, 0)
        noise = torch.empty_like(probs).exponential_()
        return ids.gather(-1, (probs / noise).argmax(-1, keepdim=True))

    spent, how = best(lambda wrap: lambda: choose(logits), 50, ["eager"])  # 2.11 cannot compile it
    tell(f"top-p x{batch} of {vocabulary}", spent * 1e6, "us", logits.numel() * 4 / BANDWIDTH * 1e6, how)


WORKLOADS = {
    "gpt2-124m tg": lambda: decode("gpt2-124m", 1, 256),
    "llama-1b tg": lambda: decode("llama-1b", 1, 128),
    "llama-8b tg": lambda: decode("llama-8b", 1, 64),
    "llama-8b tgx64": lambda: decode("llama-8b", 64, 1000),
    "llama-8b pp": lambda: prefill("llama-8b", 2048),
    "attention 128": lambda: attention(128, 16384, 1, 16),
    "attention 64": lambda: attention(64, 1024, 64, 12),
    "sampling 1": lambda: sampling(1),
    "sampling 64": lambda: sampling(64),
}


def main():
    wanted = sys.argv[1:]
    for name, work in WORKLOADS.items():
        if wanted and not any(part in name for part in wanted):
            continue
        torch._dynamo.reset()
        with torch.inference_mode():
            work()
        torch.cuda.empty_cache()


main()
