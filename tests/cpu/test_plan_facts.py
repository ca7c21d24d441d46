"""Models known by name: values and bytes of each equal the published ones to the byte."""

import pytest

from packhorse.core.errors import UsageError
from packhorse.facts.known import known_config, known_model, known_names
from packhorse.facts.recipes import recipe
from packhorse.facts.weights import draft_groups, expected_params
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
    assert account.kv_token_bytes(facts, "fp16") == 2 * account.kv_token_bytes(facts, "fp8") == kv
    # 4 bits and a scale of 16 for 32 of them; K in 5 bits.
    assert account.kv_token_bytes(facts, "k4v4") * 32 == 9 * kv
    assert account.kv_token_bytes(facts, "k5v4") * 32 == 10 * kv
    assert account.snapshot_bytes(facts, "fp16") == state


# Of the model's own head for drafts, and of what int4 packs: a value and an fp16 scale for 128 take 0.515625 B.
DRAFT_VALUES = {"qwen3.6-27b": 424_699_392, "qwen3.6-35b-a3b": 844_640_768}
INT4_VALUES = {
    "qwen3.6-27b": {"mlp": 17_112_760_320, "lm_head": 1_271_398_400},
    "qwen3.6-35b-a3b": {"experts": 32_212_254_720, "lm_head": 508_559_360},
}


@pytest.mark.parametrize("name", DRAFT_VALUES)
def test_bytes_of_recipes_and_drafts(name):
    facts = known_model(name)
    assert sum(group.num_values for group in draft_groups(facts)) == DRAFT_VALUES[name]
    packed = account.recipe_bytes(facts, recipe("int4"))
    for kind, values in INT4_VALUES[name].items():
        assert packed[kind] * 64 == values * 33
    plain = account.recipe_bytes(facts, recipe("bf16"))
    assert {kind: plain[kind] for kind in INT4_VALUES[name]} == {
        kind: 2 * values for kind, values in INT4_VALUES[name].items()
    }


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
