"""The Hopper kernels of sparse attention and the index scores, compiled for sm_90a without a GPU."""

import importlib.util

import pytest

from tests import deviceless

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing())),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
# entry point: (factory, case, most registers a thread, bytes allowed to spill). The attention kernel's four roles share
# 512 threads of 128 registers, of which its products take more and its loads less. In the dense scorer, which is held to
# 168 so that three programs fit a multiprocessor, a few address registers go to the stack.
CASES = {
    "attention": ("pallas_kernels.sparse_attention.specs:deviceless_case", "m384_r1", 128, 0),
    # The window alone, K = 0: 8 bytes go to the stack.
    "attention window": ("pallas_kernels.sparse_attention.specs:deviceless_case", "m384_swa", 128, 8),
    "attention ahead": ("pallas_kernels.sparse_attention.specs:deviceless_case", "m384_r1:hopper_ahead", 128, 0),
    "attention 19 GB": ("pallas_kernels.sparse_attention.specs:deviceless_case", "m384_1m", 128, 0),
    "attention 19 GB ahead": ("pallas_kernels.sparse_attention.specs:deviceless_case", "m384_1m:hopper_ahead", 128, 0),
    "dense": ("pallas_kernels.index_score.specs:deviceless_case", "m384_16k", 168, 96),
    "dense 9 GB": ("pallas_kernels.index_score.specs:deviceless_case", "m384_16k:capacity_1m", 168, 96),
    "blocks 9 GB": ("pallas_kernels.index_score.specs:deviceless_case", "m384_blocks:gather:capacity_1m", 80, 0),
    "request_blocks 9 GB": ("pallas_kernels.index_score.specs:deviceless_case", "m384_blocks:capacity_1m", 128, 0),
    "blocks": ("pallas_kernels.index_score.specs:deviceless_case", "m384_blocks:gather", 80, 0),
    "request_blocks": ("pallas_kernels.index_score.specs:deviceless_case", "m384_blocks", 128, 0),
}


@pytest.mark.parametrize("entry", CASES)
def test_kernel_uses_wgmma_and_waits_for_its_predecessor(entry):
    factory, case, registers, spill = CASES[entry]
    compiled = deviceless.compile_for("sm_90a", factory, case)
    entry = entry.partition(" ")[0]
    kernel = compiled.matching(entry)
    assert [k.name for k in kernel.kernels] == [entry]
    assert "wgmma.mma_async" in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
    assert kernel.registers <= registers and kernel.spill_bytes <= spill, kernel.kernels
    assert not any(k.serialised for k in kernel.kernels), "a product is to run while another is summed"
    assert "copy(" not in compiled.hlo, "no pool may be copied on its way to the kernel"
