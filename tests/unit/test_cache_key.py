"""Cache keys: string form, equality, canonical tags, and what is refused."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.v1.cache_key import (
    CacheEngineKey,
    KeyFactory,
    LayerCacheEngineKey,
    parse_cache_key,
)
from lmcache.v1.dtype_names import DTYPE_TO_NAME, NAME_TO_DTYPE

DTYPES = tuple(DTYPE_TO_NAME)
UNPICKLE_AND_LOOK_UP = """
import pickle, sys
import torch
from lmcache.v1.cache_key import CacheEngineKey
keys = pickle.loads(bytes.fromhex(sys.stdin.read()))
configs = {"lmcache.tag.salt": "s", "other": "x"}
here = CacheEngineKey("m@x", 2, 1, -5, torch.bfloat16, configs)
assert keys[0] == here and {keys[0]: 1}[here] == 1
assert keys[0].request_configs == configs
print("|".join(key.to_string() for key in keys))
"""

names = st.text(st.characters(exclude_characters="@%"), min_size=1, max_size=12)
values = st.text(st.characters(exclude_characters="@"), max_size=12)
models = st.text(min_size=1, max_size=20)
chunk_hashes = st.one_of(st.integers(-(2**130), 2**130), st.binary(min_size=1, max_size=40))


@st.composite
def any_key(draw):
    """A chunk or layer key of any fields that are allowed."""
    fields = (
        draw(models),
        draw(st.integers(0, 1000)),
        draw(st.integers(-1, 1000)),
        draw(chunk_hashes),
        draw(st.sampled_from(DTYPES)),
        {f"lmcache.tag.{k}": v for k, v in draw(st.dictionaries(names, values)).items()},
    )
    layer = draw(st.none() | st.integers(0, 200))
    return CacheEngineKey(*fields) if layer is None else LayerCacheEngineKey(*fields, layer)


def make(chunk_hash=5, **tags):
    return CacheEngineKey("m", 1, 0, chunk_hash, torch.bfloat16, tag_configs(tags))


def tag_configs(tags):
    return {f"lmcache.tag.{name}": value for name, value in tags.items()}


@given(any_key())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_key_survives_its_string_form(key):
    text = key.to_string()

    parsed = parse_cache_key(text)

    assert parsed == key
    assert type(parsed) is type(key)
    assert hash(parsed) == hash(key)
    assert parsed.to_string() == text


@given(any_key(), any_key())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_keys_are_equal_exactly_when_their_strings_and_classes_are(one, other):
    same_text = one.to_string() == other.to_string()

    assert (one == other) == (same_text and type(one) is type(other))


@given(any_key())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_key_survives_pickling_and_copying(key):
    for again in (pickle.loads(pickle.dumps(key)), copy.copy(key), copy.deepcopy(key)):
        assert again == key
        assert again.to_string() == key.to_string()


@given(any_key().filter(lambda key: type(key) is CacheEngineKey and type(key.chunk_hash) is int))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_chunk_key_survives_its_dictionary_as_json(key):
    fields = json.loads(json.dumps(key.to_dict()))

    assert CacheEngineKey.from_dict(fields) == key


@given(st.dictionaries(names, values.filter(bool), min_size=1), st.randoms())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tags_are_sorted_whatever_order_they_are_given_in(tags, random):
    shuffled = list(tags.items())
    random.shuffle(shuffled)

    one = CacheEngineKey("m", 1, 0, 5, torch.bfloat16, tag_configs(tags))
    other = CacheEngineKey("m", 1, 0, 5, torch.bfloat16, tag_configs(dict(shuffled)))

    assert (one, hash(one), one.to_string()) == (other, hash(other), other.to_string())
    assert one.tags == tuple(sorted(tags.items()))


@pytest.mark.parametrize("digest", [bytes(range(32)), b"\xff" * 32, b"\x80" * 16, b"\x00", b"\x0f"])
def test_a_bytes_hash_builds_a_key_that_survives_its_string_form(digest):
    key = make(digest)

    assert key.chunk_hash_hex == digest.hex()
    assert key.to_string() == f"m@1@0@{digest.hex()}@bfloat16"
    assert CacheEngineKey.from_string(key.to_string()) == key


def test_bytes_and_the_int_with_the_same_string_are_one_key():
    assert make(b"\x12\x34") == make(0x1234)
    assert make(b"\x02\x34") != make(0x234)


@pytest.mark.parametrize("chunk_hash", [-1, -2, -(2**64), 0, 1, 2**61 - 1, 2**200])
def test_any_int_is_a_hash_and_no_two_are_alike(chunk_hash):
    assert make(chunk_hash).chunk_hash == chunk_hash
    assert make(chunk_hash) != make(chunk_hash - 1)
    assert make(chunk_hash) != make(chunk_hash + 2**61 - 1)


@pytest.mark.parametrize("chunk_hash", [-5, -(2**63)])
def test_a_negative_hash_keeps_its_sign_in_the_string(chunk_hash):
    assert f"@-{-chunk_hash:x}@" in make(chunk_hash).to_string()


@pytest.mark.parametrize(
    "tags", [{"a%b": "c"}, {"a@b": "c"}, {"": "c"}, {"a": "b@c"}, {"a": "@"}], ids=str
)
def test_a_tag_that_could_not_be_read_back_is_refused(tags):
    with pytest.raises(ValueError, match="tag"):
        make(**tags)


def test_tag_sets_that_once_had_one_string_have_two():
    assert make(a="b%c").to_string() == "m@1@0@5@bfloat16@a%b%c"
    assert parse_cache_key(make(a="b%c").to_string()).tags == (("a", "b%c"),)


@pytest.mark.parametrize("value", [1, None, 0.5, ["x"], True], ids=repr)
def test_a_tag_value_that_is_no_string_is_refused(value):
    with pytest.raises(ValueError, match=r"pass str\(value\)"):
        make(salt=value)


@pytest.mark.parametrize("salt", ["a/b", "a%b", "50%", "a b", "\u00e9", "a\nb", "%"])
def test_an_accepted_salt_is_never_cut(salt):
    assert parse_cache_key(make(salt=salt).to_string()).tags == (("salt", salt),)


def test_two_salts_are_two_keys_and_an_empty_salt_is_none():
    assert len({make(), make(salt="one"), make(salt="two")}) == 3
    assert make(salt="") == make()
    assert make(salt="").tags is None


def test_request_configs_that_are_no_tags_take_no_part():
    key = CacheEngineKey("m", 1, 0, 5, torch.bfloat16, {"temperature": 1, "lmcache.skip_save": "x"})

    assert key == make()
    assert hash(key) == hash(make())
    assert key.request_configs == {"temperature": 1, "lmcache.skip_save": "x"}
    assert key.tags is None


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"},
        {"world_size": 2},
        {"worker_id": 1},
        {"chunk_hash": 6},
        {"dtype": torch.half},
        {"request_configs": {"lmcache.tag.a": "1"}},
    ],
    ids=str,
)
def test_every_field_takes_part_in_equality(change):
    fields = {
        "model_name": "m",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": 5,
        "dtype": torch.bfloat16,
    }

    assert CacheEngineKey(**{**fields, **change}) != CacheEngineKey(**fields)


def test_a_layer_key_equals_only_the_same_layer_of_the_same_chunk():
    key = make()
    layers = key.split_layers(3)

    assert layers[0] == key.get_first_layer()
    assert layers[0] != layers[1]
    assert layers[0] != key
    assert len({key, *layers}) == 4
    assert [layer.layer_id for layer in layers] == [0, 1, 2]


def test_a_key_equals_nothing_else():
    assert make() != make().to_string()
    assert make() != None  # noqa: E711 (the operator is what is tested)
    assert make() is not None


def test_keys_are_immutable():
    for name in ("chunk_hash", "model_name", "tags", "dtype"):
        with pytest.raises(AttributeError):
            setattr(make(), name, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_named_dtype_has_its_own_key(dtype):
    key = CacheEngineKey("m", 1, 0, 5, dtype)

    assert key.dtype is dtype
    assert NAME_TO_DTYPE[key._dtype_str] is dtype
    assert parse_cache_key(key.to_string()) == key


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, "bfloat16", None], ids=str)
def test_a_dtype_without_a_name_is_refused(dtype):
    with pytest.raises(ValueError, match="has no name in cache keys"):
        CacheEngineKey("m", 1, 0, 5, dtype)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (("", 1, 0, 5), ValueError),
        ((None, 1, 0, 5), TypeError),
        (("m", -1, 0, 5), ValueError),
        (("m", 1.5, 0, 5), TypeError),
        (("m", 1, "0", 5), TypeError),
        (("m", 1, 0, "5"), TypeError),
        (("m", 1, 0, 5.0), TypeError),
        (("m", 1, 0, b""), ValueError),
    ],
)
def test_a_field_that_cannot_be_read_back_is_refused(fields, error):
    with pytest.raises(error):
        CacheEngineKey(*fields, torch.bfloat16)


def test_a_negative_layer_is_refused():
    with pytest.raises(ValueError, match="layer_id"):
        LayerCacheEngineKey("m", 1, 0, 5, torch.bfloat16, None, -1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m",
        "m@1@0@5",
        "m@1@0@5@nodtype",
        "m@1@0@xyz@half",
        "m@1@0@5@half@",
        "m@1@0@5@half@1@2",
        "m@1@0@5@half@tag",
        "m@one@0@5@half",
        "@1@0@5@half",
        "m@1@0@5@half@%v",
        b"m@1@0@5@half",
        None,
    ],
    ids=repr,
)
def test_what_is_no_key_string_is_a_value_error_that_shows_it(text):
    with pytest.raises(ValueError, match="is not a cache key"):
        parse_cache_key(text)


def test_each_class_reads_only_its_own_strings():
    chunk, layer = make(), make().get_first_layer()

    assert CacheEngineKey.from_string(chunk.to_string()) == chunk
    assert LayerCacheEngineKey.from_string(layer.to_string()) == layer
    with pytest.raises(ValueError, match="layer"):
        CacheEngineKey.from_string(layer.to_string())
    with pytest.raises(ValueError, match="names no layer"):
        LayerCacheEngineKey.from_string(chunk.to_string())


@pytest.mark.parametrize("model", ["a@b", "org/m", "a@1@0@5@half", "m%x", "a@t%v", "@", "a@1@0"])
def test_a_model_name_may_hold_any_separator(model):
    for key in (
        CacheEngineKey(model, 1, 0, 5, torch.half),
        CacheEngineKey(model, 1, 0, 5, torch.half, {"lmcache.tag.t": "v"}),
        LayerCacheEngineKey(model, 1, 0, 5, torch.half, None, 3),
    ):
        assert parse_cache_key(key.to_string()) == key


def test_a_dictionary_that_is_none_of_a_key_is_a_value_error():
    with pytest.raises(ValueError, match="not the dictionary of a cache key"):
        CacheEngineKey.from_dict({"model_name": "m"})
    with pytest.raises(ValueError, match="not the dictionary of a cache key"):
        CacheEngineKey.from_dict({**make().to_dict(), "dtype": "nodtype"})


def test_a_factory_makes_the_keys_that_the_constructor_makes():
    configs = {"lmcache.tag.salt": "s", "other": 1}
    factory = KeyFactory("m", 2, 1, torch.half, configs)
    some_hashes = [5, -5, 2**70, b"\x05", b"\xff" * 8]

    made = factory.make_many(some_hashes)

    expected = [CacheEngineKey("m", 2, 1, h, torch.half, configs) for h in some_hashes]
    assert made == expected
    assert [hash(key) for key in made] == [hash(key) for key in expected]
    assert [key.to_string() for key in made] == [key.to_string() for key in expected]
    assert factory.make(5) == expected[0]
    assert type(made[0]) is CacheEngineKey
    assert made[0].request_configs == configs
    assert factory.make_many(iter(some_hashes)) == expected


@pytest.mark.parametrize("wrong", ["5", 1.5, None], ids=repr)
def test_a_factory_refuses_what_is_no_hash(wrong):
    with pytest.raises(TypeError):
        KeyFactory("m", 1, 0, torch.half).make_many([5, wrong])


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_a_pickled_key_finds_its_entry_in_another_process(seed):
    key = CacheEngineKey("m@x", 2, 1, -5, torch.bfloat16, {"lmcache.tag.salt": "s", "other": "x"})
    all_keys = [key, key.get_first_layer(), make(b"\x00\x01")]

    done = subprocess.run(
        [sys.executable, "-c", UNPICKLE_AND_LOOK_UP],
        input=pickle.dumps(all_keys).hex(),
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "|".join(k.to_string() for k in all_keys)
