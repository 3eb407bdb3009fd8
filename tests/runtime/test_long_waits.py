"""What lasts long is told of while it lasts; and whoever only asks how the run stands never waits."""

import logging
import threading
from collections.abc import Iterator

import pytest

import overlord as ol
from overlord.runtime.long_waits import warn_if_long
from overlord.service.channel import FlightChannel
from overlord.service.client import Client
from tests.commands import python
from tests.service.test_client import Gated
from tests.small_sources import Numbered, job_of

pytestmark = pytest.mark.strangers


class Told(logging.Handler):
    """Keeps warnings, and lets a test wait for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.came:
            self.texts.append(record.getMessage())
            self.came.notify_all()

    def wait_for(self, num: int) -> list[str]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.texts) >= num, 30)
            return list(self.texts)


@pytest.fixture
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("overlord.waiting")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("num_workers", [0, 2], ids=["no threads", "threads"])
@pytest.mark.parametrize("connected", [False, True], ids=["in process", "connected"])
def test_a_client_without_a_timeout_says_what_it_waits_for_again_and_again(told, num_workers, connected):
    source = Gated(rows=40, first=1)
    with ol.start(job_of({"slow": source}, num_workers=num_workers)) as loader:
        made = ol.connect(loader.serve(), rank=0, timeout_s=None) if connected else loader.client(0)
        client = Client(0, made._channel, warn_after_s=0.05)
        taken: list[int] = []
        reader = threading.Thread(target=lambda: taken.append(next(client).number))
        reader.start()
        texts = told.wait_for(3)
        source.gate.set()
        reader.join(30)
        assert taken == [0]
        assert all("rank 0 waits for step 0 (it has no timeout): " in text for text in texts)
        assert "the facts of chunk 0 of source 'slow'" in texts[-1]


def test_a_wait_that_ended_is_told_of_no_more_and_pauses_grow(told):
    wait = warn_if_long(lambda: "the answer", 0.02)
    with wait:
        texts = told.wait_for(3)
        assert wait._every_s >= 0.02 * 2**3
    assert all(text.endswith(" s: the answer") for text in texts)
    num = len(told.texts)
    with warn_if_long(lambda: "another", 0.02):
        assert told.wait_for(num + 1)[num].endswith("another")


def test_what_cannot_be_described_is_told_of_all_the_same(told):
    with warn_if_long(lambda: str(1 / 0), 0.02):
        assert "ZeroDivisionError" in told.wait_for(1)[0]


def test_a_service_that_is_not_there_is_waited_for_aloud(told, monkeypatch):
    monkeypatch.setattr(FlightChannel, "warn_after_s", 0.05)
    with pytest.raises(ol.errors.ServiceError, match="could not reach the service"):
        ol.connect("127.0.0.1:9", rank=3, timeout_s=1.0)
    assert "rank 3 waits for the service at grpc://127.0.0.1:9: " in told.wait_for(1)[0]


SILENT = """
import logging, threading
import overlord as ol
from overlord.service.client import Client
from tests.service.test_client import Gated
from tests.small_sources import job_of

source = Gated(rows=40, first=1)
loader = ol.start(job_of({"slow": source}))
threading.Timer(1.0, source.gate.set).start()
print(next(Client(0, loader.client(0)._channel, warn_after_s=0.2)).number)
loader.close()
"""


def test_a_program_that_set_up_no_logging_sees_it_on_standard_error():
    run = python("-c", SILENT)
    assert run.stdout == "0\n"
    assert "rank 0 waits for step 0" in run.stderr
    assert "source 'slow'" in run.stderr


@pytest.mark.parametrize("num_workers", [0, 2], ids=["no threads", "threads"])
def test_how_a_run_stands_is_told_at_once_while_a_source_hangs(num_workers):
    source = Gated(rows=40, first=1)
    with ol.start(job_of({"slow": source, "b": Numbered(first=300)}, num_workers=num_workers)) as loader:
        client = loader.client(0)
        reader = threading.Thread(target=next, args=(client,))
        reader.start()
        while not any("facts of chunk 0" in line for line in loader.status_lines()):
            pass
        looker = threading.Thread(target=loader.plan, args=(3,))
        looker.start()
        report = loader.report()
        assert report.step == 0
        assert report.mix["slow"].samples == 0
        assert loader.status().reached == 0
        assert loader.scaling() == ()
        assert reader.is_alive(), "and all that while the source hung"
        source.gate.set()
        reader.join(30)
        looker.join(30)
        assert loader.report(1).step == 1
