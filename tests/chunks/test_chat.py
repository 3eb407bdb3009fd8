"""`ol.Chat` and its siblings: tokens and losses of conversations, compared with what transformers makes of them."""

import datetime
import json
import pickle

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.chunks.transforms.chat_template import read_messages
from overlord.errors import DataError, SchemaError, SpecError
from tests.chunks import chat_templates
from tests.chunks.chat_templates import BARE, CHATML, CONVERSATION, REASONING, SPECIAL_TOKENS, TOOLS, WEATHER, WITH_TOOLS

CORPUS = ["What is the capital of France? Paris. Lima is a city in Perú, and it is 19.5 °C there: {'degrees': 19.5}"] * 3
KINDS = ("byte_level", "metaspace", "words")


def train(kind):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers_by_kind():
    """Tokenizers of transformers: byte-level BPE, one with a mark for spaces, and one that changes its text."""
    transformers = pytest.importorskip("transformers")
    return {
        kind: transformers.PreTrainedTokenizerFast(
            tokenizer_object=train(kind), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        for kind in KINDS
    }


def by_transformers(tokenizer, template, messages, tools=None):
    made = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


def by_overlord(tokenizer, template, messages, tools=None, **options):
    chat = ol.Chat(encoding=tokenizer, template=template, tools="tools", **options)
    table = pa.table({"messages": [json.dumps(messages)], "tools": [json.dumps(tools or [])]})
    row = chat(table).to_pylist()[0]
    return row["tokens"], row["loss_mask"]


# Where a tokenizer strips the space at the end of a span, transformers marks all tokens up to the end of the conversation;
# at the beginning, none from there on.
STRIPPED = {("inst", "words"), ("gemma", "words"), ("gemma", "metaspace")}
ALIKE = [(name, kind) for name in chat_templates.BY_NAME for kind in KINDS if (name, kind) not in STRIPPED]


@pytest.mark.parametrize(("name", "kind"), ALIKE)
def test_tokens_and_masks_are_those_of_transformers(tokenizers_by_kind, kind, name):
    tokenizer, template = tokenizers_by_kind[kind], chat_templates.BY_NAME[name]
    for messages in (CONVERSATION, [{"role": "system", "content": "Be brief."}, *CONVERSATION]):
        ids, mask = by_overlord(tokenizer, template, messages)
        assert (ids, mask) == by_transformers(tokenizer, template, messages)
        assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_tools_are_rendered_as_transformers_renders_them(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    assert by_overlord(tokenizer, TOOLS, WITH_TOOLS, [WEATHER]) == by_transformers(tokenizer, TOOLS, WITH_TOOLS, [WEATHER])


pieces = st.sampled_from([*"abé °🙂\n<|.P ", "<|im_end|>", "</s>", "Paris"])
texts = st.lists(pieces, min_size=1, max_size=12).map("".join)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(chat_templates.BY_NAME)),
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
)
def test_any_conversation_has_the_tokens_and_masks_of_transformers(tokenizers_by_kind, name, turns):
    tokenizer, template = tokenizers_by_kind["byte_level"], chat_templates.BY_NAME[name]
    messages = [
        {"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    ids, mask = by_transformers(tokenizer, template, messages)
    found_ids, found = by_overlord(tokenizer, template, messages)
    assert found_ids == ids
    if name == "bare" and any(ord(text[-1]) > 127 for _, text in turns):
        # transformers finds the end of a span by the first token of its last character, and lacks its other bytes.
        assert all(ours >= theirs for ours, theirs in zip(found, mask, strict=True))
    else:
        assert found == mask


def test_all_tokens_of_an_emoji_at_the_end_of_a_turn_have_a_loss(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte_level"]
    ids, mask = by_overlord(tokenizer, BARE, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ok 🙂"}])
    assert tokenizer.decode([token for token, has_loss in zip(ids, mask, strict=True) if has_loss]) == "ok 🙂"


def test_generations_inside_a_macro_are_found(tokenizers_by_kind):
    messages = [
        CONVERSATION[0],
        {"role": "assistant", "reasoning_content": "Easy.", "content": "Paris"},
        CONVERSATION[2],
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Lima"},
    ]
    tokenizer = tokenizers_by_kind["byte_level"]
    ids, mask = by_overlord(tokenizer, REASONING, messages)
    trained = tokenizer.decode([token for token, has_loss in zip(ids, mask, strict=True) if has_loss])
    assert trained == "Paris<|im_end|>\n<think>\nHm.\n</think>\n\nLima<|im_end|>\n"
    assert ids == tokenizer.apply_chat_template(messages, chat_template=REASONING, return_dict=True)["input_ids"]


def test_turns_without_markers_have_the_loss_of_marked_ones(tokenizers_by_kind):
    unmarked = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for tokenizer in tokenizers_by_kind.values():
        assert by_overlord(tokenizer, unmarked, CONVERSATION, loss="turns") == by_transformers(
            tokenizer, CHATML, CONVERSATION
        )


def test_the_library_tiktoken_functions_and_bytes_agree_on_what_has_a_loss(tokenizers_by_kind):
    import tiktoken

    special = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    as_tiktoken = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens=special
    )
    fast = tokenizers_by_kind["byte_level"]
    messages = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "Perú 🙂"}]
    expected = "Perú 🙂<|im_end|>"
    ids, mask = by_overlord(fast.backend_tokenizer, CHATML, messages)
    assert fast.decode([t for t, m in zip(ids, mask, strict=True) if m]) == expected
    ids, mask = by_overlord(as_tiktoken, CHATML, messages)
    assert as_tiktoken.decode([t for t, m in zip(ids, mask, strict=True) if m]) == expected
    ids, mask = by_overlord(ol.ByteTokenizer(), CHATML, messages)
    assert bytes(t for t, m in zip(ids, mask, strict=True) if m).decode() == expected
    ids, mask = by_overlord(lambda text: list(text.encode()), CHATML, messages)
    assert bytes(t for t, m in zip(ids, mask, strict=True) if m).decode() == expected


def test_a_slow_tokenizer_of_transformers_is_taken_as_it_is():
    transformers = pytest.importorskip("transformers")

    class Letters(transformers.PreTrainedTokenizer):
        """One token per letter, in Python."""

        def __init__(self, **options):
            self.letters = {chr(i): i for i in range(128)}
            super().__init__(**options)

        @property
        def vocab_size(self):
            return 128

        def get_vocab(self):
            return {**self.letters, **self.added_tokens_encoder}

        def _tokenize(self, text, **options):
            return list(text)

        def _convert_token_to_id(self, token):
            return self.letters.get(token, 0)

        def _convert_id_to_token(self, index):
            return chr(index)

    tokenizer = Letters(extra_special_tokens={"begin": "<|im_start|>", "end": "<|im_end|>"}, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    assert ol.Tokenize(encoding=tokenizer)(pa.table({"text": ["ab"]})).to_pylist() == [{"tokens": [97, 98]}]
    ids, mask = by_overlord(tokenizer, None, CONVERSATION)
    assert ids == tokenizer.apply_chat_template(CONVERSATION, return_dict=True)["input_ids"]
    trained = tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m])
    assert trained.replace(" ", "") == "Paris.Ithasbeensoforalongtime.<|im_end|>Lima<|im_end|>"


