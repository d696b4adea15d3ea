#!/usr/bin/env python3
"""Write tests/data/quants.bin: what GGML's block formats and 8-bit floats hold, by others' account.

Blocks are decoded and encoded by the gguf package's gguf.quants, 8-bit floats decoded by torch
(pip install gguf torch). A record, all little-endian: the type's name in 8 bytes, the number of
values and of bytes as u32, whether the bytes were encoded from the values (1) or decoded to them
(0) as u32, the values as float32, the bytes.
"""

import os
import struct

import gguf
import numpy as np
import torch

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "quants.bin")
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2]}
SCALES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
FLOATS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
random = np.random.default_rng(1)


def record(name, values, data, encoded):
    head = name.encode().ljust(8, b"\0") + struct.pack("<III", values.size, data.size, encoded)
    return head + values.astype("<f4").tobytes() + data.tobytes()


def blocks(name):
    """Random bytes, the scales finite: ordinary, subnormal, zero, negative."""
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (512 // values, size), dtype=np.uint8)
    for at in SCALES[name]:
        scales = random.normal(0, 0.02, len(data)).astype("<f2")
        scales[-1] = [6e-7, -0.0][at // 2 % 2]
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return gguf.quants.dequantize(data, kind).ravel(), data


def weights():
    """What a quantiser meets: noise of many sizes, ties, zeros, equal numbers, one outlier."""
    x = random.normal(0, 1, (16, 32)).astype(np.float32) * np.logspace(-6, 3, 16, dtype=np.float32)[:, None]
    x[3] = 0
    x[4] = np.arange(32) - 16
    x[5] = (np.arange(32) - 15.5) / 4
    x[6] = 0.25
    x[7, 9] = -900
    return x


def main():
    out = b"".join(record(name, *blocks(name), 0) for name in SCALES)
    x = weights()
    for name in ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16"]:
        data = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
        out += record(name, x.ravel(), data, 1)
    codes = np.arange(256, dtype=np.uint8)
    for name, kind in FLOATS.items():
        out += record(name, torch.from_numpy(codes).view(kind).to(torch.float32).numpy(), codes, 0)
    with open(OUT, "wb") as file:
        file.write(out)
    print(f"{OUT}: {len(out)} bytes")


if __name__ == "__main__":
    main()
