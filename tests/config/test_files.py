"""Config files: loaded, or refused in one line that says where."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from jaxrl.config import ExperimentConfig, load_config_file, preset, save_config
from jaxrl.config.published import published_record
from jaxrl.errors import ConfigError

HEAD = "from jaxrl.config import DataConfig, ExperimentConfig, ModelConfig, TrainConfig\n"
GOOD = (
    HEAD
    + """
def get_config():
    data = DataConfig(source="reasoning_gym", task="spell_backward")
    return ExperimentConfig(model=ModelConfig(), data=data, name="mine")
"""
)


CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_load_config_file_shipped_config_loads_and_says_what_it_costs(path, tmp_path, monkeypatch):
    # Some start from a published model, of which the shape is read here.
    (tmp_path / "config.json").write_text(json.dumps(published_record(preset("smollm2-135m"))))
    monkeypatch.setenv("SMOLLM2", str(tmp_path))

    config = load_config_file(path)

    assert isinstance(config, ExperimentConfig)
    head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert f"jaxrl train --config=configs/{path.name}" in head
    assert "cost:" in head
    assert "result:" in head


def test_load_config_file_example_of_the_page_loads(repo_root, tmp_path):
    page = (repo_root / "docs" / "configuration.md").read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(page.split("```python\n")[1].split("```")[0])

    assert load_config_file(tmp_path / "example.py").name == "reverse"


def test_load_config_file_returns_its_config_and_leaves_no_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GOOD)

    assert load_config_file(path).name == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_load_config_file_json_of_a_run_is_read(tmp_path):
    (tmp_path / "mine.py").write_text(GOOD)
    config = load_config_file(tmp_path / "mine.py")
    save_config(config, tmp_path / "config.json")

    assert load_config_file(tmp_path / "config.json") == config


def test_load_config_file_dataclass_of_the_file_itself_works(tmp_path):
    path = tmp_path / "mine.py"
    own = "import dataclasses\n@dataclasses.dataclass\nclass Own:\n    x: 'int' = 1\n"
    path.write_text("from __future__ import annotations\n" + own + GOOD)

    assert load_config_file(path).name == "mine"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", ": must define get_config() -> ExperimentConfig"),
        ("get_config = 3\n", ": must define get_config() -> ExperimentConfig"),
        (
            "def get_config():\n    return {}\n",
            ": get_config() must return an ExperimentConfig, not dict",
        ),
        ("def get_config(:\n", ":1: SyntaxError: invalid syntax"),
        ("import nothing_of_that_name\n", ":1: ModuleNotFoundError: No module named"),
        ("def get_config():\n    x = 1\n    return x / 0\n", ":3: ZeroDivisionError: division by"),
        ("def get_config():\n    raise ValueError\n", ":2: ValueError"),
        ("def get_config(name):\n    return 1\n", ": TypeError: get_config() missing 1 required"),
        (
            HEAD + "def get_config():\n    return TrainConfig(\n        steps=-1)\n",
            ":3: train.steps=-1 must be between 0 and 2147483647",
        ),
        (
            HEAD + "def get_config():\n    return TrainConfig(stps=1)\n",
            ":3: train.stps does not exist; did you mean train.steps?",
        ),
        ("import sys\nsys.exit(0)\n", ": the file called sys.exit(0)"),
        ("from jaxrl.config import TrianConfig\n", ":1: ImportError: cannot import name 'Trian"),
    ],
)
def test_load_config_file_bad_file_message_is_one_line_with_the_place(tmp_path, source, message):
    path = tmp_path / "bad.py"
    path.write_text(source)

    with pytest.raises(ConfigError) as error:
        load_config_file(path)

    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


def test_load_config_file_missing_file_message_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.py: cannot be read: No such file or directory"):
        load_config_file(tmp_path / "none.py")
