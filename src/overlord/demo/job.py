"""The job of the demo, which puts a copy of this file beside the corpus it makes.

Play with it: `overlord check job.py`, `overlord explain job.py --step 3`, `overlord run job.py --steps 200`.
"""

from pathlib import Path

import pyarrow as pa

import overlord as ol

HERE = Path(__file__).parent

# Bytes as tokens need no vocabulary. Real jobs name a tiktoken encoding or a tokenizer.json here.
text = ol.Tokenize("text", encoding=ol.ByteTokenizer())
caption = ol.Tokenize("txt", encoding=ol.ByteTokenizer(), keep=("jpg",))

# What a document costs on a Llama 3 8B, so that ranks get equal work rather than equal numbers of tokens.
llama_8b = ol.TransformerCost.of(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)

job = ol.Job(
    sources={
        "code": ol.Parquet(f"{HERE}/code/*.parquet", transform=text),
        "packages": ol.Parquet(f"{HERE}/packages/*.parquet", transform=text),
        "docstrings": ol.Jsonl(f"{HERE}/docstrings/*.jsonl.zst", transform=text),
        "manual": ol.Jsonl(f"{HERE}/manual/*.jsonl.zst", transform=text),
        "pictures": ol.WebDataset(
            f"{HERE}/pictures/*.tar",
            columns={"jpg": pa.binary_view(), "txt": pa.string()},
            transform=caption,
            decode=ol.vision.DecodeImage("jpg", size=(64, 64)),
        ),
    },
    mixture=ol.Mixture({"code": 40, "packages": 30, "docstrings": 15, "manual": 14.5, "pictures": 0.5}, unit="tokens"),
    batch=ol.Batch(tokens=16 * 4096, sequence_length=4096, pad_token=256),
    mesh=ol.Mesh(dp=2, cp=2),
    strategy=ol.strategies.long_short(llama_8b),
)
