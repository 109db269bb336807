"""Cache keys: what identifies a chunk of KV, their string form, and how to make many at once."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lmcache.v1.dtype_names import NAME_TO_DTYPE, dtype_name
from lmcache.v1.native import KeyCore, make_keys

TAG_PREFIX = "lmcache.tag."
_TYPE_FIELD = "__type__"

Tags: TypeAlias = tuple[tuple[str, str], ...]
KeyFields: TypeAlias = tuple[str, int, int, int | bytes, torch.dtype, dict[str, Any] | None]

# A model name may hold "@"; what follows it cannot be taken for a part of it, because every tag
# holds "%" and no other field does.
_KEY_PATTERN = re.compile(
    r"(?P<model>.+)@(?P<world>\d+)@(?P<worker>-?\d+)@(?P<hash>-?[0-9a-f]+)"
    rf"@(?P<dtype>{'|'.join(NAME_TO_DTYPE)})(?:@(?P<layer>\d+))?(?P<tags>(?:@[^@%]+%[^@]*)*)",
    re.DOTALL,
)


class _Key(KeyCore):
    """What chunk keys and layer keys share. Immutable; equality and hash are native.

    Two keys are equal when their class, model, world size, worker, chunk hash, dtype, tags and
    layer are. Other request configs do not take part.
    """

    __slots__ = ()

    @property
    def model_name(self) -> str:
        """Name of the model."""
        value: str = self.context[0]
        return value

    @property
    def world_size(self) -> int:
        """Number of ranks that share one chunk."""
        value: int = self.context[1]
        return value

    @property
    def worker_id(self) -> int:
        """Rank that the chunk belongs to."""
        value: int = self.context[2]
        return value

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the KV."""
        return NAME_TO_DTYPE[self.context[3]]

    @property
    def _dtype_str(self) -> str:
        value: str = self.context[3]
        return value

    @property
    def tags(self) -> Tags | None:
        """(name, value) pairs sorted by name, or None."""
        value: Tags | None = self.context[4]
        return value

    @property
    def request_configs(self) -> dict[str, Any]:
        """The request configs the key was made with."""
        configs: dict[str, Any] | None = self._request_configs
        return {} if configs is None else configs

    @property
    def chunk_hash_hex(self) -> str:
        """The chunk hash in lower-case hex: no prefix, and no padding for an int."""
        chunk_hash = self.chunk_hash
        return chunk_hash.hex() if isinstance(chunk_hash, bytes) else format(chunk_hash, "x")

    def _fields_text(self) -> str:
        model_name, world_size, worker_id, dtype, _ = self.context
        return f"{model_name}@{world_size}@{worker_id}@{self.chunk_hash_hex}@{dtype}"

    def _tags_text(self) -> str:
        return "".join(f"@{name}%{value}" for name, value in self.tags or ())

    def _constructor_arguments(self) -> tuple[Any, ...]:
        return (
            self.model_name,
            self.world_size,
            self.worker_id,
            self.chunk_hash,
            self.dtype,
            self._request_configs,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._constructor_arguments()

    def __copy__(self) -> "_Key":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Key":
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_string()!r})"

    def to_string(self) -> str:
        """Return the string form, the same in every process."""
        return self._fields_text() + self._tags_text()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form; the layer of a layer key is not kept."""
        fields: dict[str, Any] = {
            _TYPE_FIELD: "CacheEngineKey",
            "model_name": self.model_name,
            "world_size": self.world_size,
            "worker_id": self.worker_id,
            "chunk_hash": self.chunk_hash,
            "dtype": self._dtype_str,
        }
        if self.request_configs:
            fields["request_configs"] = [f"{k}%{v}" for k, v in self.request_configs.items()]
        return fields


class CacheEngineKey(_Key):
    """Key of one chunk.

    Args:
        model_name: Name of the model, not empty.
        world_size: Number of ranks.
        worker_id: The rank.
        chunk_hash: The chunk's hash: an int of any size and sign, or bytes, not empty.
        dtype: A torch dtype that has a name in keys.
        request_configs: Only `lmcache.tag.<name>` entries take part in the key. An empty tag value
            means no tag.

    Raises:
        TypeError: A field of the wrong type.
        ValueError: An unnamed dtype, an empty model name, or a tag that would not survive the
            string form ("@" in it, "%" in its name).

    Threads: immutable.
    """

    __slots__ = ()

    def __init__(
        self,
        model_name: str,
        world_size: int,
        worker_id: int,
        chunk_hash: int | bytes,
        dtype: torch.dtype,
        request_configs: Mapping[str, Any] | None = None,
    ) -> None:
        context = _context(model_name, world_size, worker_id, dtype, request_configs)
        super().__init__(context, _canonical_hash(chunk_hash), -1, request_configs or None)

    def with_new_worker_id(self, new_worker_id: int) -> "CacheEngineKey":
        """Return the same key for another rank."""
        arguments = list(self._constructor_arguments())
        arguments[2] = new_worker_id
        return type(self)(*arguments)

    def split_layers(self, num_layers: int) -> list["LayerCacheEngineKey"]:
        """Return one key per layer, layer 0 first."""
        return [self._layer(layer) for layer in range(num_layers)]

    def get_first_layer(self) -> "LayerCacheEngineKey":
        """Return the key of layer 0."""
        return self._layer(0)

    def _layer(self, layer_id: int) -> "LayerCacheEngineKey":
        return LayerCacheEngineKey(
            self.model_name,
            self.world_size,
            self.worker_id,
            self.chunk_hash,
            self.dtype,
            self._request_configs,
            layer_id,
        )

    @staticmethod
    def from_string(s: str) -> "CacheEngineKey":
        """Parse `to_string`'s form; ValueError when it is none, or has a layer."""
        arguments, layer_id = _parse(s)
        if layer_id is not None:
            raise ValueError(f"{s!r} is the key of a layer; use LayerCacheEngineKey.from_string")
        return CacheEngineKey(*arguments)

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> "CacheEngineKey":
        """Rebuild a key from `to_dict`'s form; values of request configs come back as strings."""
        configs = {}
        for entry in d.get("request_configs") or ():
            name, _, value = entry.partition("%")
            configs[name] = value
        try:
            return CacheEngineKey(
                d["model_name"],
                d["world_size"],
                d["worker_id"],
                d["chunk_hash"],
                NAME_TO_DTYPE[d["dtype"]],
                configs,
            )
        except KeyError as error:
            raise ValueError(f"not the dictionary of a cache key: {error} in {d!r}") from None


