"""Sockets are where 0.5.6 has them: the other end may be another program's."""

import json
from pathlib import Path

import pytest

from lmcache.v1.errors import ConfigError
from lmcache.v1.rpc_utils import IPC_SOCKET_PATH_MAX_LEN, get_zmq_rpc_path_lmcache

RECORDED = json.loads((Path(__file__).parent / "goldens" / "rpc_paths.json").read_text())


@pytest.mark.parametrize(("arguments", "path"), RECORDED["paths"])
def test_the_path_is_the_recorded_one(arguments, path):
    assert get_zmq_rpc_path_lmcache(*arguments) == path
    assert len(path.encode()) <= IPC_SOCKET_PATH_MAX_LEN


def test_the_directory_is_the_settings_or_the_default(monkeypatch):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    assert get_zmq_rpc_path_lmcache("e").startswith("/tmp/vllm_rpc/engine_e_")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    assert get_zmq_rpc_path_lmcache("e").startswith("/elsewhere/engine_e_")


def test_a_directory_that_is_too_long_names_the_setting():
    with pytest.raises(ConfigError, match="VLLM_RPC_BASE_PATH"):
        get_zmq_rpc_path_lmcache("e", base_url="/" + "d" * 100)


def test_an_unknown_service_is_named():
    with pytest.raises(ValueError, match="service_name='other' is unknown"):
        get_zmq_rpc_path_lmcache("e", "other")
