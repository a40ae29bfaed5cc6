"""Covers: kernels/common/philox.py, kernels/common/philox_triton.py, kernels/common/draw.py."""

import pytest
import torch
from kernel_checks import element_draws, run_as_script

from megafx.kernels.common import philox
from megafx.kernels.common.draw import runs_of
from megafx.placements.types import Layout

# Random123's kat_vectors: (counter word, key word) repeated, rounds -> output. The third uses the digits of pi.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ONES = ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
KNOWN = [
    (((0,) * 4, (0,) * 2), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    (((0,) * 4, (0,) * 2), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (ONES, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]


def plain_philox(counter, key, rounds=7):
    """The paper's round, on Python integers."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for r in range(rounds):
        high0, low0 = divmod(x0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(x2 * 0xCD9E8D57, 2**32)
        a, b = (k0 + r * 0x9E3779B9) % 2**32, (k1 + r * 0xBB67AE85) % 2**32
        x0, x1, x2, x3 = high1 ^ x1 ^ a, low1, high0 ^ x3 ^ b, low0
    return x0, x1, x2, x3


def plain_draw(i, seed, op_id):
    """Reference for the draw of element i, on Python integers."""
    words = plain_philox(((i >> 3) % 2**32, i >> 35, op_id, 0), (seed % 2**32, (seed >> 32) % 2**32))
    return words[(i % 8) >> 1] >> (16 * (i & 1)) & 0xFFFF


@pytest.mark.parametrize("inputs, rounds, expected", KNOWN)
def test_known_answers(inputs, rounds, expected):
    counter, key = inputs
    assert plain_philox(counter, key, rounds) == expected
    assert philox.philox4x32(counter, key, rounds) == expected
    as_tensors = tuple(torch.full((3,), c) for c in counter)
    for word, value in zip(philox.philox4x32(as_tensors, key, rounds), expected, strict=True):
        assert word.tolist() == [value] * 3


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
@pytest.mark.parametrize("start", [0, 5, 2**33 - 3, 2**35 - 4, 2**36 + 11])
def test_draws_are_the_definition(seed, start):
    """Counters past 2**33 elements, and groups past 2**32, included."""
    index = start + torch.arange(40)
    key = philox.key_of(torch.tensor(seed))
    assert element_draws(index, key, 77).tolist() == [plain_draw(i, seed, 77) for i in index.tolist()]


@pytest.mark.parametrize("first", [0, 2**32 - 3, 2**32 + 5])
@pytest.mark.parametrize("below", [1, 6554, 0x7FFF, 0x8000, 0x8001, 65535])
def test_fast_path_draws_the_same(first, below):
    """One call for 8 elements, compared as signed halves, against one call an element; high word constant or not."""
    groups, key = first + torch.arange(64), (17, 2**31 + 5)
    high = groups >> 32 if first >> 32 != (first + 63) >> 32 else first >> 32
    drop = philox.dropped(groups & philox.MASK, high, key, 3, below)
    draws = element_draws(first * 8 + torch.arange(512), key, 3)
    assert torch.equal(drop.view(-1), draws < below)


def test_threshold_and_scale_are_unbiased():
    assert philox.threshold(0.1) == 6554 and philox.threshold(0) == 0 and philox.threshold(1) == 65536
    for p in (0.0, 1e-7, 0.1, 0.5, 0.999):
        assert (1 - philox.threshold(p) / 65536) * philox.scale(p) == pytest.approx(1, abs=1e-15)
    assert philox.scale(1.0) == float("inf")


LAYOUTS = [
    Layout.from_flat((1, 12, 1)),
    Layout.from_flat((1, 7, 1)),  # padded
    Layout.from_flat((1, 5, 8)),  # units of 8, padded
    Layout.from_flat((3, 8, 1)),
    Layout.from_flat((2, 3, 4, 5, 2)),  # blocks
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_runs_agree_with_pieces(layout, t, dim):
    """Every element that Layout.pieces gives a rank has, in the runs, the index of that element in the whole tensor."""
    shape = [2, 3, 5]
    shape[dim] = layout.size
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    local_shape = [*shape]
    local_shape[dim] = layout.local_size(t)
    for rank in range(t):
        index = torch.full(local_shape, -1)
        for run in runs_of(local_shape, dim, layout.flat(), rank, t):
            rows = run.global_start + torch.arange(run.rows)[:, None] * run.global_stride + torch.arange(run.length)
            index.as_strided((run.rows, run.length), (run.local_stride, 1), run.local_start).copy_(rows)
        assert (index >= 0).all()
        for start, local, length in layout.pieces(rank, t):
            assert torch.equal(index.narrow(dim, local, length), whole.narrow(dim, start, length))


def test_wrong_local_shape_is_an_error():
    with pytest.raises(ValueError, match=r"dim 1 of local shape \(2, 5\) is not a shard of layout 12 on 3 ranks"):
        runs_of((2, 5), 1, (1, 12, 1), 0, 3)


KERNEL = """
import torch, triton, triton.language as tl
from kernel_checks import element_draws
from megafx.kernels.common import philox
from megafx.kernels.common.philox_triton import draw1, draws8, key_of

@triton.jit
def dump(grouped, single, seed, start, op_id, N: tl.constexpr):
    k0, k1 = key_of(seed)
    op = op_id.to(tl.uint32)
    eight = start + tl.arange(0, N) * 8
    lanes = tl.arange(0, N)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(grouped + lanes, draws8(eight >> 3, op, k0, k1, N).to(tl.int32))
    tl.store(single + tl.arange(0, N * 8), draw1(start + tl.arange(0, N * 8), op, k0, k1).to(tl.int32))

device = "cuda" if torch.cuda.is_available() else "cpu"
for seed in (0, -1, 98765432109876):
    for start in (0, 2**33 - 16, 2**35 - 64, 2**36 + 8):
        grouped, single = torch.empty(2, 256, dtype=torch.int32, device=device)
        one = torch.tensor(seed, device=device)
        dump[(1,)](grouped, single, one, torch.tensor(start).item(), 9, N=32)
        expected = element_draws(start + torch.arange(256), philox.key_of(one), 9).int()
        assert torch.equal(grouped.cpu(), expected), ("draws8", seed, start)
        assert torch.equal(single.cpu(), expected), ("draw1", seed, start)
"""


def test_triton_draws_the_same_bits(tmp_path):
    """On the GPU where there is one, else in Triton's interpreter."""
    script = tmp_path / "kernel.py"  # Triton reads a kernel's source from its file
    script.write_text(KERNEL)
    run_as_script(script, 120)