class LayerCacheEngineKey(CacheEngineKey):
    """Key of one layer of a chunk: `CacheEngineKey`'s fields and a layer index from 0."""

    __slots__ = ()

    def __init__(
        self,
        model_name: str,
        world_size: int,
        worker_id: int,
        chunk_hash: int | bytes,
        dtype: torch.dtype,
        request_configs: Mapping[str, Any] | None = None,
        layer_id: int = 0,
    ) -> None:
        layer_id = operator.index(layer_id)
        if layer_id < 0:
            raise ValueError(f"layer_id must not be negative, not {layer_id}")
        context = _context(model_name, world_size, worker_id, dtype, request_configs)
        KeyCore.__init__(
            self, context, _canonical_hash(chunk_hash), layer_id, request_configs or None
        )

    @property
    def layer_id(self) -> int:
        """Index of the layer."""
        layer_id: int = self._layer_id
        return layer_id

    def _constructor_arguments(self) -> tuple[Any, ...]:
        return (*super()._constructor_arguments(), self.layer_id)

    def to_string(self) -> str:
        """Return the string form: the layer stands before the tags."""
        return f"{self._fields_text()}@{self.layer_id}{self._tags_text()}"

    @staticmethod
    def from_string(s: str) -> "LayerCacheEngineKey":
        """Parse `to_string`'s form; ValueError when it is none, or has no layer."""
        arguments, layer_id = _parse(s)
        if layer_id is None:
            raise ValueError(f"{s!r} names no layer; use CacheEngineKey.from_string")
        return LayerCacheEngineKey(*arguments, layer_id)


def parse_cache_key(text: str) -> CacheEngineKey | LayerCacheEngineKey:
    """Parse a key string into the class it is of; ValueError when it is none."""
    arguments, layer_id = _parse(text)
    if layer_id is None:
        return CacheEngineKey(*arguments)
    return LayerCacheEngineKey(*arguments, layer_id)


