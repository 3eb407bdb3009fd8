"""DeepSpeed: two processes train, stop, and resume exactly; with ZeRO 1 on the same number of ranks, as DeepSpeed has it."""

import types
from typing import Any, ClassVar

import pytest

from overlord.errors import SpecError, StateError
from overlord.integrations.deepspeed import loader, train_step
from tests.integrations.training import check_stop_and_resume, train_tiny
from tests.small_sources import Numbered, job_of, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "other_ranks"), [(0, "torchrun"), (1, None), (2, None)])
def test_deepspeed_trains_stops_and_resumes_exactly(tmp_path, stage, other_ranks):
    check_stop_and_resume("deepspeed", tmp_path, "--zero", stage, reference=train_tiny, other_ranks=other_ranks)


class Engine:
    """As much of DeepSpeed's as the loader needs."""

    saved: ClassVar[dict[str, dict[str, Any]]] = {}

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        raise NotImplementedError

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: Any = None, **_: Any) -> bool:
        self.saved[save_dir] = {"tag": tag, **client_state}
        return True

    def load_checkpoint(self, load_dir: str, load_module_only: bool = False) -> tuple[str | None, Any]:
        return (load_dir, dict(self.saved[load_dir])) if load_dir in self.saved else (None, None)


def test_the_engines_own_calls_save_and_load_the_state_beside_the_users():
    engine, job = Engine(), job_of({"a": Numbered(first=1)})
    with loader(job, engine) as client:
        assert engine.load_checkpoint("nowhere") == (None, None)
        next(client)
        engine.save_checkpoint("here", "step1", {"mine": 5})
        after = tokens_of(next(client)).tolist()
        assert engine.load_checkpoint("here") == ("here", {"tag": "step1", "mine": 5})
        assert client.step == 1
        assert tokens_of(next(client)).tolist() == after
        Engine.saved["other"] = {"tag": None}
        with pytest.raises(StateError, match=r"the checkpoint other has no state of Overlord.*load_module_only=True"):
            engine.load_checkpoint("other")
        assert engine.load_checkpoint("other", load_module_only=True) == ("other", {"tag": None})
        assert client.step == 2


def test_engines_with_pipelines_are_refused():
    with pytest.raises(SpecError, match="use an engine without pipeline parallelism"):
        train_step(types.SimpleNamespace(grid=None), None, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="use an engine without pipeline parallelism"):
        loader(None, types.SimpleNamespace(grid=None))
