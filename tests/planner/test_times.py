"""Covers: planner/cost.py, and the fields of `Hardware` that price schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafx.errors import ConfigError
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, LOCAL
from megafx.planner.cost import (
    RING_STEP_SECONDS,
    TREE_STEP,
    attention_seconds,
    grouped_seconds,
    library_seconds,
    product_rate,
    product_seconds,
    sum_seconds,
)
from megafx.planner.hardware import Hardware

HW = Hardware("test", {"bfloat16": 100.0, "float32": 10.0}, 50.0, 5.0, 2.0, "made up")


def test_products_run_at_the_rate_of_the_measured_ones_that_are_near() -> None:
    rows = [[64, 64, 64, 2 * 64**3 / 80.0], [4096, 4096, 4096, 2 * 4096**3 / 120.0]]
    measured = replace(HW, products=rows)
    assert product_rate(8, 8, 8, "bfloat16", HW) == 100.0 and product_rate(8, 8, 8, "float32", HW) == 10.0
    assert product_rate(64, 64, 64, "bfloat16", measured) == pytest.approx(80.0, rel=0.01)
    assert product_rate(4096, 4096, 4096, "bfloat16", measured) == pytest.approx(120.0, rel=0.01)
    assert 80 < product_rate(512, 512, 512, "bfloat16", measured) < 120
    assert product_rate(64, 64, 64, "float32", measured) == pytest.approx(8.0, rel=0.01)
    swapped = replace(HW, products=[[16, 4096, 64, 1.0], rows[0]])
    assert product_rate(4096, 16, 64, "bfloat16", swapped) == product_rate(16, 4096, 64, "bfloat16", swapped)


def test_a_product_of_one_row_takes_as_long_as_reading_its_weight() -> None:
    assert product_seconds(1, 1000, 1000, "bfloat16", 2, replace(HW, memory_bytes_per_second=1.0)) == 2 * (
        1000**2 + 2000
    )
    assert product_seconds(10, 10, 10, "bfloat16", 2, replace(HW, kernel_seconds=3.0)) == 3.0 + 20.0


@pytest.mark.parametrize(
    "groups,rows,hidden,ffn,halved,least,most",
    [
        (128, 512, 2048, 768, 1, 25.5, 31),  # fsdp: 73.6 ms measured, 57 by the model with 11.5 of these
        (64, 1024, 2048, 768, 1, 25.0, 30.5),  # experts on two ranks: 62.2, exposed 5.2; 44.3 with 11.5, exposed 3.6
        (128, 1024, 2048, 768, 2, 27.5, 33.5),  # in the ffn on two: 67.4; 48.3 with 11.5
    ],
)
def test_grouped_products_of_many_small_experts_take_what_the_measured_steps_leave_them(
    groups: int, rows: int, hidden: int, ffn: int, halved: int, least: float, most: float
) -> None:
    """RESULTS.md, experts shared out on two GPUs: milliseconds of four layers' products, forward and backward."""
    hardware = Hardware.load("h100-nvlink")
    total = 0.0
    for n, k in ((2 * ffn // halved, hidden), (hidden, ffn // halved)):
        for shape in ((rows, n, k), (rows, k, n), (k, n, rows)):
            total += 4e3 * grouped_seconds(groups, *shape, "bfloat16", 2, hardware)
    assert least < total < most


def test_grouped_products_of_few_large_experts_are_as_fast_as_single_ones() -> None:
    """RESULTS.md, experts of a list: steps of 8 experts with ffn 8192 leave them 0.9 (H100) and 1.06 (H200) of their time."""
    hardware = Hardware.load("h200-nvlink")
    shapes = [(2048, 16384, 2048), (2048, 2048, 8192)]
    single = sum(8 * product_seconds(*shape, "bfloat16", 2, hardware) for shape in shapes)
    grouped = sum(grouped_seconds(8, *shape, "bfloat16", 2, hardware) for shape in shapes)
    assert 0.95 < grouped / single < 1.05
    assert grouped_seconds(1, 8, 8, 8, "bfloat16", 2, HW) == pytest.approx(2.1 * 1024 / 100.0)
    once = replace(HW, kernel_seconds=3.0)
    fixed = grouped_seconds(4, 8, 8, 8, "bfloat16", 2, once) - grouped_seconds(4, 8, 8, 8, "bfloat16", 2, HW)
    assert fixed == pytest.approx(3.0), "one kernel for all groups"


def test_attention_is_priced_by_kind() -> None:
    rates = {"forward": 200.0, "backward": 100.0, "dropout forward": 50.0, "dropout backward": 25.0}
    measured = replace(HW, attention=rates)
    assert attention_seconds(1000, "bfloat16", HW, dropout=False) == (10.0, 25.0)
    assert attention_seconds(1000, "bfloat16", measured, dropout=False) == (5.0, 25.0)
    assert attention_seconds(1000, "bfloat16", measured, dropout=True) == (20.0, 100.0)


def test_attention_of_long_sequences_is_nearer_to_its_products() -> None:
    rates = {"forward": 100.0, "backward": 100.0, "long forward": 200.0, "dropout forward": 50.0}
    measured = replace(HW, attention=rates)
    seconds = [
        attention_seconds(1000, "bfloat16", measured, dropout=False, keys=keys)[0] for keys in (512, 2048, 8192, 32768)
    ]
    assert (seconds[0], seconds[1], seconds[3]) == (10.0, 10.0, pytest.approx(5.0)) and 5 < seconds[2] < 7
    assert 4 < attention_seconds(1000, "bfloat16", measured, dropout=False, keys=10**9)[0] < 5
    for dropout in (False, True):  # what was not measured is as fast as short ones
        assert attention_seconds(1000, "bfloat16", measured, dropout=dropout, keys=32768)[dropout is False] >= 20.0


def test_collectives_are_those_of_the_nearest_number_of_ranks() -> None:
    measured = replace(HW, collectives={ALL_REDUCE: {2: [1.0, 10.0], 8: [4.0, 20.0]}})
    assert library_seconds(ALL_REDUCE, 100, HW, 4) == 2.0 + 100 / 5.0
    assert library_seconds(ALL_REDUCE, 100, measured, 2) == 1.0 + 10.0
    assert library_seconds(ALL_REDUCE, 100, measured, 16) == 4.0 + 5.0
    assert library_seconds(ALL_GATHER, 100, measured, 2) == 2.0 + 20.0
    assert library_seconds(LOCAL, 100, measured, 2) == library_seconds(ALL_REDUCE, 100, measured, 1) == 0.0
    assert sum_seconds(100.0, HW, 4) == 5 * 25 / 50.0


def test_the_profile_of_the_h200_has_what_schedules_need() -> None:
    h200 = Hardware.load("h200-nvlink")
    assert (
        len(h200.products) >= 16 and h200.transfer_bytes_per_second and {*h200.collectives} >= {ALL_REDUCE, ALL_GATHER}
    )
    for m, n, k, seconds in h200.products:
        assert product_seconds(m, n, k, "bfloat16", 2, h200) == pytest.approx(seconds, rel=0.12)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"products": [[1, 2, 3, 0]]}, "products"),
        ({"attention": {"forward": -1.0}}, "attention.forward"),
        ({"collectives": {ALL_REDUCE: {2: [0, 1.0]}}}, "collectives.all_reduce..2"),
        ({"transfer_bytes_per_second": 0}, "transfer_bytes_per_second"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changed: dict, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        replace(HW, **changed)


HOSTS = replace(HW, gpus_per_host=8, network_bytes_per_second=0.5, network_seconds=7.0)  # the link: 5 bytes a second


def test_a_group_sends_by_the_network_where_its_ranks_are_on_several_hosts() -> None:
    ring, step = 7.0, RING_STEP_SECONDS
    link = library_seconds(ALL_GATHER, 100, HW, 8)
    assert library_seconds(ALL_GATHER, 100, HOSTS, 8) == library_seconds(ALL_GATHER, 100, HOSTS, 4, inner=2) == link
    assert [HOSTS.hosts(*x) for x in ((8, 1), (4, 2), (4, 4), (16, 1), (3, 8), (2, 64))] == [1, 1, 2, 2, 3, 2]
    alone = library_seconds(ALL_GATHER, 100, HOSTS, 2, inner=8)  # one rank of the group on each host
    assert alone == pytest.approx(2.0 + ring + 100 / 0.5)
    pairs = library_seconds(ALL_GATHER, 100, HOSTS, 4, inner=4)  # two of them send together
    assert pairs == pytest.approx(2.0 + ring + 2 * step + 100 / 1.0)
    whole = library_seconds(ALL_GATHER, 100, HOSTS, 32)  # eight cards on each host: as fast as the link, or slower
    assert whole == pytest.approx(2.0 + 3 * ring + 28 * step + 100 / 4.0)
    fast = replace(HOSTS, network_bytes_per_second=5.0)
    assert library_seconds(ALL_GATHER, 100, fast, 32) == pytest.approx(2.0 + 3 * ring + 28 * step + 100 / 5.0)
    unknown = replace(HOSTS, network_bytes_per_second=None)
    assert library_seconds(ALL_GATHER, 100, unknown, 32) == link, "the note of a plan says so"


def test_all_reduces_of_many_hosts_are_trees_and_an_all_to_all_sends_to_all() -> None:
    tree = library_seconds(ALL_REDUCE, 100, HOSTS, 64, inner=8) - 100 / 0.5 - 2.0
    assert tree == pytest.approx(2 * 6 * TREE_STEP * 7.0) and tree < 2 * 63 * 7.0
    assert library_seconds(ALL_TO_ALL, 100, HOSTS, 16) == pytest.approx(2.0 + 7.0 + 100 / (0.5 * 15 / 8))
