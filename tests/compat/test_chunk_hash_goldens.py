"""Hashes and defaults recorded from LMCache 0.5.6.

`builtin` was recorded without vLLM, `sha256_cbor` beside vLLM's hash function with
PYTHONHASHSEED=0.
"""

import json
from pathlib import Path

import pytest
import torch

from lmcache.v1.chunk_hash import get_chunk_hasher
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase

GOLDENS = Path(__file__).parent / "goldens"


def load(name):
    return json.loads((GOLDENS / f"{name}.json").read_text())


CASES = [
    pytest.param(algorithm, case, id=f"{algorithm}-{number}")
    for algorithm in ("builtin", "sha256_cbor")
    for number, case in enumerate(load(f"chunk_hash_{algorithm}")["cases"])
]


@pytest.mark.parametrize(("algorithm", "case"), CASES)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_ranges_and_hashes_are_those_of_0_5_6(algorithm, case, as_tensor):
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=case["chunk_size"],
        save_unfull_chunk=case["save_unfull_chunk"],
        pre_caching_hash_algorithm=algorithm,
    )
    tokens = torch.tensor(case["tokens"]) if as_tensor else case["tokens"]

    chunks = ChunkedTokenDatabase(config).process_tokens(tokens, make_key=False)

    assert [list(chunk) for chunk in chunks] == case["chunks"]


def test_the_64_bit_name_gives_the_same_values_as_in_0_5_6():
    one, other = get_chunk_hasher("sha256_cbor"), get_chunk_hasher("sha256_cbor_64bit")

    assert one.hash_chunk([1, 2, 3]) == other.hash_chunk([1, 2, 3])


def test_defaults_are_those_of_0_5_6_but_for_the_hash_algorithm():
    recorded = load("config_defaults")["defaults"]
    recorded["pd_allocation_timeout_sec"] = float("inf")

    ours = LMCacheEngineConfig.from_defaults(lmcache_instance_id="an-instance").to_dict()

    assert recorded.pop("pre_caching_hash_algorithm") == "builtin"
    assert ours.pop("pre_caching_hash_algorithm") == "sha256"
    assert ours == recorded
