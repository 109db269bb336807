"""Bytes of the replay's objects: made from a key, and any other byte is seen."""

import pytest
import torch

from benchmarks.replay.content import Kind, chunk_hash, fill, is_intact, kind_and_prefix


def test_hash_names_kind_and_prefix_and_fits_a_signed_word() -> None:
    seen = set()
    for kind in Kind:
        for prefix_id in (0, 1, 77, 10**9):
            value = chunk_hash(kind, prefix_id)
            assert kind_and_prefix(value) == (kind, prefix_id)
            assert 0 <= value < 2**63
            seen.add(value)
    assert len(seen) == 8


@pytest.mark.parametrize("position", [0, 4095])
def test_one_flipped_byte_is_seen(position: int) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    fill(buffer, chunk_hash(Kind.KV, 5))
    assert is_intact(buffer, chunk_hash(Kind.KV, 5), 4096)
    buffer[position] ^= 1
    assert not is_intact(buffer, chunk_hash(Kind.KV, 5), 4096)


def test_bytes_of_another_key_or_size_are_seen() -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    fill(buffer, chunk_hash(Kind.KV, 5))
    assert not is_intact(buffer, chunk_hash(Kind.IMAGE, 5), 4096)
    assert not is_intact(buffer, chunk_hash(Kind.KV, 5), 8192)