def test_a_fast_tokenizer_is_taken_as_it_is_by_tokenize(tokenizers_by_kind):
    for tokenizer in tokenizers_by_kind.values():
        table = ol.Tokenize(encoding=tokenizer)(pa.table({"text": ["Lima is a city"]}))
        assert table.to_pylist()[0]["tokens"] == tokenizer("Lima is a city", add_special_tokens=False)["input_ids"]


def test_the_template_and_the_special_tokens_beside_a_tokenizer_file_are_used(tmp_path, tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte_level"]
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": chat_templates.LLAMA_3, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = by_transformers(tokenizer, chat_templates.LLAMA_3, CONVERSATION)
    assert by_overlord(str(tmp_path / "tokenizer.json"), None, CONVERSATION) == expected
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    expected = by_transformers(tokenizer, CHATML, CONVERSATION)
    assert by_overlord(tmp_path / "tokenizer.json", None, CONVERSATION) == expected
    assert by_overlord(tokenizer, tmp_path / "chat_template.jinja", CONVERSATION) == expected


def rows_of(transform, **columns):
    return transform(pa.table(columns)).to_pylist()


def trained_text(row):
    return bytes(t for t, m in zip(row["tokens"], row["loss_mask"], strict=True) if m).decode()


def test_structs_of_arrow_are_read_without_the_nulls_that_others_left_in_them():
    chat = ol.Chat(encoding=ol.ByteTokenizer(), template=TOOLS)
    column = pa.array([WITH_TOOLS, CONVERSATION])
    assert column.type.value_type.get_field_index("tool_calls") >= 0
    as_text = rows_of(chat, messages=[json.dumps(WITH_TOOLS), json.dumps(CONVERSATION)])
    assert rows_of(chat, messages=column) == as_text


def test_weights_of_messages_are_weights_of_their_tokens():
    messages = [*CONVERSATION[:1], {**CONVERSATION[1], "weight": 0}, *CONVERSATION[2:3], {**CONVERSATION[3], "weight": 0.25}]
    for loss in ("generation", "turns"):
        chat = ol.Chat(encoding=ol.ByteTokenizer(), template=CHATML, weight="weight", loss=loss)
        row = rows_of(chat, messages=[json.dumps(messages)])[0]
        assert set(row["loss_weights"]) == {0.0, 0.25}
        weighted = bytes(t for t, w in zip(row["tokens"], row["loss_weights"], strict=True) if w).decode()
        assert weighted == "Lima<|im_end|>"


def test_a_prompt_is_encoded_as_it_is_when_the_model_is_used():
    made = ol.PromptCompletion(encoding=ol.ByteTokenizer(), bos=1, eos=2)
    assert rows_of(made, prompt=["2+2="], completion=["4"]) == [
        {"tokens": [1, *b"2+2=", *b"4", 2], "loss_mask": [0, 0, 0, 0, 0, 1, 1]}
    ]


def test_prompts_of_messages_have_the_loss_on_the_answer():
    made = ol.PromptCompletion(encoding=ol.ByteTokenizer(), template=CHATML)
    row = rows_of(made, prompt=[CONVERSATION[:3]], completion=[CONVERSATION[3:]])[0]
    assert trained_text(row) == "Lima<|im_end|>"


def test_a_pair_has_both_sides_one_after_the_other():
    pairs = ol.PreferencePairs(encoding=ol.ByteTokenizer(), prompt="prompt", eos=0)
    row = rows_of(pairs, prompt=["ab"], chosen=["c"], rejected=["de"])[0]
    assert row == {"tokens": [*b"abc", 0, *b"abde", 0], "loss_mask": [0, 0, 1, 1, 0, 0, 1, 1, 1], "chosen_tokens": 4}


def test_pairs_of_conversations_have_the_loss_on_the_last_turn():
    other = [*CONVERSATION[:3], {"role": "assistant", "content": "Cusco"}]
    pairs = ol.PreferencePairs(encoding=ol.ByteTokenizer(), template=CHATML)
    row = rows_of(pairs, chosen=[CONVERSATION], rejected=[other])[0]
    assert trained_text(row) == "Lima<|im_end|>Cusco<|im_end|>"


def test_a_transform_may_be_sent_to_another_process(tokenizers_by_kind):
    chat = ol.Chat(encoding=tokenizers_by_kind["byte_level"], template=CHATML)
    table = pa.table({"messages": [CONVERSATION]})
    assert pickle.loads(pickle.dumps(chat))(table).equals(chat(table))


def test_a_date_is_declared_so_that_tokens_are_the_same_tomorrow():
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    with pytest.raises(SpecError, match=r"writes today's date.*today=datetime\.date"):
        rows_of(ol.Chat(encoding=ol.ByteTokenizer(), template=dated), messages=[CONVERSATION])
    chat = ol.Chat(encoding=ol.ByteTokenizer(), template=dated, today=datetime.date(2024, 7, 26))
    assert bytes(rows_of(chat, messages=[CONVERSATION])[0]["tokens"]).startswith(b"26 Jul 2024<|im_start|>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "no {% generation %} markers.*loss='turns'"),
        ({"template": None}, "ByteTokenizer has no chat template: give one with template="),
        ({"template": "no such file"}, "there is no file no such file"),
        ({"template": "{% for %}"}, "the chat template cannot be read: line 1"),
        ({"loss": "some"}, "loss is 'generation', 'turns' or 'all', got 'some'"),
        ({"loss": "all", "weight": "w"}, "does not go with loss='all'"),
        ({"keep": "id"}, "sequence of column names"),
        ({"keep": ("loss_mask",)}, "cannot be kept"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(options, message):
    with pytest.raises(SpecError, match=message):
        ol.Chat(**{"encoding": ol.ByteTokenizer(), "template": CHATML, **options})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "'messages' must be a list of messages.*got an empty list"),
        (["hello"], r"'messages'\[0\] must be a message.*got str"),
        ([{"content": "hello"}], r"'messages'\[0\] has no role.*it has \['content'\]"),
        (CONVERSATION[:1], "no token of this row has a loss.*an assistant message"),
        ([{"role": "user", "content": "\ufdd0"}, *CONVERSATION[1:2]], "U\\+FDD0"),
        ([{"role": "user"}], "the chat template fails on this conversation|refuses this conversation"),
    ],
)
def test_a_bad_conversation_says_what_is_wrong_and_where(messages, message):
    with pytest.raises(DataError, match=message) as error:
        rows_of(ol.Chat(encoding=ol.ByteTokenizer(), template=CHATML), messages=[json.dumps(messages)])
    assert error.value.__notes__ == ["in row 0 of the table"]


