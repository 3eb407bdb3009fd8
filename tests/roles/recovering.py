"""Jobs whose planners are lost in tests, and their streams when nobody disturbs them."""

from pathlib import Path

import overlord as ol
from tests.small_sources import Numbered, job_of

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
C = Numbered(rows=9, unit_rows=2, first=300, longest=3)
COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)
MIXTURE = ol.Mixture({0: {"a": 5, "b": 3}, 4: {"a": 1, "b": 1, "c": 1}}, unit="tokens", ramp="linear")
JOBS = [
    job_of({"a": A, "b": B, "c": C}, mixture=MIXTURE, mesh=ol.Mesh(dp=2), strategy=ol.strategies.long_short(COST)),
    job_of({"a": A, "b": B, "c": C}, ol.Batch(tokens=64, sequence_length=16, cut_documents=True), mixture=MIXTURE),
    job_of(
        {"a": Numbered(rows=17, first=1, repeat=False), "b": Numbered(rows=60, first=100, repeat=False)},
        ol.Batch(samples=9, sequence_length=16),
        mixture=ol.Mixture({"a": 1, "b": 1}, stop="all_exhausted"),
        mesh=ol.Mesh(dp=2, cp=2),
        prefetch=0,
    ),
]
STEPS = 12


def log_of(folder: Path, **settings: float) -> ol.Log:
    return ol.Log(str(folder / "log"), snapshot_every=int(settings.get("every", 1000)), sync_s=settings.get("sync_s", 1.0))


def segment_of(folder: Path) -> Path:
    return sorted((folder / "log").iterdir())[-1]
