#!/usr/bin/env python3
"""Make the tiny models and golden logits under tests/data/models.

Needs:  pip install torch transformers tokenizers numpy accelerate compressed-tensors

Each case becomes one Hugging Face folder, tests/data/models/<case>/:

  config.json, generation_config.json
  model.safetensors, or shards and model.safetensors.index.json
  ids.i32      the tokens: T little-endian int32
  logits.f32   T rows of V little-endian float32, row-major: what transformers
               computes in float32 from the saved files with eager attention,
               in one forward pass over all T tokens

  training.safetensors
               (not for all) a batch of ids and targets [2, T], where -100 is no
               target, the gradient of the mean cross entropy (with experts: plus
               their weighted load-balancing loss, which is given as well, for
               itself) for every parameter, under its name in model.safetensors,
               and the cross entropy in 20 steps of AdamW on that batch (TRAINING
               below), all float32
  dropout.safetensors
               (gpt2-a) loss and gradients, of vectors and one matrix, of that
               batch under the trainer's dropout (DROPOUT below)

The case "tiny" has a tokenizer.json, tokenizer_config.json as well, trained on
tests/data/tokenizers/sentences.txt.

All weights are random and all seeds fixed. Every parameter is random, norms and
biases included, and the script checks that each of them changes the logits, so
that a reader which forgets one cannot pass.
"""
import argparse
import json
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config,
                          Gemma2Config, Gemma3TextConfig, GemmaConfig,
                          GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, MistralConfig, MixtralConfig,
                          Phi3Config, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig)
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

DATA = Path(__file__).resolve().parent / "data"
SPECIAL = ["<unk>", "<s>", "</s>"]
TRAINED = ["gpt2-a", "gpt2-b", "llama-a", "llama-b", "llama-c", "llama-d", "mistral-a", "qwen2-a", "qwen3-a",
           "gemma-a", "gemma-b", "gemma2-a", "gemma3-a", "phi3-a", "mixtral-b", "qwen2moe-a", "qwen3moe-a",
           "gpt2moe-a"]
