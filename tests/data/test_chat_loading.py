"""Where chat templates and stop tokens of a folder are found, and that `save` keeps them."""

from __future__ import annotations

import json

import pytest
from data.chat_cases import TEMPLATES, byte_tokenizer, chat_of

from jaxrl.data.chat import load_chat_template
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import DataError, OutputError

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path):
    """Folder of a tokenizer without a template."""
    byte_tokenizer("gemma").save(tmp_path)
    return tmp_path


def configure(folder, **values):
    """Add to tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


def load(folder):
    return load_chat_template(str(folder), load_tokenizer(str(folder)))


def test_load_text_in_the_config(folder):
    configure(folder, chat_template="{{ bos_token }}hello")

    chat = load(folder)

    assert chat.render(USER) == "<bos>hello"
    assert chat.name == str(folder / "tokenizer_config.json")


def test_load_file_goes_before_the_config(folder):
    configure(folder, chat_template="config")
    (folder / "chat_template.jinja").write_text("file ü", encoding="utf-8")

    chat = load(folder)

    assert chat.render(USER) == "file ü"
    assert chat.name == str(folder / "chat_template.jinja")


def test_load_by_the_path_of_the_tokenizer(folder):
    configure(folder, chat_template="x")
    path = str(folder / "tokenizer.json")

    assert load_chat_template(path, load_tokenizer(path)).render(USER) == "x"


def test_load_list_has_a_template_for_tools(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    configure(folder, chat_template=named)

    chat = load(folder)

    assert chat.render(USER) == "plain"
    assert chat.render(USER, tools=[{"name": "f"}]) == "tools"


def test_load_more_templates_from_their_folder(folder):
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")

    assert load(folder).render(USER, tools=[]) == "tools"


def test_load_roles_that_the_config_declares_are_variables(folder):
    configure(folder, chat_template="{{ unk_token }}{{ pad_token is defined }}", unk_token="<pad>")

    assert load(folder).render(USER) == "<pad>True"


def test_load_without_template_says_where_it_looked(folder):
    with pytest.raises(DataError) as caught:
        load(folder)

    assert str(folder / "chat_template.jinja") in str(caught.value)
    assert f"chat_template in {folder / 'tokenizer_config.json'}" in str(caught.value)


def test_load_without_default_names_the_others(folder):
    configure(folder, chat_template=[{"name": "rag", "template": "x"}])

    with pytest.raises(DataError, match=r"\(there are only: rag\)"):
        load(folder)


@pytest.mark.parametrize("name", ["chars", "bytes"])
def test_load_built_in_tokenizers_have_none(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A file that happens to have that name, and a template beside it, are not meant.
    (tmp_path / name).write_text("")
    (tmp_path / "chat_template.jinja").write_text("x")

    with pytest.raises(DataError, match=f"the tokenizer '{name}', which has none"):
        load_chat_template(name, load_tokenizer(name))


@pytest.mark.parametrize(
    "value",
    [3, [], ["x"], [{"name": "default"}], [{"name": "../x", "template": "y"}], {"default": "x"}],
)
def test_load_config_with_something_else_raises(folder, value):
    configure(folder, chat_template=value)

    with pytest.raises(DataError, match="chat_template must be a text, or a list of records"):
        load(folder)


def test_load_template_that_does_not_compile_names_file_and_line(folder):
    (folder / "chat_template.jinja").write_text("\n{% if %}")

    with pytest.raises(DataError, match=r"chat_template\.jinja, line 2: "):
        load(folder)


def test_load_template_that_is_not_utf8_raises(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(DataError, match=r"chat_template\.jinja cannot be read"):
        load(folder)


def test_save_keeps_templates_roles_and_stops(tmp_path):
    templates = {"default": TEMPLATES["gemma"], "tool_use": "tools\r\n"}
    tokenizer = chat_of("gemma", chat_templates=templates, stop_ids=(260,)).tokenizer

    tokenizer.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))

    assert loaded.chat_templates == templates
    assert loaded.stop_ids == tokenizer.stop_ids == (2, 260)
    assert loaded.role_tokens == {**tokenizer.role_tokens, "pad_token": "<pad>"}
    text = load(tmp_path).render(USER)
    assert text == chat_of("gemma").render(USER)


def test_save_changes_only_the_stops_of_a_generation_config(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.5, "eos_token_id": 1}')

    byte_tokenizer("gemma", stop_ids=(260,)).save(tmp_path)

    assert json.loads(path.read_text()) == {"temperature": 0.5, "eos_token_id": [2, 260]}


@pytest.mark.parametrize(
    ("given", "expected"), [(None, (2,)), (2, (2,)), (260, (2, 260)), ([260, 2, 1], (2, 260, 1))]
)
def test_load_tokenizer_stop_ids_are_eos_and_those_of_the_generation_config(
    folder, given, expected
):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))

    assert load_tokenizer(str(folder)).stop_ids == expected


@pytest.mark.parametrize("given", [[999999], "2", [True], [2.0], [-1], {"a": 1}, 10**30])
def test_load_tokenizer_stop_id_that_is_none_raises(folder, given):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))

    with pytest.raises(DataError, match=r"generation_config\.json: eos_token_id=.*no token id"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("text", "rule"),
    [("{", "is not JSON"), ("[]", "must be a JSON object"), ("[" * 100_000, "is not JSON")],
    ids=["cut off", "list", "nested without end"],
)
def test_load_tokenizer_broken_file_beside_it_is_named(folder, name, text, rule):
    (folder / name).write_text(text)

    with pytest.raises(DataError, match=f"{name} {rule}"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("token", [5, ["<eos>"], {"content": 5}, {}, False])
def test_load_tokenizer_role_that_is_no_text_raises(folder, token):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))

    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token=.* must be a text"):
        load_tokenizer(str(folder))


def test_save_into_a_file_is_output_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match="cannot write the tokenizer to .*file"):
        load_tokenizer("bytes").save(tmp_path / "file")