class KeyFactory:
    """Makes the keys of one model, rank, dtype and tag set; checks those once.

    Raises as `CacheEngineKey` does. Threads: immutable.
    """

    __slots__ = ("_context", "_request_configs")

    def __init__(
        self,
        model_name: str,
        world_size: int,
        worker_id: int,
        dtype: torch.dtype,
        request_configs: Mapping[str, Any] | None = None,
    ) -> None:
        self._context = _context(model_name, world_size, worker_id, dtype, request_configs)
        self._request_configs = request_configs or None

    def make(self, chunk_hash: int | bytes) -> CacheEngineKey:
        """Return the key of `chunk_hash`."""
        return self.make_many((chunk_hash,))[0]

    def make_many(self, chunk_hashes: Iterable[int | bytes]) -> list[CacheEngineKey]:
        """Return one key per hash, in order."""
        hashes: Sequence[int | bytes] = (
            chunk_hashes if isinstance(chunk_hashes, (list, tuple)) else list(chunk_hashes)
        )
        if not all(type(chunk_hash) is int for chunk_hash in hashes):
            hashes = [_canonical_hash(chunk_hash) for chunk_hash in hashes]
        keys: list[CacheEngineKey] = make_keys(
            CacheEngineKey, self._context, hashes, self._request_configs
        )
        return keys


def _context(
    model_name: str,
    world_size: int,
    worker_id: int,
    dtype: torch.dtype,
    request_configs: Mapping[str, Any] | None,
) -> tuple[str, int, int, str, Tags | None]:
    if not isinstance(model_name, str):
        raise TypeError(f"model_name must be a str, not {type(model_name).__name__}")
    if not model_name:
        raise ValueError("model_name must not be empty")
    if world_size < 0:
        raise ValueError(f"world_size must not be negative, not {world_size}")
    return (
        _plain(model_name),
        operator.index(world_size),
        operator.index(worker_id),
        dtype_name(dtype),
        _tags(request_configs),
    )


def _plain(text: str) -> str:
    # A subclass of str could run code of its own when keys are compared under the cache's lock.
    return text if type(text) is str else "".join(text)


def _tags(request_configs: Mapping[str, Any] | None) -> Tags | None:
    if not request_configs:
        return None
    tags = []
    for config, value in request_configs.items():
        if not config.startswith(TAG_PREFIX):
            continue
        name = config[len(TAG_PREFIX) :]
        if not name or "@" in name or "%" in name:
            raise ValueError(
                f"tag name {name!r} (from {config!r}) must not be empty, or hold @ or %: the key "
                "string could not be read back"
            )
        if not isinstance(value, str):
            raise ValueError(
                f"the value of tag {name!r} must be a str, not {value!r}; pass str(value)"
            )
        if "@" in value:
            raise ValueError(
                f"the value {value!r} of tag {name!r} must not hold '@': the key string could not "
                "be read back"
            )
        if value:
            tags.append((_plain(name), _plain(value)))
    return tuple(sorted(tags)) or None


def _canonical_hash(chunk_hash: int | bytes) -> int | bytes:
    """An int wherever the string form of the bytes is that of an int, so that both are one key."""
    if not isinstance(chunk_hash, (bytes, bytearray)):
        return operator.index(chunk_hash)
    if not chunk_hash:
        raise ValueError("chunk_hash must not be empty bytes")
    if chunk_hash[0] >> 4 == 0:
        return bytes(chunk_hash)
    return int.from_bytes(chunk_hash, "big")


def _parse(text: str) -> tuple[KeyFields, int | None]:
    found = _KEY_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(
            f"{text!r} is not a cache key; expected "
            "model@world_size@worker_id@<hash in hex>@dtype[@layer][@tag%value...]"
        )
    digits = found["hash"]
    is_padded = len(digits) > 1 and len(digits) % 2 == 0 and digits[0] == "0"
    configs = {}
    for tag in found["tags"].split("@")[1:]:
        name, _, value = tag.partition("%")
        configs[TAG_PREFIX + name] = value
    arguments = (
        found["model"],
        int(found["world"]),
        int(found["worker"]),
        bytes.fromhex(digits) if is_padded else int(digits, 16),
        NAME_TO_DTYPE[found["dtype"]],
        configs or None,
    )
    return arguments, None if found["layer"] is None else int(found["layer"])