DROPOUT = {"embed": 0.1, "attention": 0.2, "residual": 0.3, "seed": 9}  # as tests/test_train.c has it
BATCHES = {"gemma2-a": 3003}  # seeds; the first one's curve hung on the last bits of tiny gradients
ONE_PLUS = ("gemma", "gemma2", "gemma3_text")  # norms multiply by 1 + w, embeddings by the root of the width
TRAINING = {"steps": 20, "lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1, "clip": 1.0}


# --- gpt2_moe: our own family, as transformer.h's >>families describes it

class GPT2MoeConfig(GPT2Config):
    model_type = "gpt2_moe"


class Stack(torch.nn.Module):
    """E linear maps."""
    def __init__(self, experts, outputs, inputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(experts, outputs, inputs))
        self.bias = torch.nn.Parameter(torch.zeros(experts, outputs))


class GPT2Experts(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.n_expert_inner or config.n_inner or 4 * config.n_embd
        self.used = config.n_expert_used
        self.act = ACT2FN[config.activation_function]
        self.router = torch.nn.Linear(config.n_embd, config.n_expert, bias=False)
        self.experts = torch.nn.ModuleDict({"c_fc": Stack(config.n_expert, inner, config.n_embd),
                                            "c_proj": Stack(config.n_expert, config.n_embd, inner)})

    def forward(self, x):
        self.logits = self.router(x).flatten(0, -2)
        best, chosen = self.logits.topk(self.used, dim=-1)
        weights = best.softmax(dim=-1)
        flat, up, down = x.flatten(0, -2), self.experts["c_fc"], self.experts["c_proj"]
        out = torch.zeros_like(flat)
        for e in range(self.router.out_features):
            row, slot = torch.where(chosen == e)
            y = self.act(flat[row] @ up.weight[e].T + up.bias[e]) @ down.weight[e].T + down.bias[e]
            out = out.index_add(0, row, y * weights[row, slot, None])
        return out.view_as(x)


class GPT2MoeLMHeadModel(GPT2LMHeadModel):
    config_class = GPT2MoeConfig

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp = GPT2Experts(config)


AutoConfig.register("gpt2_moe", GPT2MoeConfig)
AutoModelForCausalLM.register(GPT2MoeConfig, GPT2MoeLMHeadModel)


def gpt2_config(kind=GPT2Config, **options):
    return kind(bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)


def llama3_rope(factor, theta):
    # Wavelengths start at 2 pi. They count as high below 32 / 4 and as low above 32 / 1,
    # so all three bands of the llama3 rule occur in a head of 14 or 16 dimensions.
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def small(config, width, heads, **options):
    return config(hidden_size=width, num_attention_heads=heads, bos_token_id=0, eos_token_id=1, pad_token_id=2,
                  **options)


def rope(kind, theta=10000.0, **options):
    return {"rope_type": kind, "rope_theta": theta, **options}


def dense_cases():
    """The families beside GPT-2 and Llama: past a window, past the context that scaling starts from."""
    f32, bf16 = torch.float32, torch.bfloat16
    factors = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 3.0, 7.0],
               "original_max_position_embeddings": 24}
    return {
        "llama-d": (small(LlamaConfig, 24, 3, num_hidden_layers=2, intermediate_size=32, vocab_size=53,
                          max_position_embeddings=64, rope_parameters=rope(
                              "yarn", 50.0, factor=4.0, original_max_position_embeddings=16, beta_fast=3.0,
                              beta_slow=0.5, mscale=2.0, mscale_all_dim=0.5, truncate=False)),
                    41, f32, None, None),
        "llama-e": (small(LlamaConfig, 24, 2, num_hidden_layers=2, intermediate_size=32, vocab_size=53,
                          max_position_embeddings=20, rope_parameters=rope("dynamic", 30.0, factor=3.0)),
                    45, f32, None, to_transformers4),
        "mistral-a": (small(MistralConfig, 24, 4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=33,
                            vocab_size=53, max_position_embeddings=64, sliding_window=8, head_dim=10),
                      37, f32, None, None),
        "mistral-b": (small(MistralConfig, 30, 3, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=28,
                            vocab_size=47, max_position_embeddings=64, sliding_window=None, tie_word_embeddings=True,
                            head_dim=None, rope_parameters=rope("yarn", 40.0, factor=4.0,
                                                                original_max_position_embeddings=16)),
                      40, bf16, None, to_transformers4),
        "qwen2-a": (small(Qwen2Config, 24, 4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=20,
                          vocab_size=53, max_position_embeddings=64, use_sliding_window=True, sliding_window=9,
                          max_window_layers=1), 37, f32, None, None),
        "qwen2-b": (small(Qwen2Config, 30, 3, num_key_value_heads=3, num_hidden_layers=2, intermediate_size=32,
                          vocab_size=47, max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-3,
                          rope_parameters=rope("linear", 100.0, factor=2.5)), 33, bf16, None, to_transformers4),
        "qwen3-a": (small(Qwen3Config, 24, 4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=20,
                          head_dim=10, vocab_size=53, max_position_embeddings=64, use_sliding_window=True,
                          sliding_window=9, max_window_layers=2, attention_bias=True), 37, f32, None, None),
        "qwen3-b": (small(Qwen3Config, 30, 3, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=32,
                          head_dim=14, vocab_size=47, max_position_embeddings=64, tie_word_embeddings=True,
                          rms_norm_eps=1e-3, rope_parameters=rope(
                              "yarn", 60.0, factor=4.0, original_max_position_embeddings=16, attention_factor=1.25)),
                    45, bf16, None, to_transformers4),
        "gemma-a": (small(GemmaConfig, 24, 4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=33,
                          head_dim=10, vocab_size=53, max_position_embeddings=64, attention_bias=True),
                    37, f32, None, None),
        "gemma-b": (small(GemmaConfig, 30, 3, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=32,
                          head_dim=12, vocab_size=47, max_position_embeddings=64, rms_norm_eps=1e-3),
                    33, bf16, None, to_transformers4),
        "gemma2-a": (small(Gemma2Config, 24, 4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=20,
                           head_dim=10, vocab_size=53, max_position_embeddings=64, sliding_window=8,
                           query_pre_attn_scalar=13, attn_logit_softcapping=1.5, final_logit_softcapping=2.5),
                     37, f32, None, None),
        "gemma2-b": (small(Gemma2Config, 30, 3, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=32,
                           head_dim=12, vocab_size=47, max_position_embeddings=64, sliding_window=11,
                           query_pre_attn_scalar=6, attn_logit_softcapping=None, final_logit_softcapping=3.0,
                           rms_norm_eps=1e-3), 33, bf16, None, to_transformers4),
        "gemma3-a": (small(Gemma3TextConfig, 24, 4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=20,
                           head_dim=10, vocab_size=53, max_position_embeddings=64, sliding_window=8,
                           query_pre_attn_scalar=13, final_logit_softcapping=3.0,
                           layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                           rope_parameters={"full_attention": rope("linear", 500.0, factor=4.0),
                                            "sliding_attention": rope("default", 20.0)}), 37, f32, None, None),
        "gemma3-b": (small(Gemma3TextConfig, 30, 3, num_key_value_heads=1, num_hidden_layers=3, intermediate_size=32,
                           head_dim=12, vocab_size=47, max_position_embeddings=64, sliding_window=11,
                           query_pre_attn_scalar=6, sliding_window_pattern=2, rms_norm_eps=1e-3,
                           rope_parameters={"full_attention": rope("default", 300.0),
                                            "sliding_attention": rope("default", 10.0)}),
                     33, bf16, None, to_transformers4),
        "phi3-a": (small(Phi3Config, 24, 2, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=33,
                         vocab_size=53, max_position_embeddings=64, original_max_position_embeddings=24,
                         sliding_window=13,
                         rope_parameters=rope("longrope", 80.0, partial_rotary_factor=0.5, **factors)),
                   41, f32, None, None),
        "phi3-b": (small(Phi3Config, 18, 3, num_hidden_layers=2, intermediate_size=32, vocab_size=47,
                         max_position_embeddings=96, original_max_position_embeddings=24, tie_word_embeddings=True,
                         rope_parameters=rope("longrope", 80.0, **factors)), 24, bf16, None, to_transformers4),
    }