def test_a_template_that_refuses_a_conversation_is_quoted():
    chat = ol.Chat(encoding=ol.ByteTokenizer(), template=chat_templates.INST, variables={"bos_token": "", "eos_token": ""})
    with pytest.raises(DataError, match="refuses this conversation: only user and assistant turns are known"):
        rows_of(chat, messages=[[{"role": "tool", "content": "x"}]])


def test_turns_that_a_template_writes_differently_later_cannot_be_told_apart():
    unmarked = REASONING.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    messages = [
        CONVERSATION[0],
        {"role": "assistant", "reasoning_content": "Easy.", "content": "Paris"},
        *CONVERSATION[2:],
    ]
    with pytest.raises(DataError, match=r"message 1 cannot be found.*{% generation %} markers"):
        rows_of(ol.Chat(encoding=ol.ByteTokenizer(), template=unmarked, loss="turns"), messages=[messages])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"chosen": [None], "rejected": ["b"]}, "the pair has no 'chosen': it is null"),
        ({"chosen": ["a"], "rejected": [""]}, "the pair has no 'rejected': it is empty"),
        ({"prompt": [None], "chosen": ["a"], "rejected": ["b"]}, "'prompt' is null, 'chosen' is text"),
        (
            {"prompt": [CONVERSATION[:1]], "chosen": ["a"], "rejected": ["b"]},
            "'prompt' is a list of messages, 'chosen' is text",
        ),
    ],
)
def test_a_pair_that_lacks_a_side_says_which(columns, message):
    pairs = ol.PreferencePairs(encoding=ol.ByteTokenizer(), prompt="prompt")
    with pytest.raises(DataError, match=message):
        rows_of(pairs, **{"prompt": ["p"], **columns})


