"""vLLM's connector: order of the bytes, the keywords of its calls, and what it refuses."""

import pytest
import torch
from builders import make_metadata

from lmcache.utils import EngineType
from lmcache.v1.errors import UnsupportedFeatureError
from lmcache.v1.gpu_connector import CreateGPUConnector, VLLMPagedMemGPUConnectorV2, utils
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 2, 5, 4, 3, 8
HIDDEN = HEADS * HEAD_SIZE
SHAPE = (2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
SLOTS = torch.tensor([9, 8, 3, 19, 0, 1, 2, 12])


@pytest.fixture
def kvcaches():
    torch.manual_seed(1)
    return [torch.randn(SHAPE).bfloat16() for _ in range(LAYERS)]


@pytest.fixture
def connector():
    return VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS)


def allocate(num_tokens, dtype=torch.bfloat16, fmt=MemoryFormat.KV_2LTD, kv_size=2):
    obj = AdHocMemoryAllocator().allocate(
        torch.Size([kv_size, LAYERS, num_tokens, HIDDEN]), dtype, fmt
    )
    obj.raw_tensor.fill_(7)
    return obj


def flat(kvcaches, slots):
    """[2, layers, tokens, hidden] of the given slots."""
    return torch.stack([layer.reshape(2, -1, HIDDEN)[:, slots] for layer in kvcaches], dim=1)