def expert_cases():
    f32, bf16 = torch.float32, torch.bfloat16
    llama = {"num_key_value_heads": 2, "vocab_size": 53, "max_position_embeddings": 64}
    other = {"num_key_value_heads": 1, "vocab_size": 47, "max_position_embeddings": 64, "tie_word_embeddings": True,
             "rms_norm_eps": 1e-3}
    return {
        "mixtral-a": (small(MixtralConfig, 24, 4, **llama, num_hidden_layers=2, intermediate_size=20,
                            num_local_experts=5, num_experts_per_tok=2, sliding_window=8), 37, f32, None, None),
        "mixtral-b": (small(MixtralConfig, 30, 3, **other, num_hidden_layers=2, intermediate_size=16, head_dim=12,
                            num_local_experts=4, num_experts_per_tok=3, router_aux_loss_coef=0.5,
                            rope_parameters=rope("default", 200.0)), 33, bf16, None, to_transformers4),
        "qwen2moe-a": (small(Qwen2MoeConfig, 24, 4, **llama, num_hidden_layers=4, intermediate_size=20,
                             moe_intermediate_size=12, shared_expert_intermediate_size=28, num_experts=6,
                             num_experts_per_tok=3, router_aux_loss_coef=0.3, decoder_sparse_step=2,
                             use_sliding_window=True, sliding_window=9, max_window_layers=2), 37, f32, None, None),
        "qwen2moe-b": (small(Qwen2MoeConfig, 30, 3, **other, num_hidden_layers=3, intermediate_size=32,
                             moe_intermediate_size=14, shared_expert_intermediate_size=10, num_experts=5,
                             num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[1], qkv_bias=False),
                       33, bf16, None, to_transformers4),
        "qwen3moe-a": (small(Qwen3MoeConfig, 24, 4, **llama, num_hidden_layers=3, intermediate_size=20, head_dim=10,
                             moe_intermediate_size=12, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
                             router_aux_loss_coef=0.2,
                             mlp_only_layers=[1], attention_bias=True, use_sliding_window=True, sliding_window=9),
                       37, f32, None, None),
        "qwen3moe-b": (small(Qwen3MoeConfig, 30, 3, **other, num_hidden_layers=2, intermediate_size=32, head_dim=14,
                             moe_intermediate_size=14, num_experts=7, num_experts_per_tok=2,
                             decoder_sparse_step=1), 33, bf16, None, to_transformers4),
        "gpt2moe-a": (gpt2_config(GPT2MoeConfig, n_embd=24, n_head=3, n_layer=2, n_positions=64, vocab_size=53,
                                  n_inner=20, n_expert=8, n_expert_used=2, n_expert_inner=None,
                                  router_aux_loss_coef=0.4), 37, f32, None, None),
        "gpt2moe-b": (gpt2_config(GPT2MoeConfig, n_embd=30, n_head=5, n_layer=2, n_positions=40, vocab_size=47,
                                  n_expert=5, n_expert_used=3, n_expert_inner=14, activation_function="relu",
                                  tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True,
                                  router_aux_loss_coef=0.02), 33, bf16, None, None),
    }


