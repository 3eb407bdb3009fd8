"""Fuzzing of everything that reads bytes which somebody else wrote.

A *target* makes damaged inputs from small real ones and reads each twice: with Overlord, and with an independent oracle
(pyarrow, tarfile, json, Pillow, or a rule that must hold). For every input Overlord must

- return what the oracle returns,
- or report rows as bad,
- or raise an OverlordError that names the input;

and never crash, hang, raise anything else or return other data. Where the oracle itself fails, an answer is right only if
it is the content of the file before it was damaged.

    python -m tests.fuzz --seconds 600 --seed 7 --target parquet

`tests/fuzz/test_fuzz.py` runs a few hundred inputs of each target, the same ones every time.
"""
