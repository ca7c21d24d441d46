"""Models known by name: values and bytes of each equal the published ones to the byte."""

import pytest

from packhorse.core.errors import UsageError
from packhorse.facts.known import known_config, known_model, known_names
from packhorse.facts.weights import expected_params
from packhorse.plan import account

# Values of the text part; K and V of a token in 16 bits; conv and fp32 delta-rule state of a sequence.
PUBLISHED = {
    "qwen3.5-0.8b": (752_393_024, 12_288, 663_552 + 18_874_368),
    "qwen3.5-2b": (1_881_825_088, 12_288, 663_552 + 18_874_368),
    "qwen3.5-4b": (4_205_751_296, 32_768, 1_179_648 + 50_331_648),
    "qwen3.5-9b": (8_953_803_264, 32_768, 1_179_648 + 50_331_648),
    "qwen3.6-27b": (26_895_998_464, 65_536, 2_949_120 + 150_994_944),
    "qwen3.6-35b-a3b": (34_660_610_688, 20_480, 1_474_560 + 62_914_560),
    "qwen3-next-80b-a3b": (79_674_391_296, 24_576, 1_769_472 + 75_497_472),
    "qwen3-30b-a3b": (30_532_122_624, 98_304, 0),
    "qwen3-32b": (32_762_123_264, 262_144, 0),
    "qwen2.5-32b": (32_763_876_352, 262_144, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_kv_and_state(name):
    facts = known_model(name)
    values, kv, state = PUBLISHED[name]
    assert sum(expected_params(facts).values()) == values
    assert account.kv_token_bytes(facts, "fp16") == kv
    assert account.snapshot_bytes(facts, "fp16") == state


def test_names():
    assert {*PUBLISHED, "qwen3.8-27b", "qwen3.5-27b", "qwen3.5-35b-a3b"} <= set(known_names())
    for name in known_names():
        facts = known_model(name.upper())
        assert facts.name == name and facts.container == "config" and not facts.tensors
    assert known_model("qwen3.8-27b").num_mtp_layers == 1
    assert known_config("qwen3.6-27b") is not known_config("qwen3.8-27b")
    with pytest.raises(UsageError, match="qwen2-27b") as caught:
        known_model("qwen2-27b")
    assert "qwen3.6-27b" in caught.value.hint