FORMS = {
    "list": lambda layers: layers,
    "dict in layer order": lambda layers: {f"layer.{i}": t for i, t in enumerate(layers)},
    "pairs": lambda layers: [(t[0], t[1]) for t in layers],
    "flash infer": lambda layers: [t.transpose(0, 1) for t in layers],
    "heads first": lambda layers: [
        t.transpose(2, 3).contiguous().transpose(2, 3) for t in layers
    ],
    "blocks of all layers together": lambda layers: list(
        torch.stack(layers, dim=2).transpose(0, 1).contiguous().transpose(0, 1).unbind(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_object_holds_kv_then_layer_then_token_for_every_form(connector, kvcaches, form):
    obj = allocate(4)

    connector.from_gpu(obj, 2, 6, kvcaches=FORMS[form](kvcaches), slot_mapping=SLOTS)

    assert torch.equal(obj.tensor, flat(kvcaches, SLOTS[2:6]))


def test_an_mla_object_holds_layer_then_token():
    kvcaches = [torch.randn(BLOCKS, BLOCK_SIZE, HIDDEN) for _ in range(LAYERS)]
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, use_mla=True)
    obj = allocate(8, torch.float32, MemoryFormat.KV_MLA_FMT, kv_size=1)

    connector.from_gpu(obj, 0, 8, kvcaches=kvcaches, slot_mapping=SLOTS)

    expected = torch.stack([layer.reshape(-1, HIDDEN)[SLOTS] for layer in kvcaches])
    assert torch.equal(obj.tensor, expected[None])


@pytest.mark.parametrize(
    "mapping", [SLOTS, SLOTS.int(), SLOTS.tolist(), SLOTS.repeat_interleave(2)[::2]]
)
def test_a_slot_mapping_may_be_a_list_or_any_integer_tensor(connector, kvcaches, mapping):
    obj = allocate(8)
    connector.from_gpu(obj, 0, 8, kvcaches=kvcaches, slot_mapping=mapping)
    assert torch.equal(obj.tensor, flat(kvcaches, SLOTS))


def test_ranges_follow_the_whole_request_whatever_offset_says(connector, kvcaches):
    obj = allocate(4)
    connector.from_gpu(obj, 4, 8, kvcaches=kvcaches, slot_mapping=SLOTS, offset=4)
    assert torch.equal(obj.tensor, flat(kvcaches, SLOTS[4:]))


@pytest.mark.parametrize("cached", [0, 1, 2, 3, 4, 6, 8, 100])
def test_tokens_that_vllm_has_cached_are_not_written(connector, kvcaches, cached):
    objs = [allocate(2), allocate(3)]
    before = flat(kvcaches, SLOTS)

    connector.batched_to_gpu(
        objs, [1, 5], [3, 8], kvcaches=kvcaches, slot_mapping=SLOTS, vllm_cached_tokens=cached
    )

    written = [token for token in (1, 2, 5, 6, 7) if token >= cached]
    kept = [token for token in range(8) if token not in written]
    after = flat(kvcaches, SLOTS)
    assert torch.equal(after[:, :, kept], before[:, :, kept])
    assert bool((after[:, :, written].contiguous().view(torch.uint8) == 7).all())


def test_leaving_tokens_out_does_not_change_the_mapping_of_the_caller(connector, kvcaches):
    mapping = SLOTS.clone()
    connector.to_gpu(
        allocate(8), 0, 8, kvcaches=kvcaches, slot_mapping=mapping, vllm_cached_tokens=3
    )
    assert torch.equal(mapping, SLOTS)


def test_slots_of_minus_one_are_refused_but_for_tokens_that_are_cached_already(connector, kvcaches):
    mapping = SLOTS.clone()
    mapping[:2] = -1
    before = flat(kvcaches, SLOTS)
    obj = allocate(8)

    for call in (connector.to_gpu, connector.from_gpu):
        with pytest.raises(ValueError, match=r"ids\[0\] is -1"):
            call(obj, 0, 8, kvcaches=kvcaches, slot_mapping=mapping)
    connector.to_gpu(obj, 0, 8, slot_mapping=mapping, vllm_cached_tokens=2)

    assert torch.equal(flat(kvcaches, SLOTS[:2]), before[:, :, :2])


def test_kvcaches_are_kept_from_whichever_call_brought_them(connector, kvcaches):
    connector.initialize_kvcaches_ptr(kvcaches=kvcaches)
    obj = allocate(8)
    connector.from_gpu(obj, 0, 8, slot_mapping=SLOTS)
    assert torch.equal(obj.tensor, flat(kvcaches, SLOTS))
    assert connector.kvcaches[1] is kvcaches[1]

    moved = [layer.flip(1).contiguous() for layer in kvcaches]
    connector.from_gpu(obj, 0, 8, slot_mapping=SLOTS, kvcaches=moved)
    assert torch.equal(obj.tensor, flat(moved, SLOTS))
    connector.initialize_kvcaches_ptr()
    connector.from_gpu(obj, 0, 8, slot_mapping=SLOTS)
    assert torch.equal(obj.tensor, flat(moved, SLOTS))


@pytest.mark.parametrize("call", ["from_gpu", "to_gpu"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kvcaches": None}, "pass kvcaches="),
        ({"slot_mapping": None}, "pass slot_mapping="),
        ({"slot_mapping": SLOTS[:7]}, "tokens 0 to 8 are outside the slot mapping of 7"),
        ({"slot_mapping": SLOTS + BLOCKS * BLOCK_SIZE}, r"ids\[0\] is 29"),
    ],
)
def test_a_call_without_what_it_needs_is_refused(connector, kvcaches, call, changes, message):
    keywords = {"kvcaches": kvcaches, "slot_mapping": SLOTS, **changes}
    with pytest.raises(ValueError, match=message):
        getattr(connector, call)(allocate(8), 0, 8, **keywords)


def test_a_slot_mapping_of_floats_is_refused(connector, kvcaches):
    with pytest.raises(TypeError, match="of integers"):
        connector.from_gpu(allocate(8), 0, 8, kvcaches=kvcaches, slot_mapping=SLOTS.float())


@pytest.mark.parametrize("call", ["from_gpu", "to_gpu"])
@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (lambda: allocate(8, fmt=MemoryFormat.KV_T2D), "object 0 is .*KV_T2D.*needs .*KV_2LTD"),
        (lambda: allocate(8, torch.half), "torch.float16.* needs .*torch.bfloat16"),
        (lambda: allocate(7), r"\(2, 2, 7, 24\)\]; .* needs .*\(2, 2, 8, 24\)"),
        (lambda: allocate(8, kv_size=1), r"\(1, 2, 8, 24\)\]; "),
    ],
)
def test_an_object_that_does_not_fit_is_refused(connector, kvcaches, call, obj, message):
    with pytest.raises(ValueError, match=message):
        getattr(connector, call)(obj(), 0, 8, kvcaches=kvcaches, slot_mapping=SLOTS)


