"""Attention for verify blocks on CPU: adds to SGLang's `torch_native` backend what speculation needs.

The target verifies a causal chain of rows after each request's prefix, all of one width or packed ragged; the drafter
attends without causality inside its block. Both arrive as TARGET_VERIFY, which the stock backend does not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout


class TorchCpuAttention(TorchNativeAttnBackend):
    """`torch_native` with verify blocks."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Any:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        widths = _block_widths(forward_batch)
        requests = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), widths, strict=True)
        outputs = []
        for block, (slot, prefix, width) in zip(rows.split(widths), requests, strict=True):
            cells = table[slot, : prefix + width].long()
            outputs.append(
                F.scaled_dot_product_attention(
                    block.transpose(0, 1)[None],
                    keys[cells].to(q.dtype).transpose(0, 1)[None],
                    values[cells].to(q.dtype).transpose(0, 1)[None],
                    attn_mask=_mask(layer, prefix, width),
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs).reshape(q.shape[0], -1)


def _block_widths(forward_batch: Any) -> list[int]:
    """Rows of each request in this verify step."""
    layout = resolve_ragged_verify_layout(forward_batch)
    if layout is None:
        return [int(forward_batch.spec_info.draft_token_num)] * forward_batch.batch_size
    return list(layout.verify_lens_cpu or layout.verify_lens.tolist())


def _mask(layer: Any, prefix: int, width: int) -> torch.Tensor | None:
    """[width, prefix + width] bool, or None when every row sees everything."""
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    window = layer.sliding_window_size
    windowed = window is not None and window > -1
    if not causal and not windowed:
        return None
    row, column = prefix + torch.arange(width)[:, None], torch.arange(prefix + width)[None, :]
    seen = column <= row if causal else torch.ones(width, prefix + width, dtype=torch.bool)
    return seen & (column >= row - window) if windowed else seen
