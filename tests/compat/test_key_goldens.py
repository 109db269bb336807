"""Key strings, dictionaries and derived keys recorded from LMCache 0.5.6, tags in sorted order."""

import json
from pathlib import Path

import pytest
import torch

from lmcache.utils import CacheEngineKey, LayerCacheEngineKey, parse_cache_key

RECORDED = json.loads((Path(__file__).parent / "goldens" / "cache_keys.json").read_text())
CASES = RECORDED["cases"]
CHUNK_CASES = [case for case in CASES if case["layer"] is None]
IDS = [case["string"] for case in CASES]


def key_of(case):
    model, world_size, worker_id, chunk_hash, dtype, configs = case["fields"]
    fields = (model, world_size, worker_id, chunk_hash, getattr(torch, dtype), configs)
    if case["layer"] is None:
        return CacheEngineKey(*fields)
    return LayerCacheEngineKey(*fields, case["layer"])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_string_form_is_that_of_0_5_6(case):
    key = key_of(case)

    assert key.to_string() == case["string"]
    assert key.chunk_hash_hex == case["hash_hex"]
    assert key._dtype_str == case["dtype_str"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_tags_are_those_of_0_5_6(case):
    tags = key_of(case).tags

    assert (None if tags is None else [list(tag) for tag in tags]) == case["tags"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_dictionary_is_that_of_0_5_6(case):
    assert key_of(case).to_dict() == case["to_dict"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_string_of_0_5_6_is_read_back_as_the_same_class_and_key(case):
    parsed = parse_cache_key(case["string"])

    assert type(parsed).__name__ == case["parsed"]
    assert parsed == key_of(case)


@pytest.mark.parametrize("case", CHUNK_CASES, ids=[case["string"] for case in CHUNK_CASES])
def test_derived_keys_are_those_of_0_5_6(case):
    key = key_of(case)

    assert [layer.to_string() for layer in key.split_layers(3)] == case["layers"]
    assert key.get_first_layer().to_string() == case["first_layer"]
    assert key.with_new_worker_id(3).to_string() == case["worker_3"]


@pytest.mark.parametrize("case", CHUNK_CASES, ids=[case["string"] for case in CHUNK_CASES])
def test_a_dictionary_of_0_5_6_is_read_back_as_the_same_key(case):
    assert CacheEngineKey.from_dict(case["to_dict"]) == key_of(case)


@pytest.mark.parametrize(("digits", "text"), RECORDED["bytes_cases"])
def test_the_string_form_of_a_bytes_hash_is_that_of_0_5_6(digits, text):
    key = CacheEngineKey("m", 1, 0, bytes.fromhex(digits), torch.bfloat16)

    assert key.to_string() == text
    assert parse_cache_key(text) == key


def test_arguments_are_positional_and_named_as_in_0_5_6():
    by_name = LayerCacheEngineKey(
        model_name="m",
        world_size=1,
        worker_id=0,
        chunk_hash=5,
        dtype=torch.half,
        request_configs={"lmcache.tag.a": "1"},
        layer_id=2,
    )

    assert by_name == LayerCacheEngineKey("m", 1, 0, 5, torch.half, {"lmcache.tag.a": "1"}, 2)
    assert by_name.layer_id == 2
