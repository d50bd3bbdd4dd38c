"""On the CPU platform what a request gets does not depend on what else is computed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_talker import (
    HiggsFusedMultiTextHead,
)

from vllm_tts_cache.platforms.cpu_kernels import (
    BLOCK_SIZES,
    MAX_ISA,
    SeparateRows,
    choose_block_size,
    dense_positions,
    leave_out_matrices,
    separate_rows,
)

# oneDNN multiplies bfloat16 by itself from there on only.
HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(scope="module")
def kernels():
    current_platform.import_kernels()


# Of real talkers: queries, keys and values, and what follows them.
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(2_560, 6_144), (4_096, 2_560), (2_048, 2_048)]
)
@pytest.mark.parametrize("of_vllm", [True, False], ids=["vllm", "torch"])
def test_a_layers_row_depends_on_no_batch(kernels, num_inputs, num_outputs, of_vllm):
    weight = torch.randn(num_outputs, num_inputs).bfloat16()
    rows = torch.randn(20, num_inputs).bfloat16()
    if of_vllm:
        try:
            handler = ops.create_onednn_mm(weight.t(), 32)
        except RuntimeError as exc:
            assert "primitive" in str(exc) and not HAS_AVX512
            pytest.skip("oneDNN has no bfloat16 here, and vLLM takes torch's layers")
        layer = SeparateRows(lambda block: ops.onednn_mm(handler, block, None))
    else:
        layer = SeparateRows(lambda block: functional.linear(block, weight))
    whole = layer(rows)
    for size in (1, 3, 9):
        assert torch.equal(torch.cat([layer(part) for part in rows.split(size)]), whole)
    exact = functional.linear(rows.float(), weight.float())
    assert torch.allclose(whole.float(), exact, atol=1.0, rtol=0.02)


def test_a_layer_keeps_its_shape_its_bias_and_its_values():
    layer: Any = torch.nn.Linear(16, 512).bfloat16()
    inputs = torch.randn(3, 5, 16).bfloat16()
    with torch.no_grad():
        expected = layer(inputs)
        separate_rows(layer)
        separate_rows(layer)
        ours, empty = layer(inputs), layer(inputs[:, :0])
    assert torch.allclose(ours.float(), expected.float(), atol=0.02)
    assert empty.shape == (3, 0, 512)
    assert not isinstance(layer.forward._multiply, SeparateRows)


def test_a_weight_that_is_multiplied_without_a_layer_is_separated_as_well():
    class Fused(torch.nn.Module):
        _fused_qkv_weight = None

        def precompute_fused_qkv(self):
            if self._fused_qkv_weight is None:
                self._fused_qkv_weight = torch.randn(512, 128).bfloat16()

    module = Fused()
    separate_rows(module)
    weight = module._fused_qkv_weight
    separate_rows(module)
    assert module._fused_qkv_weight is weight and weight is not None
    rows = torch.randn(40, 128).bfloat16()
    whole = functional.linear(rows, weight)
    assert type(whole) is torch.Tensor
    for size in (1, 3, 17):
        parts = [functional.linear(part, weight) for part in rows.split(size)]
        assert torch.equal(torch.cat(parts), whole)
    plain = functional.linear(rows.float(), weight.float())
    assert torch.allclose(whole.float(), plain, atol=1.0, rtol=0.02)


def test_so_is_a_head_of_several_codebooks():
    head = HiggsFusedMultiTextHead(num_codebooks=8, vocab_size=1_026, hidden_size=256)
    torch.nn.init.normal_(head.weight)
    head.to(torch.bfloat16).requires_grad_(False)
    rows = torch.randn(9, 256).bfloat16()
    expected = head.generate(rows)
    separate_rows(head)
    separate_rows(head)
    whole = head.generate(rows)
    assert whole.shape == expected.shape == (9, 8, 1_026)
    assert torch.allclose(whole.float(), expected.float(), atol=1.0, rtol=0.02)
    for size in (1, 4):
        parts = [head.generate(part) for part in rows.split(size)]
        assert torch.equal(torch.cat(parts), whole)


def test_rows_go_alone_where_their_place_matters():
    sizes = []

    def multiply(block):
        sizes.append(len(block))
        return block.repeat(1, 50) + torch.arange(len(block))[:, None]

    assert choose_block_size(multiply, torch.zeros(1, 4)) == 1
    assert sizes == list(BLOCK_SIZES)


def test_a_size_at_which_a_place_matters_is_passed_over():
    def multiply(block):
        uneven = len(block) == BLOCK_SIZES[0]
        return block.repeat(1, 50) + uneven * torch.arange(len(block))[:, None]

    assert choose_block_size(multiply, torch.zeros(1, 4)) == BLOCK_SIZES[1]


def test_each_row_is_turned_by_its_own_position(kernels):
    """Positions as a second decoder has them: a column of a table."""
    table = torch.arange(11).expand(4, -1).contiguous()
    cache = torch.randn(32, 64).bfloat16()

    def rotate(positions, queries):
        turned = queries.clone()
        ops.rotary_embedding(positions, turned, queries.clone(), 64, cache, False)
        return turned

    queries = torch.randn(4, 128).bfloat16()
    expected = rotate(torch.full((4,), 3), queries)
    assert torch.equal(dense_positions(rotate)(table[:, 3], queries), expected)


@pytest.fixture
def packed(monkeypatch):
    """Whether vLLM packs a weight, on a processor with AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    real = utils.check_cpu_sgl_kernel
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", real)  # put back afterwards
    return lambda: utils.check_cpu_sgl_kernel(64, 64, torch.bfloat16)


def test_a_limit_that_the_user_set_stays(monkeypatch, packed):
    assert packed()
    monkeypatch.setenv(MAX_ISA, "AVX512_CORE_BF16")
    leave_out_matrices()
    assert packed()
    monkeypatch.setenv(MAX_ISA, "avx512_core")
    leave_out_matrices()
    assert os.environ[MAX_ISA] == "avx512_core"
    assert not packed()  # it would abort the process


def test_without_one_it_is_what_has_bfloat16_and_no_matrices(monkeypatch, packed):
    monkeypatch.setenv(MAX_ISA, "")  # put back afterwards
    monkeypatch.delenv(MAX_ISA)
    leave_out_matrices()
    assert os.environ[MAX_ISA] == "AVX512_CORE_BF16"
    assert packed()


def test_a_processor_without_amx_keeps_all_that_it_has(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.delenv(MAX_ISA, raising=False)
    leave_out_matrices()
    assert MAX_ISA not in os.environ


def test_seam_torch_asks_for_the_tiles_of_amx():
    answer = torch.cpu._init_amx()
    assert answer is torch.cpu._is_amx_tile_supported()
