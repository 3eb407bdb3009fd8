"""Orbax: the state of a run beside a model, as JSON and as a leaf of a tree."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from overlord.integrations.torch import Stateful
from tests.trainer.test_checkpoints import CUT, STEPS, TOKENS, read, started, steered, uncut

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


def goes_on_from(state: Any, wrap: Any, first: list[Any]) -> None:
    with started(TOKENS) as (loader, fresh):
        wrap(fresh).load_state_dict(state)
        assert fresh.step == CUT
        assert len(loader.decisions()) > 0
        assert first + read(fresh, STEPS - CUT) == uncut(TOKENS)


@pytest.mark.parametrize("wrap", [lambda client: client, Stateful], ids=["raw", "Stateful"])
def test_a_checkpoint_manager_keeps_a_state_as_json_beside_the_model(tmp_path, wrap):
    with started(TOKENS) as (loader, client), ocp.CheckpointManager(tmp_path / "saved") as manager:
        steered(loader)
        first = read(client, CUT)
        saved = ocp.args.Composite(
            model=ocp.args.StandardSave({"weights": jnp.arange(4.0)}),
            data=ocp.args.JsonSave(dict(wrap(client).state_dict())),
        )
        manager.save(client.step, args=saved)
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        assert manager.latest_step() == CUT
        wanted = ocp.args.Composite(model=ocp.args.StandardRestore(), data=ocp.args.JsonRestore())
        goes_on_from(manager.restore(CUT, args=wanted)["data"], wrap, first)


def test_a_stateful_is_a_leaf_of_a_tree_whatever_was_decided_since(tmp_path: Path):
    """Orbax restores into a tree of the same shape, which the raw state does not keep: decisions and carried samples are
    added to it."""
    with started(TOKENS) as (_, client):
        shape = {"weights": jnp.zeros(4), "data": Stateful(client).state_dict()}
    with started(TOKENS) as (loader, client), ocp.PyTreeCheckpointer() as checkpointer:
        steered(loader)
        first = read(client, CUT)
        tree = {"weights": jnp.arange(4.0), "data": Stateful(client).state_dict()}
        checkpointer.save(tmp_path / "tree", tree)
        found = checkpointer.restore(tmp_path / "tree", item=shape)
    assert found["weights"].tolist() == [0, 1, 2, 3]
    goes_on_from(found["data"], Stateful, first)
