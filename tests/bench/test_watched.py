"""Names of kernels to groups."""

from __future__ import annotations

import pytest

from longstraw_backend.bench.watched import GROUPS, group_of


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256",
            "attention",
        ),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNN", "matmul"),
        ("aten::mm", "matmul"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta rule"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::empty", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS
