"""How the bytes of a memory object are laid out."""

import enum


class MemoryFormat(enum.Enum):
    """Layouts, numbered as on the wire. L layers, T tokens, D heads * head size."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, L, T, D]
    KV_T2D = 2  # [T, 2, D]
    KV_2TD = 3  # [2, T, D]
    BINARY = 4  # [bytes], in the pool
    BINARY_BUFFER = 5  # [bytes], a bytearray of its own
    KV_MLA_FMT = 6  # [1, L, T, D]
    EC_TD = 7  # [T, D]
    HS_TD = 8  # [T, D]

    __hash__ = object.__hash__  # members are single; Enum's own hash costs a Python call

    def token_dim(self) -> int:
        """Return the axis that 0.5.6 calls the token axis.

        For KV_T2D and KV_2TD that is not where the tokens are; `token_axis` tells the truth. Both
        stay, because callers compute with this one.
        """
        return _COMPAT_TOKEN_DIM.get(self, 0)

    @property
    def token_axis(self) -> int:
        """The axis along which tokens run (0 for bytes)."""
        return _TOKEN_AXIS.get(self, 0)


_COMPAT_TOKEN_DIM = {
    MemoryFormat.KV_2LTD: 2,
    MemoryFormat.KV_T2D: 1,
    MemoryFormat.KV_MLA_FMT: 2,
}
_TOKEN_AXIS = {
    MemoryFormat.KV_2LTD: 2,
    MemoryFormat.KV_2TD: 1,
    MemoryFormat.KV_MLA_FMT: 2,
}
