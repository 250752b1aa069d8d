"""Tiny random models of Hugging Face transformers, as they are in the package; nothing is
downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers as hf

from tests.support.models.case import Batch, Case

VOCAB, WIDTH, TIME = 22, 16, 7


def tokens(batch: int = 4, time: int = TIME, seed: int = 5) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


def language(batch: int = 4) -> Batch:
    ids = tokens(batch)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(batch: int = 4) -> Batch:
    """The second half of the batch is shorter; what is not there is not in the loss."""
    ids, labels, mask = tokens(batch), tokens(batch, seed=6), torch.ones(batch, TIME).long()
    mask[batch // 2 :, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def gpt2() -> torch.nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB, n_positions=12, n_embd=WIDTH, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama(heads: int = 4, kv_heads: int = 2, vocab: int = VOCAB, mlp: int = 20) -> torch.nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=vocab, hidden_size=4 * heads, intermediate_size=mlp, num_hidden_layers=2,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=16,
            head_dim=4,
        )
    )  # fmt: skip


def bert() -> torch.nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=20, max_position_embeddings=12, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> torch.nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB, d_model=WIDTH, d_kv=4, d_ff=20, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, relative_attention_num_buckets=8,
        )
    )  # fmt: skip


def mixtral(experts: str = "eager") -> torch.nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, max_position_embeddings=16, output_router_logits=True,
            experts_implementation=experts,
        )
    )  # fmt: skip


def qwen2_moe() -> torch.nn.Module:
    return hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=12, moe_intermediate_size=6,
            shared_expert_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_experts=5, num_experts_per_tok=3, max_position_embeddings=16,
            output_router_logits=True, experts_implementation="eager",
        )
    )  # fmt: skip


def qwen3_moe() -> torch.nn.Module:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=12, moe_intermediate_size=6,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
            num_experts=6, num_experts_per_tok=2, max_position_embeddings=16,
            output_router_logits=True, experts_implementation="batched_mm",
        )
    )  # fmt: skip


def deepseek_v3() -> torch.nn.Module:
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=12, moe_intermediate_size=6,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
            n_group=4, topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1,
            n_shared_experts=1, kv_lora_rank=4, q_lora_rank=6, qk_rope_head_dim=4, v_head_dim=4,
            qk_nope_head_dim=4, max_position_embeddings=16, experts_implementation="eager",
        )
    )  # fmt: skip


def gpt_oss() -> torch.nn.Module:
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=6, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_local_experts=4,
            num_experts_per_tok=2, max_position_embeddings=16, sliding_window=4,
            output_router_logits=True, experts_implementation="eager",
        )
    )  # fmt: skip


def vit() -> torch.nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20,
            image_size=8, patch_size=4, num_labels=6, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def images(batch: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(batch) % 6}


def own_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


ATTENTION, COLUMN, ROW = "self_attn.[qkv]_proj", 0, 1
GPT2 = {
    "transformer.wte.weight": 0,
    "*.mlp.c_fc.weight": 1,  # GPT-2's Conv1D: [in, out]
    "*.mlp.c_fc.bias": 0,
    "*.mlp.c_proj.weight": 0,
}
LLAMA = {
    "model.embed_tokens.weight": COLUMN,
    "*.self_attn.[qkv]_proj.weight": COLUMN,
    "*.self_attn.o_proj.weight": ROW,
    "*.mlp.gate_proj.weight": COLUMN,
    "*.mlp.up_proj.weight": COLUMN,
    "*.mlp.down_proj.weight": ROW,
    "lm_head.weight": COLUMN,
}
BERT = {
    "bert.embeddings.word_embeddings.weight": COLUMN,
    "*.attention.self.*": COLUMN,
    "*.attention.output.dense.weight": ROW,
    "*.intermediate.dense.*": COLUMN,
    "bert.encoder.layer.*.output.dense.weight": ROW,
    "cls.predictions.bias": COLUMN,
}
T5 = {
    "shared.weight": COLUMN,
    "*.[qkv].weight": COLUMN,
    "*.o.weight": ROW,
    "*.relative_attention_bias.weight": ROW,
    "*.wi.weight": COLUMN,
    "*.wo.weight": ROW,
}
MIXTRAL = {
    "model.embed_tokens.weight": COLUMN,
    "*.self_attn.[qkv]_proj.weight": COLUMN,
    "*.self_attn.o_proj.weight": ROW,
    "*.experts.down_proj": 2,
    "lm_head.weight": COLUMN,
}
VIT = {
    "*.attention.[qkv]_proj.*": COLUMN,
    "*.attention.o_proj.weight": ROW,
    "*.mlp.fc1.*": COLUMN,
    "*.mlp.fc2.weight": ROW,
    "classifier.*": COLUMN,
}

SINGLE = 1e-6  # the loss is taken of logits.float(), a norm computes in float32
CASES = [
    Case("gpt2", gpt2, language, own_loss, GPT2, SINGLE),
    Case("llama", llama, language, own_loss, LLAMA, SINGLE),
    Case("bert", bert, padded, own_loss, BERT),
    Case("t5", t5, padded, own_loss, T5, SINGLE),
    Case("mixtral", mixtral, language, own_loss, MIXTRAL, SINGLE),
    Case("vit", vit, images, own_loss, VIT),
]
# As it comes: its experts are one grouped product, which exists in float32 and below only.
GROUPED = Case(
    "mixtral, grouped",
    lambda: mixtral("grouped_mm"),
    language,
    own_loss,
    MIXTRAL,
    2e-5,
    dtype=torch.float32,
)
MIXTURES = [
    Case("qwen2_moe", qwen2_moe, language, own_loss, {}, SINGLE),
    Case("qwen3_moe", qwen3_moe, language, own_loss, {}, SINGLE),
    Case("deepseek_v3", deepseek_v3, language, own_loss, {}, SINGLE),
    Case("gpt_oss", gpt_oss, language, own_loss, {}, SINGLE),
]
# Three heads, 23 words, 21 hidden units and 5 sequences, over two ranks.
UNEVEN = Case(
    "uneven llama", lambda: llama(3, 3, 23, 21), lambda: language(5), own_loss, LLAMA, SINGLE
)