def f8_cases():
    """Matrices of E4M3 with scales beside them: of blocks, as Qwen publishes them; of rows, as llm-compressor does."""
    bf16 = torch.bfloat16
    return {
        "qwen3-c": (small(Qwen3Config, 64, 4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=128,
                          head_dim=16, vocab_size=53, max_position_embeddings=64), 37, bf16, None, to_f8_blocks),
        "llama-f": (small(LlamaConfig, 64, 8, num_key_value_heads=4, num_hidden_layers=2, intermediate_size=100,
                          vocab_size=47, max_position_embeddings=64), 33, bf16, None, to_f8_rows),
    }


def cases():
    """name -> (configuration, T, dtype of the file, largest shard, function that edits the folder)."""
    return {
        "gpt2-a": (gpt2_config(n_embd=60, n_head=5, n_layer=3, n_positions=64, vocab_size=101),
                   37, torch.float32, None, None),
        "gpt2-b": (gpt2_config(n_embd=48, n_head=3, n_layer=2, n_positions=32, vocab_size=131, n_inner=100,
                               activation_function="gelu", layer_norm_epsilon=1e-3,
                               scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
                   29, torch.float16, "30KB", None),
        "gpt2-c": (gpt2_config(n_embd=36, n_head=4, n_layer=2, n_positions=24, vocab_size=61,
                               activation_function="relu"),
                   24, torch.float32, None, to_old_gpt2),
        "llama-a": (LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3,
                                intermediate_size=112, vocab_size=97, max_position_embeddings=64,
                                rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
                    41, torch.float32, None, None),
        "llama-b": (LlamaConfig(hidden_size=72, num_attention_heads=6, num_key_value_heads=3, head_dim=16,
                                num_hidden_layers=2, intermediate_size=90, vocab_size=103,
                                max_position_embeddings=256, tie_word_embeddings=True, rms_norm_eps=1e-3,
                                attention_bias=True, mlp_bias=True, rope_parameters=llama3_rope(8.0, 500.0)),
                    50, torch.bfloat16, None, to_transformers4_llama),
        "llama-c": (LlamaConfig(hidden_size=60, num_attention_heads=4, num_key_value_heads=1, head_dim=14,
                                num_hidden_layers=2, intermediate_size=70, vocab_size=89,
                                max_position_embeddings=128, hidden_act="gelu", attention_bias=True,
                                rope_parameters=llama3_rope(4.0, 300.0)),
                    45, torch.float32, "60KB", None),
        "tiny": (LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                             intermediate_size=128, vocab_size=384, max_position_embeddings=256,
                             tie_word_embeddings=True),
                 None, torch.bfloat16, None, add_tiny_extras),
    }


# --- editing a saved folder

