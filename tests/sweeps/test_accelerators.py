"""Programs of sweeps can be lowered for accelerators, which this machine need not have."""

import functools

import accelerators  # experiments/benchmarks
import jax
import pytest
import tiny

import fcjax


@pytest.mark.slow
@pytest.mark.parametrize("platform", accelerators.PLATFORMS)
def test_every_policy_can_be_exported(platform):
    names = accelerators.names()
    assert len(names) > 20
    for name in names:
        group = accelerators.group_of(name, dataset=tiny.dataset(), num_devices=6, preset=PRESET)
        program = accelerators.exported(group, platform)
        assert program.platforms == (platform,)
        assert "custom_call" not in program.mlir_module(), name  # these depend on the hardware


PRESET = functools.partial(tiny.experiment, width=None)


@pytest.mark.slow
def test_slots_of_many_devices_can_be_exported():
    """An accelerator trains only the scheduled ones of many devices."""
    preset = functools.partial(tiny.experiment, width=4)
    group = accelerators.group_of("fc", dataset=tiny.dataset(), num_devices=6, preset=preset)
    assert accelerators.operations_of(accelerators.exported(group, "cuda"))["stablehlo.while"] > 0


@pytest.mark.slow
def test_callbacks_are_found():
    """A program that calls back into Python is not one for accelerators."""

    def select(key, state, context):
        jax.debug.callback(lambda: None)
        return fcjax.policies.fixed(2).select(key, state, context)

    policy = fcjax.Policy(fcjax.policies.fixed(2).init, select)
    group = accelerators.group_of({"mine": policy}, dataset=tiny.dataset(), num_devices=6, preset=PRESET)
    with pytest.raises(ValueError, match="different from the lowering platform cuda"):
        accelerators.exported(group, "cuda")
