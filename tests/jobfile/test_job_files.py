"""YAML job files say what Python files say; words change both; a mistake is named with its line and the nearest name."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.checkpoint.description import Describer
from overlord.checkpoint.fingerprint import Fingerprint
from overlord.cli import main
from overlord.jobfile.loading import override
from overlord.jobfile.printing import as_python, as_yaml
from overlord.jobfile.schema import job_schema
from tests.jobfile import helpers

HELPERS = "tests.jobfile.helpers"
YAML_JOB = """
sources:
  web:
    paths: TEXTS
    transform:
      - HELPERS:clean
      - Tokenize: {encoding: ByteTokenizer, keep: [n]}
    window: 2
    buffer_bytes: 64MiB
    on_bad_row: {policy: skip, budget: 5}
  code:
    reader: Jsonl
    paths: [TEXTS]
    columns: {text: string}
    transform: {Tokenize: {encoding: ByteTokenizer}}
    repeat: 3
batch: {sequence_length: 1k, tokens: 8k, document_limits: {0: 256, 10: 1k}}
mixture: {weights: {0: {web: 1, code: 2}, 100: {web: 1}}, unit: tokens}
mesh: {dp: 2}
strategy: {long_short: {cost: {TransformerCost: {per_token: 1.0, per_length_squared: 1e-6}}, max_tokens: 2k}}
skip: [{source: web, rows: [1], file: texts.jsonl}]
seed: 7
""".replace("HELPERS", HELPERS)


def python_job(texts: Path) -> ol.Job:
    tokenize = ol.Tokenize(encoding=ol.ByteTokenizer())
    return ol.Job(
        sources={
            "web": ol.Jsonl(
                str(texts),
                transform=(helpers.clean, ol.Tokenize(encoding=ol.ByteTokenizer(), keep=("n",))),
                window=2,
                buffer_bytes=64 << 20,
                on_bad_row=ol.policies.BadRows("skip", budget=5),
            ),
            "code": ol.Jsonl((str(texts),), columns={"text": pa.string()}, transform=tokenize, repeat=3),
        },
        batch=ol.Batch(sequence_length=1024, tokens=8192, document_limits={0: 256, 10: 1024}),
        mixture=ol.Mixture({0: {"web": 1, "code": 2}, 100: {"web": 1}}, unit="tokens"),
        mesh=ol.Mesh(dp=2),
        strategy=ol.strategies.long_short(ol.TransformerCost(per_token=1.0, per_length_squared=1e-6), max_tokens=2048),
        skip=[ol.Skip("web", file="texts.jsonl", rows=[1])],
        seed=7,
    )


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " * (i % 5 + 1), "n": i}) + "\n" for i in range(200)))
    return path


def yaml_file(tmp_path: Path, texts: Path, old: str = "", new: str = "") -> Path:
    path = tmp_path / "job.yaml"
    text = YAML_JOB.replace("TEXTS", str(texts))
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def fingerprint(job: ol.Job) -> Any:
    return Fingerprint.of(job, {name: source.units() for name, source in job.sources.items()}).to_dict()


def same_job(one: ol.Job, other: ol.Job) -> bool:
    """Whether two jobs declare the same stream, and the same of all else that a text can tell."""
    assert fingerprint(one) == fingerprint(other)
    assert one.batch == other.batch
    assert one.mixture == other.mixture
    assert one.mesh == other.mesh
    assert one.skip == other.skip
    return yaml.safe_load(as_yaml(one)) == yaml.safe_load(as_yaml(other))


def test_a_yaml_file_declares_the_job_of_a_python_file(tmp_path, texts):
    job = ol.load_job(yaml_file(tmp_path, texts))
    assert same_job(job, python_job(texts))
    with ol.start(job) as loader:
        assert next(loader.client(0, timeout_s=60)).loss_tokens > 0


def test_either_form_is_printed_from_the_other(tmp_path, texts, capsys):
    job = python_job(texts)
    (tmp_path / "printed.yaml").write_text(as_yaml(job))
    assert same_job(ol.load_job(tmp_path / "printed.yaml"), job)
    (tmp_path / "printed_job.py").write_text(as_python(job))
    assert same_job(ol.load_job(tmp_path / "printed_job.py"), job)
    assert main(["check", str(tmp_path / "printed.yaml"), "--print", "python", "mesh.dp=4"]) == 0
    assert "mesh=ol.Mesh(dp=4)" in capsys.readouterr().out


def test_what_a_file_cannot_say_is_named(texts):
    job = ol.Job(
        sources={"web": ol.Jsonl(str(texts), transform=lambda table: table)}, batch=ol.Batch(sequence_length=8, tokens=8)
    )
    with pytest.raises(ol.errors.SpecError, match=r"sources\.web\.transform is <function .*which a job file cannot say"):
        as_yaml(job)


def test_a_source_of_your_own_and_functions_are_named_by_module(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        f"""
sources:
  mine: {{reader: "{HELPERS}:Numbered", rows: 50, transform: ["{HELPERS}:upper", {{"{HELPERS}:Shift": {{by: 3}}}}]}}
