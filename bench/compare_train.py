#!/usr/bin/env python3
"""Steps of training beside PyTorch's: the same shapes, threads and random tokens, in turns.

    bench/compare_train.py [--rounds 3] [--threads 2] [--repeat 5] [--log FILE] [WORKLOAD...]

PyTorch runs eager and compiled, in float32 and under autocast to bfloat16, with its fused attention
and fused AdamW; the fastest of the four counts. Each turn is a process of its own: the median of its
steps counts, and of a side's turns the best, as other programs only ever slow one down. Memory is,
for PyTorch, the most that was resident less what loading it took; for ours, what the trainer holds.
Shares are of the multiply-adds that the bench reaches in both cores just before its own turn. With
--log, turns are added to FILE, so that a comparison can be made in pieces; --show tells what it has."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = {  # arch, layers, width, heads, kv heads, ffn, vocabulary, positions, batch, context
    "char": ("gpt2", 4, 128, 4, 4, 512, 65, 64, 16, 64),
    "own": ("llama", 7, 256, 4, 2, 768, 4096, 256, 16, 256),
    "gpt2-124m-64": ("gpt2", 12, 768, 12, 12, 3072, 50257, 1024, 4, 64),
    "gpt2-124m-256": ("gpt2", 12, 768, 12, 12, 3072, 50257, 1024, 4, 256),
}
MODES = ["eager", "eager-bf16", "compiled", "compiled-bf16"]


def build(shape):
    import torch
    from torch import nn
    from torch.nn import functional as F

    arch, layers, width, heads, kv_heads, ffn, vocabulary, positions, _, context = shape
    gpt2 = arch == "gpt2"
    head = width // heads
    norm = nn.LayerNorm if gpt2 else nn.RMSNorm

    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = norm(width), norm(width)
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head, bias=gpt2)
            self.out = nn.Linear(width, width, bias=gpt2)
            self.up = nn.Linear(width, ffn if gpt2 else 2 * ffn, bias=gpt2)
            self.down = nn.Linear(ffn, width, bias=gpt2)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).split([heads * head, kv_heads * head, kv_heads * head], -1)
            q, k, v = (y.view(b, t, -1, head).transpose(1, 2) for y in (q, k, v))
            if not gpt2:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
            up = self.up(self.norm2(x))
            if gpt2:
                return x + self.down(F.gelu(up, approximate="tanh"))
            gate, up = up.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.positions = nn.Embedding(positions, width) if gpt2 else None
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = norm(width)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)
            angle = torch.arange(context)[:, None] / 10000 ** (torch.arange(0, head, 2) / head)
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

        def forward(self, ids, targets):
            x = self.embed(ids)
            if gpt2:
                x = x + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = F.linear(self.norm(x), self.embed.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    torch.manual_seed(1)
    return Model()


def torch_turn(name, mode, threads, repeat):
    """One process: prints the medians of its steps as JSON."""
    import torch

    torch.set_num_threads(threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shape = WORKLOADS[name]
    model = build(shape)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    ids = torch.randint(shape[6], (shape[8], shape[9]))
    targets = torch.randint(shape[6], (shape[8], shape[9]))
    run = torch.compile(model) if mode.startswith("compiled") else model
    phases = []
    for _ in range(repeat + 2):
        marks = [time.perf_counter()]
        optimiser.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode.endswith("bf16")):
            loss = run(ids, targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        marks.append(time.perf_counter())
        optimiser.step()
        loss.item()
        marks.append(time.perf_counter())
        phases.append([1e3 * (b - a) for a, b in zip(marks, marks[1:])] + [1e3 * (marks[-1] - marks[0])])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    keys = ["forward", "backward", "clip", "adamw", "ms"]
    result = {k: statistics.median(p[i] for p in phases[2:]) for i, k in enumerate(keys)}
    print(json.dumps({**result, "memory_bytes": peak * 1024}))


def turn(command):
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if run.returncode:
        print(run.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(run.stdout.splitlines()[-1])


def turns_of(name, mode, options):
    if mode == "transformer.h":
        return ["build/bench", f"train:{name}", "--json", "--repeat", str(options.repeat), "-j", str(options.threads)]
    return [sys.executable, __file__, name, "--turn", mode] + [
        f"--{k}={getattr(options, k)}" for k in ("threads", "repeat")
    ]


def compare(name, options):
    """Turns of all sides; each becomes a line of the log."""
    results = []
    for _ in range(options.rounds):
        for mode in ["transformer.h"] + options.modes:
            result = turn(turns_of(name, mode, options))
            if not result:
                continue
            results.append({**result, "workload": name, "mode": mode})
            if options.log:
                with open(options.log, "a") as log:
                    log.write(json.dumps(results[-1]) + "\n")
    return results


def show(name, results):
    tokens = WORKLOADS[name][8] * WORKLOADS[name][9]
    bests = {}
    for r in sorted((r for r in results if r["workload"] == name), key=lambda r: r["ms"]):
        bests.setdefault(r["mode"], r)
    ours = bests.get("transformer.h")
    for mode, m in bests.items():
        turns = [r["ms"] for r in results if (r["workload"], r["mode"]) == (name, mode)]
        share = f", {ours['percent_of_fma'] * ours['ms'] / m['ms']:.0f}% of FMA's peak" if ours else ""
        print(
            f"{name}  {mode:14s} {m['ms']:8.1f} ms (median of {len(turns)} turns {statistics.median(turns):.1f}): "
            f"forward {m['forward']:.1f}, backward {m['backward']:.1f}, clip {m['clip']:.1f}, "
            f"AdamW {m['adamw']:.1f}; {1e3 * tokens / m['ms']:.0f} tokens/s, "
            f"{m['memory_bytes'] / 2**20:.0f} MiB{share}",
            flush=True,
        )
    bests.pop("transformer.h", None)
    if ours and bests:
        best = min(bests, key=lambda mode: bests[mode]["ms"])
        time_ratio = bests[best]["ms"] / ours["ms"]
        memory = ours["memory_bytes"] / bests[best]["memory_bytes"]
        print(f"{name}  against {best}: {time_ratio:.2f} times as fast, {memory:.2f} of the memory", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    p.add_argument("--log", metavar="FILE", help="add the turns to FILE, and tell of all that it has")
    p.add_argument("--show", action="store_true", help="only tell")
    p.add_argument("--turn", choices=MODES, help=argparse.SUPPRESS)
    options = p.parse_args()
    if options.turn:
        torch_turn(options.workloads[0], options.turn, options.threads, options.repeat)
        return
    for name in options.workloads or WORKLOADS:
        results = [] if options.show else compare(name, options)
        if options.log:
            results = [json.loads(line) for line in open(options.log)]
        show(name, results)


if __name__ == "__main__":
    main()
