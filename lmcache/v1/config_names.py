"""Which names set something, in the environment and in files; unknown ones get a near match."""

import ast
import difflib
from collections.abc import Iterable, Mapping

from lmcache.logging import init_logger
from lmcache.v1.config_knob import ENV_PREFIX
from lmcache.v1.config_schema import ALIASES, FIELDS
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError

logger = init_logger(__name__)

CONFIG_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_NEAR_MATCH_CUTOFF = 0.75
_QUOTES = ("'", '"')
# Variables that are no settings: read by this package, its build, by upstream or its plug-ins.
_OTHER_VARIABLES = frozenset(
    {
        CONFIG_FILE_VARIABLE,
        "LMCACHE_BUILD_JOBS",
        "LMCACHE_DEVICE_BACKEND",
        "LMCACHE_DISABLE_BANNER",
        "LMCACHE_FORCE_SKIP_SAVE",
        "LMCACHE_GPU",
        "LMCACHE_GPU_STAGING_BUFFER_BYTES",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_MQ_TIMEOUT",
        "LMCACHE_ROCM_ENABLE_BATCH_MEMCPY",
        "LMCACHE_SERVER_URL",
        "LMCACHE_TRACK_USAGE",
        "LMCACHE_USE_EXPERIMENTAL",
        "LMCACHE_VERSION",
    }
)
_OTHER_PREFIXES = (
    "LMCACHE_AEROSPIKE_",
    "LMCACHE_CONTROLLER_",
    "LMCACHE_COORDINATOR_",
    "LMCACHE_EC_",
    "LMCACHE_GPU_",
    "LMCACHE_MP_",
    "LMCACHE_MUSA_",
    "LMCACHE_OFFLOAD_",
    "LMCACHE_PLUGIN_",
    "LMCACHE_REQUEST_TELEMETRY_",
    "LMCACHE_RESP_",
    "LMCACHE_RUNTIME_PLUGIN_",
    "LMCACHE_USAGE_TRACK_",
)
_ENCODER_KEY = "ec"


def env_names() -> dict[str, str]:
    """Return variable → name (current or older) for everything that sets a setting."""
    return {ENV_PREFIX + name.upper(): name for name in (*FIELDS, *ALIASES)}


def collect_from_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return name → text for the settings in `environ`, and warn about unknown `LMCACHE_*`."""
    known = env_names()
    found = {}
    for variable, text in environ.items():
        if variable in known:
            found[known[variable]] = strip_quotes(text)
        elif variable.startswith(ENV_PREFIX) and not _is_other_variable(variable):
            hint = near_match(variable, (*known, *_OTHER_VARIABLES))
            logger.warning("%s is not a setting and is ignored%s", variable, hint)
    return found


def resolve_names(given: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the known settings of `given` under their current names.

    Older names are translated with a warning; unknown names are dropped with one.

    Args:
        given: Names and values as the user wrote them.
        source: Where they come from, for the messages.

    Raises:
        ConfigError: A setting is given under two names.
        UnsupportedFeatureError: Encoder-cache settings (`ec:` or `ec_*`).
    """
    resolved: dict[str, object] = {}
    for raw_name, value in given.items():
        name = ALIASES.get(raw_name, raw_name)
        if name not in FIELDS:
            _refuse_encoder_cache(str(raw_name), value, source)
            hint = near_match(str(raw_name), (*FIELDS, *ALIASES))
            logger.warning("Unknown setting %s (%s) is ignored%s", raw_name, source, hint)
            continue
        if name != raw_name:
            logger.warning("%s (%s) is an older name; use %s", raw_name, source, name)
        if name in resolved:
            raise ConfigError(f"{name} is set twice ({source}): as {raw_name} and otherwise")
        resolved[name] = value
    return resolved


def near_match(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean X?" for the closest candidate, or an empty text."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=_NEAR_MATCH_CUTOFF)
    return f"; did you mean {close[0]}?" if close else ""


def strip_quotes(text: str) -> str:
    """Return the text inside one pair of matching quotes, escapes resolved; else `text`."""
    stripped = text.strip()
    if len(stripped) < 2 or stripped[0] != stripped[-1] or stripped[0] not in _QUOTES:
        return text
    try:
        unquoted = ast.literal_eval(stripped)
    except (ValueError, SyntaxError):
        return stripped[1:-1]
    return unquoted if isinstance(unquoted, str) else text


def _is_other_variable(variable: str) -> bool:
    return variable in _OTHER_VARIABLES or variable.startswith(_OTHER_PREFIXES)


def _refuse_encoder_cache(name: str, value: object, source: str) -> None:
    if name.lower() == _ENCODER_KEY or name.lower().startswith(_ENCODER_KEY + "_"):
        raise UnsupportedFeatureError(
            f"{name}={value!r} ({source}) asks for an encoder cache: this package does not have "
            "it; upstream LMCache does. Unset it to go on without."
        )
