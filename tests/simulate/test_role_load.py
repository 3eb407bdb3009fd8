"""The predicted load of planner and constructors."""

import pytest

import overlord as ol
from overlord.simulate.role_load import LoadModel, role_loads


def load(dp: int, model: LoadModel | None = None):
    return role_loads(num_groups=dp, step_samples=75.0 * dp, step_tokens=65_536.0 * dp, plan_s=0.001, model=model)


def test_messages_grow_with_hosts_and_the_load_of_a_host_does_not():
    (few, host_of_few), (many, host_of_many) = load(16), load(4096)
    assert (few.messages, many.messages) == (2 * 1.25, 512 * 1.25)
    assert many.num_bytes == 256 * few.num_bytes
    assert (host_of_few.cpu_ms, host_of_few.messages) == (host_of_many.cpu_ms, host_of_many.messages)
    assert many.num_bytes == pytest.approx(host_of_many.num_bytes * host_of_many.count)


def test_hosts_with_more_groups_take_fewer_messages_and_less_of_the_planner():
    planner, host = load(512, LoadModel(groups_per_host=64))
    assert (host.count, planner.messages) == (8, 10)
    assert planner.cpu_ms < load(512)[0].cpu_ms


def test_images_cost_their_constructors_time_and_the_planner_none():
    def loads(image_bytes: float):
        return role_loads(num_groups=16, step_samples=64.0, step_tokens=0.0, plan_s=0.001, image_bytes=image_bytes)

    (planner, host), (with_images, host_with_images) = loads(0.0), loads(64 * 3 * 336 * 336)
    assert planner == with_images
    assert host.cpu_ms == 0
    # Two hosts of 8 groups share 64 pictures, of which a core decodes about 400 a second.
    assert host_with_images.cpu_ms == pytest.approx(32 / 420 * 1e3, rel=0.05)


def test_a_load_needs_a_group():
    with pytest.raises(ol.errors.SpecError, match="at least one data-parallel group, got 0"):
        load(0)