batch: {{sequence_length: 16, tokens: 64}}
"""
    )
    source = ol.load_job(path).sources["mine"]
    assert source == helpers.Numbered(rows=50, transform=(helpers.upper, helpers.Shift(3)))
    assert ol.load_job(path).sources == yaml_again(ol.load_job(path), tmp_path).sources


def yaml_again(job: ol.Job, folder: Path) -> ol.Job:
    (folder / "again.yaml").write_text(as_yaml(job))
    return ol.load_job(folder / "again.yaml")


# Mistakes


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tokens: 8k", "token: 8k", r"job\.yaml, line 17: batch has no option 'token'; did you mean 'tokens'\?"),
        ("seed: 7", "sede: 7", r"job\.yaml, line 22: the job has no option 'sede'; did you mean 'seed'\? It has sources, "),
        ("window: 2", "windw: 2", r"line 8: sources\.web has no option 'windw'; did you mean 'window'\?"),
        ("- Tokenize:", "- Tokenise:", r"got Tokenise; did you mean 'Tokenize'\?"),
        ("keep: [n]", "keeps: [n]", r"has no option 'keeps'; did you mean 'keep'\?"),
        (":clean", ":claen", r"has no 'claen'; did you mean 'clean'\?"),
        (f"{HELPERS}:clean", "no.such:clean", r"the module 'no\.such' cannot be imported"),
        ("reader: Jsonl", "reader: Json", r"line 12: there is no 'Json' in Overlord; did you mean 'Jsonl'\?"),
        ("reader: Jsonl", "reader: Tokenize", r"'Tokenize' is not a reader"),
        ("unit: tokens", "unit: tokns", r"mixture\.unit is one of samples, tokens, got 'tokns'; did you mean 'tokens'\?"),
        ("dp: 2", "dp: two", r"line 19: mesh\.dp is a whole number, got 'two'"),
        ("seed: 7", "seed: 7\nseed: 8", r"line 23: 'seed' stands twice, first in line 22"),
        ("mesh: {dp: 2}", "mesh: {dp: 2", r"is not YAML"),
        ("mesh: {dp: 2}", "mesh: !!python/object/apply:os.system [ls]", r"is not YAML: could not determine a constructor"),
        ("batch:", "batches:", r"the job has no option 'batches'; did you mean 'batch'\?"),
        ("sequence_length: 1k, ", "", r"Batch\(\) missing 1 required option: 'sequence_length'"),
        (
            "reader: Jsonl\n    paths",
            "pathes",
            r"line 12: sources\.code has no option 'pathes'; did you mean 'paths'\?",
        ),
        ("reader: Jsonl\n    paths: [", "paths: [x, ", r"sources\.code needs a reader"),
        ("window: 2", "window: 2.5", r"line 8: sources\.web\.window is a whole number or null, got 2\.5"),
        ("window: 2", "window: yes", r"sources\.web\.window is a whole number or null, got true"),
        ("seed: 7", "prefetch: 2.5", r"line 22: prefetch is a whole number, got 2\.5"),
        ("window: 2", "shuffle: 3", r"sources\.web\.shuffle is true or false, got 3"),
        (
            "window: 2",
            "tokens: 3",
            r"sources\.web\.tokens is text or null, got 3; text that looks like that is quoted, as '3'",
        ),
        ("paths: [", "paths: [3, ", r"sources\.code\.paths\.0 is text, got 3"),
        ("text: string", "text: 3", r"sources\.code\.columns\.text is an Arrow type, got 3"),
        ("unit: tokens", "unit: 3", r"mixture\.unit is one of samples, tokens, got 3"),
        ("tokens: 8k", "tokens: 4096.0", r"line 17: batch\.tokens is a whole number or null, got 4096\.0"),
        ("tokens: 8k", "tokens: 8k, drop_last: 3", r"batch\.drop_last is true or false, got 3"),
        ("seed: 7", "seed: 1.5", r"line 22: seed is a whole number, got 1\.5"),
        ("seed: 7", "num_workers: 1.5", r"num_workers is a whole number or null, got 1\.5"),
        ("web: 1, code: 2", "web: 1, code: yes", r"mixture\.weights\.0\.code is a number, got true"),
        ("10: 1k", "ten: 1k", r"batch\.document_limits has whole numbers as keys, such as 1000 or 50k, got 'ten'"),
        ("{0: 256, 10: 1k}", "{0: 256, 1k: 8, 1024: 1k}", r"batch\.document_limits has 1024 twice, the second time as 1024"),
        ("code:\n", "no:\n", r"line 11: a key is text or a number, the key no is read as False; quote it if it is a name"),
        ("code:\n", "~:\n", r"line 11: a key is text or a number, the key ~ is read as None; quote it"),
        ("tokens: 8k", "tokens: 7", r"tokens per step must be a multiple of sequence_length"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_named_with_its_line(tmp_path, texts, old, new, said):
    with pytest.raises(ol.errors.SpecError, match=said):
        ol.load_job(yaml_file(tmp_path, texts, old, new))


def test_own_keys_replace_what_is_merged_and_stand_once(tmp_path, texts):
    text = (
        f"sources:\n"
        f"  a: &a\n    paths: {texts}\n    transform: &t {{Tokenize: {{encoding: ByteTokenizer}}}}\n    window: 2\n"
        f"  b: &b\n    <<: *a\n    window: 3\n"
        f"  c:\n    <<: [*b, *a]\n    repeat: 2\n"
        f"batch: {{sequence_length: 64, tokens: 512}}\n"
    )
    path = tmp_path / "merged.yaml"
    path.write_text(text)
    sources = ol.load_job(path).sources
    assert [source.window for source in sources.values()] == [2, 3, 3]
    assert [source.repeat for source in sources.values()] == [True, True, 2]
    path.write_text(text.replace("    window: 3\n", "    window: 3\n    window: 4\n"))
    with pytest.raises(ol.errors.SpecError, match=r"merged\.yaml, line 9: 'window' stands twice, first in line 8"):
        ol.load_job(path)
    path.write_text(text.replace("    window: 3\n", "    windw: 3\n"))
    with pytest.raises(ol.errors.SpecError, match=r"line 8: sources\.b has no option 'windw'"):
        ol.load_job(path)


def test_steps_are_counted_in_k_wherever_they_are_keys(tmp_path, texts):
    path = yaml_file(tmp_path, texts, "100: {web: 1}", "50k: {web: 1}")
    assert ol.load_job(path).mix.weights == {0: {"web": 1, "code": 2}, 50 << 10: {"web": 1}}
    path.write_text(path.read_text().replace("{0: 256, 10: 1k}", "{0: 256, 2k: 1k}"))
    job = ol.load_job(path, ["mixture.weights.50k.code=3", "batch.document_limits.3k=512"])
    assert job.batch.document_limits == {0: 256, 2048: 1024, 3072: 512}
    assert job.mix.at(50 << 10)["code"] == 0.75


def test_a_source_whose_name_is_a_number_or_a_word_of_yaml_is_quoted(tmp_path, texts):
    source = f"{{paths: {texts}, transform: {{Tokenize: {{encoding: ByteTokenizer}}}}}}"
    (tmp_path / "names.yaml").write_text(
        f"sources: {{'no': {source}, 1: {source}}}\nbatch: {{sequence_length: 64, tokens: 512}}\n"
        "mixture: {weights: {'no': 3, 1: 1}}\n"
    )
    job = ol.load_job(tmp_path / "names.yaml")
    assert set(job.sources) == {"no", "1"}
    assert job.mix.at(0) == {"no": 0.75, "1": 0.25}


def test_options_of_your_own_functions_take_what_their_hints_say(tmp_path):
    path = tmp_path / "own.yaml"
    source = f'{{reader: "{HELPERS}:Numbered", rows: 50, transform: [{{"{HELPERS}:odd_hints": OPTIONS}}]}}'
    job = f"sources: {{mine: {source}}}\nbatch: {{sequence_length: 16, tokens: 64}}\n"
    path.write_text(job.replace("OPTIONS", "{limit: 2.5, table: {1: a}, kind: 4, anything: yes}"))
    (transform,) = ol.load_job(path).sources["mine"].transforms
    assert vars(transform)["given"] == (2.5, {1: "a"}, 4, True)
    path.write_text(job.replace("OPTIONS", "{limit: yes, table: {}, kind: 4, anything: yes}"))
    with pytest.raises(ol.errors.SpecError, match=r"odd_hints\.limit is a number, got true"):
        ol.load_job(path)


def test_an_empty_file_and_another_ending_are_told(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ol.errors.SpecError, match="this file has no fields"):
        ol.load_job(tmp_path / "empty.yaml")
    (tmp_path / "job.txt").write_text("")
    with pytest.raises(ol.errors.SpecError, match=r"does not end in \.py, \.yaml or \.yml"):
        ol.load_job(tmp_path / "job.txt")


# Overrides


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("mesh.dp=8", lambda job: job.mesh.dp == 8),
        ("batch.tokens=1M", lambda job: job.batch.tokens == 1 << 20),
        ("batch.samples=12", lambda job: (job.batch.samples, job.batch.tokens) == (12, None)),
        ("sources.web.window=4", lambda job: job.sources["web"].window == 4),
        ("sources.web.buffer_bytes=1GiB", lambda job: job.sources["web"].buffer_bytes == 1 << 30),
        ("sources.web.transform.1.keep=[]", lambda job: job.sources["web"].transform[1].keep == ()),
        ("sources.web.on_bad_row.budget=9", lambda job: job.sources["web"].on_bad_row.budget == 9),
        ("mixture.weights.100.code=3", lambda job: job.mix.at(100)["code"] == 0.75),
        ("mixture.unit=samples", lambda job: job.mix.unit == "samples"),
        ("batch.document_limits=null", lambda job: job.batch.document_limits is None),
        ("strategy=plain", lambda job: job.strategy.__name__ == "deal_rows"),
        ("num_workers=0", lambda job: job.num_workers == 0),
        ("seed=9", lambda job: job.seed == 9),
    ],
)
def test_words_change_what_a_job_declares(texts, word, found):
    job = python_job(texts)
    if word.startswith("batch.samples"):
        job = override(job, "batch.document_limits=null")
        job = override(job, "mixture.unit=samples")
    assert found(override(job, word))


def test_an_open_dp_stays_open(texts):
    job = override(override(python_job(texts), "mesh={}"), "mesh.cp=2")
    assert job.mesh.is_dp_open
    assert job.mesh.for_world(8).dp == 4


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("mesh.dq=3", r"mesh\.dq=3: mesh has no option 'dq'; did you mean 'dp'\?"),
        ("sources.wb.window=3", r"sources has no 'wb'; did you mean 'web'\?"),
        ("seed.x=3", r"seed is 7, which has no option 'x'"),
        ("mesh.dp=x", r"mesh\.dp is a whole number, got 'x'"),
        ("mesh.dp=[1", r"is not YAML"),
        (
            "sources.web.paths=3",
            r"sources\.web\.paths is text or a list, got 3; text that looks like that is quoted, as '3'",
        ),
        ("seed=1.5", r"seed=1\.5: seed is a whole number, got 1\.5"),
        ("sources={no: a.jsonl}", r"the key no is read as False; quote it if it is a name"),
        ("mesh..dp=3", r"an override is field=value"),
        ("batch.tokens=7", r"tokens per step must be a multiple of sequence_length"),
    ],
)
def test_a_wrong_word_is_told(texts, word, said):
    with pytest.raises(ol.errors.SpecError, match=said):
        override(python_job(texts), word)


def test_every_verb_takes_words_before_and_after_options(tmp_path, texts, capsys):
    path = str(yaml_file(tmp_path, texts))
    assert main(["run", path, "mesh.dp=1", "--steps", "1", "num_workers=0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert main(["explain", path, "--json", "mesh.dp=1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["microbatches"]) == 1
    with pytest.raises(SystemExit):
        main(["check", "mesh.dp=8", path])
    assert "the job file comes before mesh.dp=8" in capsys.readouterr().err
    assert main(["check", path, "mesh.dq=1"]) == 1
    assert "did you mean 'dp'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", path, "mesh.dp"])
    assert "a job is changed by FIELD=VALUE, as mesh.dp=8, got 'mesh.dp'" in capsys.readouterr().err


# The schema


def test_the_schema_accepts_a_job_and_names_a_wrong_key(tmp_path, texts):
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    good = yaml.safe_load(yaml_file(tmp_path, texts).read_text())
    plain = json.loads(json.dumps(good))  # keys of JSON are text
    assert [error.message for error in check.iter_errors(plain)] == []
    for path, value in ((("batch", "token"), 3), (("mesh", "dp"), []), (("sources", "web", "windw"), 3), (("batchs",), 1)):
        wrong: Any = json.loads(json.dumps(plain))
        inner = wrong
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        assert list(check.iter_errors(wrong)), path


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(job_schema())


def schema_errors(text: str) -> list[str]:
    plain = json.loads(json.dumps(yaml.safe_load(text)))  # keys of JSON are text
    return [error.message for error in validator().iter_errors(plain)]


def evaluated_job(texts: Path) -> ol.Job:
    """With what stands in mappings of mappings: sources of evaluations, sizes by steps, feedback."""
    tokenize = ol.Tokenize(encoding=ol.ByteTokenizer())
    held_out = {
        "plain": ol.Jsonl(str(texts), transform=tokenize),
        "csv": ol.formats.Csv("a.csv", {"text": pa.string()}, transform=tokenize, on_bad_row="skip"),
        "mine": helpers.Numbered(rows=50, transform=helpers.Shift(3)),
    }
    return dataclasses.replace(
        python_job(texts),
        evals={"val": ol.Eval(sources=held_out, every=10, limit=3), "all": ol.Eval(sources={"x": held_out["csv"]}, every=5)},
        batch=ol.Batch(sequence_length=512, tokens=4096, warm_up=ol.policies.WarmUp({0: 2048, 100: 4096})),
        cache=ol.Cache("kept", 10**7),
    )


def described_evals(job: ol.Job) -> dict[str, Any]:
    return {
        name: (each.every, each.limit, {key: Describer().text(source, key) for key, source in each.sources.items()})
        for name, each in job.evals.items()
    }


def test_what_is_printed_is_valid_and_loads_with_evaluations(tmp_path, texts):
    for job in (evaluated_job(texts), python_job(texts)):
        text = as_yaml(job)
        assert schema_errors(text) == []
        again = yaml_again(job, tmp_path)
        assert same_job(again, job)
        assert described_evals(again) == described_evals(job)
        assert "Eval:" not in text


@pytest.mark.parametrize(
    ("sources", "is_valid"),
    [
        ("mixture.csv", True),
        ("{table: mixture.csv}", True),
        (
            "{table: mixture.csv, groups: {web: 3}, transform: [{Tokenize: {encoding: ByteTokenizer}}], on_bad_row: skip}",
            True,
        ),
        ("{table: mixture.csv, windw: 3}", False),
        ("{table: {paths: x.jsonl}}", True),  # a source of that name
        ("{}", False),
        ("[x.jsonl]", False),
    ],
)
def test_the_schema_knows_tables_of_sources(sources, is_valid):
    text = f"sources: {sources}\nbatch: {{sequence_length: 8, tokens: 8}}\n"
    assert (schema_errors(text) == []) == is_valid


def test_a_source_is_written_alike_wherever_it_stands(tmp_path, texts):
    source = f"{{paths: {texts}, transform: {{Tokenize: {{encoding: ByteTokenizer}}}}}}"
    path = yaml_file(tmp_path, texts, "seed: 7", f"evals: {{val: {{sources: {{x: {source}}}, every: 10, limit: 3}}}}")
    assert schema_errors(path.read_text()) == []
    job = ol.load_job(path, [f"evals.val.sources.y={source}", f"sources.b={source}"])
    found = job.sources["b"]
    assert isinstance(found, ol.Jsonl)
    texts_of = {name: Describer().text(each, "x") for name, each in job.evals["val"].sources.items()}
    assert texts_of == dict.fromkeys(("x", "y"), Describer().text(found, "x"))
    with pytest.raises(
        ol.errors.SpecError, match=r"line 22: evals\.val\.sources\.x has no option 'pathes'; did you mean 'paths'"
    ):
        ol.load_job(yaml_file(tmp_path, texts, "seed: 7", "evals: {val: {sources: {x: {reader: Jsonl, pathes: a}}}}"))


def test_an_option_that_is_a_plain_mapping_or_a_value_takes_both_forms(tmp_path, texts):
    plain = ol.load_job(yaml_file(tmp_path, texts)).batch
    assert plain.document_limits == {0: 256, 10: 1024}
    grown = "document_limits: {sizes: {0: 256, 10: 1k}, ramp: linear}"
    batch = ol.load_job(yaml_file(tmp_path, texts, "document_limits: {0: 256, 10: 1k}", grown)).batch
    assert batch.document_limits == ol.policies.WarmUp({0: 256, 10: 1024}, ramp="linear")


def test_the_schema_is_printed_and_written(tmp_path, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
    assert main(["schema", "--write", str(tmp_path / "job.schema.json")]) == 0
    assert json.loads((tmp_path / "job.schema.json").read_text()) == job_schema()
    assert main(["schema", "--write", str(tmp_path / "no" / "x.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_completion_script_knows_verbs_and_options(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("prepare", "inspect", "autoscale", "token-file"):
        assert word in script


@settings(max_examples=50, deadline=None)
@given(
    dp=st.integers(1, 64),
    length=st.sampled_from([16, 128, 4096]),
    rows=st.integers(1, 64),
    weights=st.dictionaries(st.sampled_from(["a", "b.c", "no", "1"]), st.floats(0.01, 100), min_size=1),
    window=st.one_of(st.none(), st.integers(1, 9)),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_any_job_of_plain_values_survives_both_forms(tmp_path_factory, dp, length, rows, weights, window, shuffle, seed):
    job = ol.Job(
        sources={name: ol.Parquet(f"/data/{name}/*.parquet", window=window, shuffle=shuffle) for name in weights},
        batch=ol.Batch(sequence_length=length, tokens=rows * length),
        mixture=ol.Mixture(weights),
        mesh=ol.Mesh(dp=dp),
        seed=seed,
    )
    folder = tmp_path_factory.mktemp("forms")
    (folder / "job.yaml").write_text(as_yaml(job))
    assert schema_errors((folder / "job.yaml").read_text()) == []
    (folder / "plain_job.py").write_text(as_python(job))
    again = ol.load_job(folder / "job.yaml")
    space: dict[str, Any] = {}
    exec((folder / "plain_job.py").read_text(), space)
    for found in (again, space["job"]):
        assert (found.batch, found.mixture, found.mesh, found.seed) == (job.batch, job.mixture, job.mesh, job.seed)
        assert dict(found.sources) == dict(job.sources)
    assert Describer().digest(again.sources, "sources") == Describer().digest(dict(job.sources), "sources")