def test_pairs_without_prompts_need_a_template_and_answers():
    with pytest.raises(SpecError, match="whole conversations, and need a chat template"):
        ol.PreferencePairs(encoding=ol.ByteTokenizer())
    pairs = ol.PreferencePairs(encoding=ol.ByteTokenizer(), template=CHATML)
    with pytest.raises(DataError, match="'chosen' must end with an assistant message; it ends with one of 'user'"):
        rows_of(pairs, chosen=[CONVERSATION[:3]], rejected=[CONVERSATION])
    with pytest.raises(SchemaError, match="PreferencePairs: no column 'rejected'; the columns are"):
        rows_of(pairs, chosen=[CONVERSATION])


def test_completions_that_are_missing_or_empty_are_bad_rows():
    made = ol.PromptCompletion(encoding=ol.ByteTokenizer(), eos=0)
    with pytest.raises(DataError, match="the completion is missing: 'completion' is null"):
        rows_of(made, prompt=["a"], completion=pa.array([None], pa.string()))
    with pytest.raises(DataError, match="no token of this row has a loss: the completion is empty"):
        rows_of(made, prompt=["a"], completion=[""])
    with pytest.raises(DataError, match="lists of messages, which need a chat template"):
        rows_of(made, prompt=[CONVERSATION[:1]], completion=[CONVERSATION[1:2]])
    with pytest.raises(DataError, match="text, but not the JSON of a list"):
        read_messages("[{", "'messages'")