def test_layers_that_share_their_kv_come_back(connector):
    shared = torch.randn(SHAPE).bfloat16()
    before, obj = shared.clone(), allocate(8)

    connector.from_gpu(obj, 0, 8, kvcaches=[shared, shared], slot_mapping=SLOTS)
    assert torch.equal(obj.tensor[:, 0], obj.tensor[:, 1])
    shared.zero_()
    connector.to_gpu(obj, 0, 8, slot_mapping=SLOTS)

    assert torch.equal(flat([shared], SLOTS), flat([before], SLOTS))


def zeros(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda good: [good], "has 1 layers, the model 2"),
        (
            lambda good: [zeros(*SHAPE), good.as_strided(SHAPE, (480, 24, 24, 8, 1))],
            "kvcaches: the slots of segment 1 overlap",
        ),
        (lambda good: [good[:, :0]] * 2, r"layer 0 of shape \(0, 4, 3, 8\) holds no slot"),
        (lambda good: [good, None], "kvcaches: layer 1: .*not NoneType None"),
        (lambda good: [good, [None, good[0]]], "kvcaches: layer 1: a layer's K and V must be"),
        (lambda good: [good, "kv"], "kvcaches: layer 1: .*not str 'kv'"),
        (lambda good: [good, good.half()], "layer 1 is .*float16.*layer 0 .*bfloat16"),
        (lambda good: [good, good[:, :4]], r"layer 1 is \(4, 4, 3, 8\).*layer 0 \(5, 4, 3, 8\)"),
        (lambda good: [good, good.to("meta")], "layer 1 is .*on meta"),
        (lambda good: [good.to("meta")] * 2, "on meta; this build has the CPU core only"),
        (lambda good: [good[..., :4]] * 2, "layer 0 has 3 heads of 4.*hidden size 24"),
        (lambda good: [good[0]] * 2, "none of .*use_mla=True"),
        (lambda good: [zeros(5, 4, 24)] * 2, "none of .*use_mla=True"),
        (lambda good: [zeros(3, 5, 4, 3, 8)] * 2, "none of"),
        (lambda good: [(good[0],)] * 2, "K and V must be"),
        (lambda good: [good[:, :2]] * 2, "ambiguous.*kv_axis"),
        (
            lambda good: [good.transpose(3, 4).contiguous().transpose(3, 4)] * 2,
            "must be contiguous",
        ),
        (
            lambda good: [good, good.transpose(2, 3).contiguous().transpose(2, 3)],
            "layer 1 has its heads in another order",
        ),
    ],
)
def test_kv_caches_that_cannot_be_used_are_named(connector, layers, message):
    with pytest.raises(ValueError, match=message):
        connector.initialize_kvcaches_ptr(kvcaches=layers(zeros(*SHAPE)))
    assert connector.kvcaches is None


@pytest.mark.parametrize("kvcaches", [5, {1}, object()])
def test_kv_caches_that_are_no_list_are_refused(connector, kvcaches):
    with pytest.raises(TypeError, match="kvcaches must be a list or dict of layers, not "):
        connector.initialize_kvcaches_ptr(kvcaches=kvcaches)


@pytest.mark.parametrize("axis", [2, -1, "0", True, 0.0])
def test_an_axis_that_cannot_tell_k_from_v_is_refused(axis):
    with pytest.raises(ValueError, match="layout_hints: kv_axis must be 0 or 1, not "):
        VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, layout_hints={"kv_axis": axis})


def test_hints_that_are_no_mapping_are_refused():
    with pytest.raises(TypeError, match="layout_hints must be a mapping, not 'NHD'"):
        VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, layout_hints="NHD")


@pytest.mark.parametrize("num_threads", ["2", True, None])
def test_a_number_of_threads_that_is_none_is_refused(num_threads):
    with pytest.raises(TypeError, match="num_threads must be an int"):
        VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, num_threads=num_threads)


def test_an_mla_layer_without_blocks_is_refused():
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, use_mla=True)
    with pytest.raises(ValueError, match="layer 0 of shape .* holds no slot"):
        connector.initialize_kvcaches_ptr(kvcaches=[zeros(0, 4, HIDDEN)] * 2)