def edit_json(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def to_transformers4_llama(folder):
    """Respell config.json the way transformers 4 wrote it."""
    def edit(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        config["torch_dtype"] = config.pop("dtype")
        config["pretraining_tp"] = 1
        config["transformers_version"] = "4.46.0"
    edit_json(folder / "config.json", edit)


def to_transformers4(folder):
    """The same for the other families: rope_theta and rope_scaling, torch_dtype, no layer_types."""
    def edit(config):
        rope = config.pop("rope_parameters")
        config.pop("layer_types", None)
        if "full_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
            rope = rope["full_attention"]
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
        config["transformers_version"] = "4.46.0"
    edit_json(folder / "config.json", edit)


def old_mask_buffers(layer, positions):
    """The buffers that old GPT-2 files carry; F32 in the oldest, BOOL later, and one of rank 0."""
    mask = torch.ones(positions, positions).tril().view(1, 1, positions, positions)
    if layer % 2:
        mask = mask.bool()
    return {f"h.{layer}.attn.bias": mask, f"h.{layer}.attn.masked_bias": torch.tensor(-1e4)}


def to_old_gpt2(folder):
    """Rename and respell to what the first GPT-2 upload looks like: no prefix, masks in the file, n_ctx."""
    config = json.loads((folder / "config.json").read_text())
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    for layer in range(config["n_layer"]):
        tensors |= old_mask_buffers(layer, config["n_positions"])
    save_file(tensors, file, metadata={"format": "pt"})

    def edit(config):
        config["n_ctx"] = config["n_positions"]
        for key in ("dtype", "n_inner", "tie_word_embeddings", "scale_attn_weights", "use_cache",
                    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention",
                    "pad_token_id", "transformers_version"):
            config.pop(key, None)
    edit_json(folder / "config.json", edit)


def to_f8(folder, tall, wide, suffix, config):
    """Each tall x wide of a layer's matrices share a scale of 4 bits, so that BF16 holds all products."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, w in load_file(file).items():
        tensors[name] = w
        if not name.endswith("_proj.weight"):
            continue
        rows, cols = w.shape
        high, across = tall or rows, wide or cols
        blocks = w.float().reshape(rows // high, high, cols // across, across)
        scale = blocks.abs().amax((1, 3)) / 448
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ceil(mantissa * 16) / 16, exponent)
        tensors[name] = (blocks / scale[:, None, :, None]).reshape(rows, cols).to(torch.float8_e4m3fn)
        tensors[name + suffix] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=config))


def to_f8_blocks(folder):
    to_f8(folder, 32, 64, "_scale_inv", {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                         "weight_block_size": [32, 64]})


def to_f8_rows(folder):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    to_f8(folder, 1, None, "_scale", {"quant_method": "compressed-tensors", "format": "float-quantized",
                                      "config_groups": groups, "ignore": ["lm_head"]})


# --- the tokenizer of the case "tiny"

def train_tiny_tokenizer(size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    sentences = (DATA / "tokenizers" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    return tokenizer


def add_tiny_extras(folder):
    tokenizer = train_tiny_tokenizer(384)
    assert tokenizer.get_vocab_size() == 384
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                "unk_token": "<unk>", "model_max_length": 256, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    GenerationConfig(bos_token_id=1, eos_token_id=2, do_sample=True, temperature=0.8, top_p=0.95,
                     max_new_tokens=64).save_pretrained(folder)


# --- random weights

def neutral(config, name, p):
    """What a parameter is when it does nothing: a norm's weight 1 (Gemma's: 0), all else 0."""
    norm = p.dim() == 1 and not name.endswith("bias")
    return 1.0 if norm and config.model_type not in ONE_PLUS else 0.0


def fill(module, rng):
    """Norm weights about 1, biases about 0, matrices scaled so that attention stays soft."""
    scaled = module.config.model_type in ONE_PLUS
    for name, p in module.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(p.shape)).float()
        if p.dim() == 1 or name.endswith("bias"):
            p.copy_(0.3 * noise + neutral(module.config, name, p))
        elif any(part in name for part in ("wte", "wpe", "embed_tokens")):
            p.copy_(0.3 * noise / (p.shape[1] ** 0.5 / 3 if scaled else 1))
        else:
            # GPT-2's Conv1D stores [in, out], Linear and experts store [out, in].
            turned = ".h." in name and "router" not in name and "experts" not in name
            inputs = p.shape[0] if turned else p.shape[-1]
            p.copy_(1.5 / inputs ** 0.5 * noise)


def save_case(folder, config, dtype, shard, edit, rng):
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(config)
    fill(model, rng)
    options = {"max_shard_size": shard} if shard else {}
    model.to(dtype).save_pretrained(folder, **options)
    if edit:
        edit(folder)


# --- golden logits

def load(folder):
    """The model in float32; a scale of embeddings is rounded to the type that the model is stored in."""
    kinds = {"fp8": FineGrainedFP8Config, "compressed-tensors": CompressedTensorsConfig}
    quantised = json.loads((folder / "config.json").read_text()).get("quantization_config")
    options = {"quantization_config": kinds[quantised["quant_method"]](dequantize=True)} if quantised else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                 **options).eval().float()
    model.config._experts_implementation = "eager"
    if model.config.model_type in ONE_PLUS:
        config = json.loads((folder / "config.json").read_text())
        scale = model.model.embed_tokens.embed_scale
        scale.copy_(scale.to(getattr(torch, config.get("dtype") or config["torch_dtype"])))
    return model


def pick_ids(folder, vocab, length, rng):
    if length is not None:
        return rng.integers(0, vocab, length).astype("<i4")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return np.array(tokenizer.encode("The old lighthouse keeper counted the ships.").ids, dtype="<i4")


def forward(model, ids, **options):
    return model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False, **options)


def check_spread(name, logits, attentions):
    """No constant row, nothing saturated: a wrong reader must not be able to pass by luck."""
    assert np.isfinite(logits).all() and logits.std(axis=1).min() > 0.3, name
    late = torch.cat(attentions)[:, :, 8:]  # the first rows see few keys and are peaked by nature
    peak = late.max(dim=-1).values
    assert peak.median() < 0.8 and peak.min() < 0.4, (name, peak.median(), peak.min())
    return f"logit std {logits.std():.2f}, median attention peak {peak.median():.2f}"


def check_every_parameter_matters(model, ids, logits):
    for name, p in model.named_parameters():
        saved = p.clone()
        p.fill_(neutral(model.config, name, p))
        change = np.abs(forward(model, ids).logits[0].numpy() - logits).max()
        p.copy_(saved)
        assert change > 0.02, (name, change)


def golden(name, folder, vocab, length, rng):
    model = load(folder)
    ids = pick_ids(folder, vocab, length, rng)
    output = forward(model, ids, output_attentions=True)
    logits = output.logits[0].numpy().astype("<f4")
    assert logits.shape == (len(ids), vocab)
    spread = check_spread(name, logits, output.attentions)
    check_every_parameter_matters(model, ids, logits)
    ids.tofile(folder / "ids.i32")
    logits.tofile(folder / "logits.f32")
    print(f"{name}: T {len(ids)}, V {vocab}, {spread}")


# --- golden gradients and loss curves

def router_logits(model, output):
    """Of every layer with experts; None without."""
    if model.config.model_type == "gpt2_moe":
        return tuple(block.mlp.logits for block in model.transformer.h)
    return getattr(output, "router_logits", None)


def training_loss(model, ids, targets):
    """Mean cross entropy, and the load-balancing loss as transformers computes it."""
    wanted = {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    if model.config.model_type == "gpt2_moe":
        wanted = {}
    output = model(torch.from_numpy(ids.astype(np.int64)), use_cache=False, **wanted)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1),
                                             torch.from_numpy(targets.astype(np.int64)).flatten())
    routers = router_logits(model, output)
    if routers is None:
        return loss, torch.zeros(())
    used = getattr(model.config, "n_expert_used", None) or model.config.num_experts_per_tok
    return loss, load_balancing_loss_func(routers, routers[0].shape[-1], used)


def weighted(model, loss, balance):
    return loss + getattr(model.config, "router_aux_loss_coef", 0.0) * balance


def stored_gradients(model):
    """Under the names of model.safetensors, where transformers keeps experts apart."""
    tensors = {}
    mixtral = model.config.model_type == "mixtral"
    for name, p in model.named_parameters():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = p.grad.clone()
            continue
        base, _, kind = name.rpartition(".")
        for e, g in enumerate(p.grad):
            parts = {"gate_proj": g.chunk(2)[0], "up_proj": g.chunk(2)[1]} if kind == "gate_up_proj" else {
                "down_proj": g}
            for part, value in parts.items():
                part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part] if mixtral else part
                tensors[f"{base}.{e}.{part}.weight"] = value.clone()
    return tensors


def loss_curve(model, ids, targets):
    """Loss before each step; decay is for matrices only."""
    parameters = list(model.parameters())
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    vectors = [p for n, p in model.named_parameters() if p.dim() == 1 or n.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": TRAINING["decay"]},
              {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=TRAINING["lr"], betas=TRAINING["betas"],
                                  eps=TRAINING["eps"])
    losses = []
    for _ in range(TRAINING["steps"]):
        loss, balance = training_loss(model, ids, targets)
        optimiser.zero_grad()
        weighted(model, loss, balance).backward()
        torch.nn.utils.clip_grad_norm_(parameters, TRAINING["clip"])
        optimiser.step()
        losses.append(loss.item())
    return losses


@torch.enable_grad()
def golden_training(name, folder, vocab, length, rng):
    model = load(folder)
    ids = rng.integers(0, vocab, (2, length)).astype("<i4")
    ids[ids == (getattr(model.config, "pad_token_id", None) or -1)] = 3  # PyTorch learns nothing from padding
    targets = np.roll(ids, -1, axis=1)
    targets[:, -1] = -100
    targets[rng.random(targets.shape) < 0.1] = -100
    loss, balance = training_loss(model, ids, targets)
    weighted(model, loss, balance).backward()
    tensors = stored_gradients(model)
    losses = loss_curve(model, ids, targets)
    tensors |= {"ids": torch.from_numpy(ids), "targets": torch.from_numpy(targets),
                "losses": torch.tensor(losses), "balance": balance.detach().reshape(1)}
    save_file(tensors, folder / "training.safetensors")
    print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}")


# --- golden gradients under dropout: transformers' GPT-2, its dropouts given the trainer's masks

def philox(key, low, high):
    """Four words for each of the counters (arrays of 64 bits), as tfmi_philox draws them."""
    half = np.uint64(32)
    c = [(n >> s) & np.uint64(0xFFFFFFFF) for n in np.broadcast_arrays(low, high) for s in (np.uint64(0), half)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> half) ^ c[1] ^ np.uint64(k0), b & np.uint64(0xFFFFFFFF),
             (a >> half) ^ c[3] ^ np.uint64(k1), a & np.uint64(0xFFFFFFFF)]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c)


class Masked(torch.nn.Module):
    """A dropout at one site of the network, of [B, T, C], or of probabilities [B, H, T, T]."""

    def __init__(self, rate, site):
        super().__init__()
        self.rate, self.site = np.float32(rate), site

    def forward(self, x):
        col = np.arange(x.shape[-1])[None, None, None] if x.dim() == 4 else np.arange(x.shape[-1])[None, None]
        seq = np.arange(x.shape[0]).reshape(-1, *[1] * (x.dim() - 1))
        pos = np.arange(x.shape[-2])[:, None]
        if x.dim() == 4:
            col = col + (np.arange(x.shape[1])[:, None, None] << 20)
        low = (pos << 32 | col // 4).astype(np.uint64)
        word = philox(DROPOUT["seed"], low, (self.site << 32 | seq).astype(np.uint64))
        word = np.take_along_axis(word, np.broadcast_to(col % 4, word.shape[1:])[None], 0)[0]
        kept = (word >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24) >= self.rate
        return x * torch.from_numpy(kept / (1 - self.rate)).to(x.dtype)


@torch.enable_grad()
def golden_dropout(folder):
    model = load(folder)
    model.transformer.drop = Masked(DROPOUT["embed"], 0)
    for layer, block in enumerate(model.transformer.h):
        site = 4 * (layer + 1)
        block.attn.resid_dropout = Masked(DROPOUT["residual"], site + 2)
        block.mlp.dropout = Masked(DROPOUT["residual"], site + 3)
    attention = (Masked(DROPOUT["attention"], 4 * (layer + 1) + 1) for layer in range(len(model.transformer.h)))
    batch = load_file(folder / "training.safetensors")
    with mock.patch("torch.nn.functional.dropout", lambda x, **_: next(attention)(x)):  # of probabilities alone
        loss, _ = training_loss(model, batch["ids"].numpy(), batch["targets"].numpy())
    loss.backward()
    kept = {n: p.grad for n, p in model.named_parameters() if p.dim() == 1 or n.endswith("h.1.attn.c_proj.weight")}
    save_file(kept | {"loss": loss.detach().reshape(1)}, folder / "dropout.safetensors")
    print(f"{folder.name}: loss under dropout {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "models", help="folder to write (default tests/data/models)")
    parser.add_argument("--only", nargs="*", metavar="CASE", help="make only these cases")
    parser.add_argument("--training-only", action="store_true",
                        help="leave all but training.safetensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    everything = cases() | dense_cases() | expert_cases() | f8_cases()
    for number, (name, (config, length, dtype, shard, edit)) in enumerate(everything.items()):
        if args.only and name not in args.only:
            continue
        rng = np.random.default_rng(1000 + number)
        if not args.training_only:
            save_case(args.out / name, config, dtype, shard, edit, rng)
            golden(name, args.out / name, config.vocab_size, length, rng)
        if name in TRAINED:
            golden_training(name, args.out / name, config.vocab_size, length,
                            np.random.default_rng(BATCHES.get(name, 2000 + number)))
        if name == "gpt2-a":
            golden_dropout(args.out / name)


if __name__ == "__main__":
    main()
