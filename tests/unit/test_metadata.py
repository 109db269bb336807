"""`LMCacheMetadata`: positional order, shapes, and what ATOM's wrapper takes from it."""

from dataclasses import dataclass

import pytest
import torch

from lmcache.v1.metadata import LMCacheMetadata


@pytest.fixture
def metadata():
    return LMCacheMetadata("m", 4, 2, 3, 1, torch.bfloat16, (32, 2, 256, 8, 128))


@dataclass
class Desc:
    kv_size: int


@dataclass
class Group:
    dtype: torch.dtype
    num_layers: int
    hidden_dim_size: int
    shape_desc: Desc


@dataclass
class Groups:
    kernel_groups: list[Group]


def test_positional_order_is_upstreams():
    metadata = LMCacheMetadata(
        "m", 4, 2, 3, 1, torch.half, (1, 2, 3, 4, 5), True, "worker", "served", 16, None, "e", {}
    )

    assert list(vars(metadata)) == [
        "model_name",
        "world_size",
        "local_world_size",
        "worker_id",
        "local_worker_id",
        "kv_dtype",
        "kv_shape",
        "use_mla",
        "role",
        "served_model_name",
        "chunk_size",
        "kv_layer_groups_manager",
        "engine_id",
        "kv_connector_extra_config",
    ]
    assert (metadata.use_mla, metadata.role, metadata.engine_id) == (True, "worker", "e")


def test_attributes_can_be_copied_and_assigned(metadata):
    copied = dict(vars(metadata))
    metadata.kv_dtype = torch.uint8

    assert LMCacheMetadata(**copied) != metadata
    assert "first_rank" not in copied


def test_the_shape_of_a_full_and_of_a_short_chunk(metadata):
    assert metadata.get_shapes() == [torch.Size([2, 32, 256, 1024])]
    assert metadata.get_shapes(7) == [torch.Size([2, 32, 7, 1024])]
    assert metadata.get_shapes(0) == [torch.Size([2, 32, 0, 1024])]
    assert metadata.get_dtypes() == [torch.bfloat16]
    assert metadata.get_num_groups() == 1


def test_one_shape_for_each_layer_group(metadata):
    metadata.kv_layer_groups_manager = Groups(
        [Group(torch.half, 3, 64, Desc(2)), Group(torch.uint8, 5, 576, Desc(1))]
    )

    assert metadata.get_shapes(10) == [torch.Size([2, 3, 10, 64]), torch.Size([1, 5, 10, 576])]
    assert metadata.get_dtypes() == [torch.half, torch.uint8]
    assert metadata.get_num_groups() == 2


def test_groups_not_yet_registered_count_as_none(metadata):
    metadata.kv_layer_groups_manager = Groups([])

    assert metadata.get_num_groups() == 1
    assert metadata.get_dtypes() == [torch.bfloat16]


def test_only_rank_zero_is_the_first(metadata):
    assert not metadata.is_first_rank()
    metadata.worker_id = 0
    assert metadata.is_first_rank()
