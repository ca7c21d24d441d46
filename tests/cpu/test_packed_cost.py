"""Bytes and operations of the packed products, against counting them."""

import math
import random

from packhorse.core import cost
from packhorse.core.formats import PACKED


def test_packed_product_of_27b():
    """A row of int4-g128 takes 0.515625 bytes a weight."""
    size = PACKED["int4-g128"].num_bytes(5120, 17408)
    assert size == 5120 * 17408 * 33 // 64
    assert cost.packed_linear_bytes(size, 4, 17408, 5120) == size + 4 * 2 * (17408 + 5120)
    assert cost.packed_linear_bytes(size, 4, 17408, 5120, 4) == size + 4 * (2 * 17408 + 4 * 5120)


def test_distinct_experts():
    assert cost.distinct_experts(1, 8, 256) == 8
    assert math.isclose(cost.distinct_experts(3, 256, 256), 256)
    draw = random.Random(1)
    counts = [len({e for _ in range(16) for e in draw.sample(range(256), 8)}) for _ in range(2000)]
    assert abs(cost.distinct_experts(16, 8, 256) - sum(counts) / len(counts)) < 0.5


def test_expert_mix():
    form = PACKED["int4-g128"]
    expert = form.num_bytes(1024, 2048) + form.num_bytes(2048, 512)
    assert expert == 1_622_016
    assert cost.expert_mix_bytes(8, expert, 1, 8, 2048, 512) == 8 * expert + 2 * 2048 + 4 * 2048 + 4 * 8 * 512
    one = cost.linear_flops(1, 2048, 1024) + cost.linear_flops(1, 512, 2048)
    assert cost.expert_mix_flops(4, 8, 2048, 512) == 4 * 8 * one
