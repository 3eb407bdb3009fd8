"""The order of work on the streams of a ring, with streams that only remember what they wait for."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from overlord.trainer.ring.turn_streams import TurnStreams

TURNS = 6


class Stream:
    """What must be done before work that is put on it now."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.before: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before

    def wait_event(self, event: set[str]) -> None:
        self.before |= event

    def record_event(self) -> set[str]:
        return set(self.before)


class Streams:
    """A device whose work is a name and the names of all work that is done before it."""

    def __init__(self) -> None:
        self.caller = self.current = Stream(torch.device("cuda", 0))
        self.done_before: dict[str, set[str]] = {}

    def work(self, name: str) -> None:
        self.done_before[name] = set(self.current.before)
        self.current.before.add(name)

    @contextmanager
    def use(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def message(self, name: str) -> set[str]:
        """Start a message, which runs beside all streams, and return what is done when it has come."""
        self.done_before[name] = set(self.current.before)
        return self.done_before[name] | {name}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    monkeypatch.setattr("overlord.trainer.ring.turn_streams._of_thread", type("Thread", (), {})())
    return streams


def go_around(gpu: Streams, number: int, kernel_streams: int = 2, ahead: int = 1) -> None:
    """The work of one pass around a ring, as `differentiate_around` has it."""
    gpu.work(f"input {number}")
    streams = TurnStreams(torch.device("cuda", 0), TURNS, kernel_streams)
    keys = [gpu.current.record_event()]
    sums: set[str] = set()
    for turn in range(TURNS):
        with streams.arrival(turn):
            gpu.current.wait_event(keys[turn])
        with streams.keys(turn):
            while len(keys) < min(turn + ahead + 1, TURNS):
                gpu.current.wait_event(keys[-1])
                keys.append(gpu.message(f"keys {number}.{len(keys)}"))
        with streams.kernels(turn):
            gpu.work(f"kernel {number}.{turn}")
        with streams.sums(turn):
            gpu.current.wait_event(sums)
            gpu.work(f"sum {number}.{turn}")
            sums = gpu.message(f"sums {number}.{turn + 1}")
            if turn + 1 == TURNS:
                gpu.current.wait_event(sums)
    streams.join()
    gpu.work(f"cast {number}")
    assert streams.take_out([], torch.float32) == []


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("kernel_streams", [1, 2])
def test_kernels_wait_for_their_keys_and_for_memory_but_not_for_sums(gpu, kernel_streams, ahead):
    go_around(gpu, 0, kernel_streams, ahead)
    before = gpu.done_before
    for turn in range(TURNS):
        kernel = before[f"kernel 0.{turn}"]
        assert "input 0" in kernel
        if turn > 0:
            assert f"keys 0.{turn}" in kernel
            assert f"sum 0.{turn - 1}" not in kernel
            # On two streams a kernel fills the gap at the end of the turn before.
            assert (f"kernel 0.{turn - 1}" in kernel) == (kernel_streams == 1)
        if turn > 1:  # which read what is freed when this kernel begins
            assert f"sum 0.{turn - 2}" in kernel
        assert f"kernel 0.{turn}" in before[f"sum 0.{turn}"]
        if turn + ahead < TURNS:
            # The buffers of the keys of the turn before are received into again.
            if turn > 0:
                assert f"kernel 0.{turn - 1}" in before[f"keys 0.{turn + ahead}"]
            assert f"kernel 0.{turn}" not in before[f"keys 0.{turn + ahead}"]
    everything = {f"{what} 0.{turn}" for what in ("kernel", "sum") for turn in range(TURNS)}
    assert everything | {f"sums 0.{TURNS}"} <= before["cast 0"]


def test_the_next_pass_uses_memory_of_side_streams_only_when_the_last_is_done(gpu):
    go_around(gpu, 0)
    go_around(gpu, 1)
    for name, before in gpu.done_before.items():
        if name.split()[1].startswith("1"):
            assert "cast 0" in before, name


def test_without_a_gpu_and_in_a_ring_of_one_rank_nothing_is_put_on_other_streams(gpu):
    gpu_device = torch.device("cuda", 0)
    for device, num_ranks, kernel_streams in ((torch.device("cpu"), 4, 2), (gpu_device, 1, 2), (gpu_device, 4, 0)):
        streams = TurnStreams(device, num_ranks, kernel_streams)
        for inside in (streams.arrival, streams.keys, streams.kernels, streams.sums):
            with inside(0):
                assert gpu.current is gpu.caller
        streams.join()
        tensor = torch.ones(2)
        assert streams.take_out([tensor], torch.float32)[0] is tensor