def test_mla_wants_one_flat_tensor_a_layer():
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, use_mla=True)
    with pytest.raises(ValueError, match=r"must be \[blocks, tokens, hidden\]"):
        connector.initialize_kvcaches_ptr(kvcaches=[zeros(*SHAPE)] * 2)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_hint_settles_a_cache_of_two_blocks(axis):
    torch.manual_seed(2)
    layers = [torch.randn(2, 2, BLOCK_SIZE, HEADS, HEAD_SIZE) for _ in range(LAYERS)]
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, layout_hints={"kv_axis": axis})
    obj = allocate(1, torch.float32)

    connector.from_gpu(obj, 0, 1, kvcaches=layers, slot_mapping=[BLOCK_SIZE + 1])

    split = [layer.movedim(axis, 0) for layer in layers]
    assert torch.equal(
        obj.tensor, torch.stack([t[:, 1, 1] for t in split], 1).view(2, 2, 1, HIDDEN)
    )


def test_a_hint_that_contradicts_the_strides_is_refused(kvcaches):
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, layout_hints={"kv_layout": "HND"})
    with pytest.raises(ValueError, match="hints say HND, the strides .* say NHD"):
        connector.initialize_kvcaches_ptr(kvcaches=kvcaches)
    connector.initialize_kvcaches_ptr(kvcaches=FORMS["heads first"](kvcaches))


def test_other_hints_of_a_layout_are_not_supported():
    with pytest.raises(UnsupportedFeatureError, match="BLHNC"):
        VLLMPagedMemGPUConnectorV2(HIDDEN, LAYERS, layout_hints={"kv_layout": "BLHNC"})


def test_the_metadata_tells_shape_and_heads():
    metadata = make_metadata(kv_shape=(LAYERS, 2, 16, HEADS, HEAD_SIZE))
    connector = CreateGPUConnector(None, metadata, EngineType.VLLM)

    assert isinstance(connector, VLLMPagedMemGPUConnectorV2)
    assert connector.get_shape(5) == metadata.get_shapes(5)[0] == torch.Size([2, LAYERS, 5, HIDDEN])
    with pytest.raises(ValueError, match="layer 0 has 4 heads of 6, .* heads 3"):
        connector.initialize_kvcaches_ptr(kvcaches=[zeros(2, 5, 4, 4, 6)] * 2)


def test_an_mla_connector_from_metadata_makes_objects_of_one_tensor():
    metadata = make_metadata(kv_shape=(LAYERS, 1, 16, 1, HIDDEN), use_mla=True)
    connector = VLLMPagedMemGPUConnectorV2.from_metadata(metadata)
    assert connector.get_shape(5) == metadata.get_shapes(5)[0]


class TwoGroups:
    """Layers of two KV layouts, as a serving engine registers them."""

    class _Group:
        dtype, num_layers, hidden_dim_size = torch.half, 1, 8

        class shape_desc:
            kv_size = 2

    kernel_groups = (_Group(), _Group())


def test_groups_of_layers_are_not_supported():
    metadata = make_metadata(kv_layer_groups_manager=TwoGroups())
    with pytest.raises(UnsupportedFeatureError, match="2 groups"):
        VLLMPagedMemGPUConnectorV2.from_metadata(metadata)


@pytest.mark.parametrize("engine", [EngineType.ATOM, EngineType.SGLANG, EngineType.TRTLLM])
def test_other_engines_have_no_connector_here(engine):
    with pytest.raises(UnsupportedFeatureError, match="RawBlockConnector|no connector for"):
        CreateGPUConnector(None, make_metadata(), engine)


def test_slots_of_ranges_that_follow_one_another_are_not_copied():
    chosen = utils.slots_of(SLOTS, [2, 4], [4, 7])
    assert chosen.data_ptr() == SLOTS[2:].data_ptr()
    assert chosen.tolist() == SLOTS[2:7].tolist()


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 9)])
def test_ranges_outside_the_mapping_are_refused(start, end):
    with pytest.raises(ValueError, match="outside the slot mapping of 8"):
        utils.slots_of(SLOTS, [start], [end])
