import os

import jax
import pytest

from fcjax import devices


def test_each_core_is_a_device_of_its_own():
    cores = devices.for_programs(1000)
    assert len(cores) == len(set(cores)) == devices.num_cores()
    assert len({id(core.client) for core in cores}) == len(cores)
    assert all(core.platform == "cpu" for core in cores)
    assert devices.for_programs(1) == cores[:1]
    assert devices.for_programs(1000) == cores


def test_a_client_of_a_core_has_one_thread(monkeypatch):
    monkeypatch.setenv("NPROC", "7")
    devices._cores.__wrapped__(1)
    assert os.environ["NPROC"] == "7"
    monkeypatch.delenv("NPROC")
    devices._cores.__wrapped__(1)
    assert "NPROC" not in os.environ


def test_without_such_clients_cores_share_the_one_of_jax(monkeypatch):
    from jaxlib import xla_client

    monkeypatch.delattr(xla_client, "make_cpu_client")
    with pytest.warns(RuntimeWarning, match="runs share the threads of one client.*make_cpu_client"):
        assert devices._cores.__wrapped__(3) == (jax.devices()[0],) * 3
